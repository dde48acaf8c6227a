"""Promised, unfinished prompt groups: reserve -> admit -> dispatch -> seal each sibling -> finalize -> release.

    reserved --admit--> admitted --dispatch/seal/abandon--> generating
    generating --last sibling sealed--> ready_to_finalize --begin_finalize--> finalizing --release--> (replay buffer)
    finalizing --stop_finalizing--> ready_to_finalize;  finalizing --mark_finalization_unknown--> not captured any more
    any but the last two --discard--> gone

Records are immutable and replaced on every change, so a capture is a copy of references.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpu_workers.controller.barrier import Cut, Mutation
from storage.errors import BrokenInvariant, FinalizationUnknown
from storage.records import (
    AttemptStatus,
    EpisodeRecord,
    GroupPhase,
    GroupStatus,
    LedgerGroup,
    PromptRef,
    RecoveryLevel,
    SealedSibling,
    Sibling,
    rollout_id,
)

_RUNNING = (AttemptStatus.DISPATCHED, AttemptStatus.RESUMED)


@dataclass(frozen=True, slots=True)
class StagedTurn:
    """The captured call of a finished turn whose sibling still runs: its key in the data plane, digest and tokens.

    `episode`: how the environment stood behind the turn, where that is known; only the newest turn's is kept.
    """

    key: str
    digest: str
    num_tokens: int
    episode: EpisodeRecord | None = field(default=None, repr=False)


class RecoveryLedger:
    """Who is owed what. Control-plane data only; tokens lie in the data plane under the sealed call keys."""

    def __init__(self) -> None:
        self._groups: dict[str, LedgerGroup] = {}
        self._staged: dict[str, tuple[StagedTurn, ...]] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._groups

    def group(self, group_id: str) -> LedgerGroup:
        """The current record of a group."""
        try:
            return self._groups[group_id]
        except KeyError as missing:
            raise BrokenInvariant(f"group {group_id} is not in the recovery ledger") from missing

    def groups(self) -> list[LedgerGroup]:
        """All groups in dispatch order."""
        return sorted(self._groups.values(), key=lambda group: group.order)

    def admitted(self) -> list[LedgerGroup]:
        """Admitted, unfinished groups in dispatch order."""
        return [group for group in self.groups() if group.phase is GroupPhase.ADMITTED]

    def reserve(
        self,
        mutation: Mutation,
        prompt: PromptRef,
        *,
        level: RecoveryLevel,
        batch: int,
        order: int,
        size: int,
    ) -> LedgerGroup:
        """Promise a prompt: it is owned here from now on, but can't be dispatched yet."""
        siblings = tuple(Sibling(index) for index in range(size))
        return self._insert(mutation, LedgerGroup(prompt, level, batch, order, siblings))

    def replace_dropped(
        self,
        mutation: Mutation,
        dropped: LedgerGroup,
        prompt: PromptRef,
        *,
        level: RecoveryLevel,
        start_version: int,
    ) -> LedgerGroup:
        """Give a discarded group's place (batch, order, stamp) to another prompt, which starts from today's weights."""
        siblings = tuple(Sibling(s.generation_index) for s in dropped.siblings)
        fresh = replace(
            dropped,
            prompt=prompt,
            level=level,
            siblings=siblings,
            status=GroupStatus.GENERATING,
            start_version=start_version,
        )
        return self._insert(mutation, fresh)

    def admit(
        self, mutation: Mutation, batch: int, *, target_step: int | None, start_version: int
    ) -> list[LedgerGroup]:
        """Admit every group that was reserved in one batch: one stamp for all, once."""
        mutation.require_live()
        admitted = []
        for group in self.groups():
            if group.batch == batch:
                if group.phase is GroupPhase.ADMITTED:
                    raise BrokenInvariant(f"group {group.group_id} is admitted twice")
                admitted.append(
                    self._put(
                        replace(
                            group,
                            phase=GroupPhase.ADMITTED,
                            target_step=target_step,
                            start_version=start_version,
                        )
                    )
                )
        return admitted

    def dispatch(self, mutation: Mutation, group_id: str) -> list[Sibling]:
        """Mark every unsealed sibling as running; returns them with their attempt numbers. Staged turns stay."""
        mutation.require_live()
        group = self.group(group_id)
        if group.phase is not GroupPhase.ADMITTED:
            raise BrokenInvariant(f"group {group_id} is dispatched before it was admitted")
        running = [replace(s, status=AttemptStatus.DISPATCHED) for s in group.siblings if s.sealed is None]
        for sibling in running:
            self._put_sibling(group_id, sibling)
        return running

    def is_current(self, group_id: str, generation_index: int, attempt: int) -> bool:
        """Whether a result belongs to the attempt that is owed now."""
        group = self._groups.get(group_id)
        return group is not None and group.siblings[generation_index].attempt == attempt

    def staged(self, rollout: str) -> tuple[StagedTurn, ...]:
        """The finished turns of a sibling that still runs, in order."""
        return self._staged.get(rollout, ())

    def staged_turns(self) -> list[StagedTurn]:
        """All finished turns of siblings that still run."""
        return [turn for turns in self._staged.values() for turn in turns]

    def staged_keys(self, group_id: str | None = None) -> list[str]:
        """Keys of all staged calls that no sealed sibling holds, or of those of one group."""
        if group_id is None:
            return [turn.key for turn in self.staged_turns()]
        siblings = self.group(group_id).siblings
        return [t.key for s in siblings for t in self.staged(rollout_id(group_id, s.generation_index))]

    def stage(self, mutation: Mutation, group_id: str, generation_index: int, turn: StagedTurn) -> None:
        """Record a finished turn of a running sibling."""
        mutation.require_live()
        if self.group(group_id).siblings[generation_index].sealed is not None:
            raise BrokenInvariant(f"sealed sibling {group_id}_g{generation_index} has finished turn {turn.key}")
        rollout = rollout_id(group_id, generation_index)
        before = self.staged(rollout)
        if before:
            before = (*before[:-1], replace(before[-1], episode=None))
        self._staged[rollout] = (*before, turn)

    def refuse(
        self, mutation: Mutation, group_id: str, generation_index: int, *, keeps_tokens: bool = False
    ) -> Sibling:
        """Nothing was begun: the same attempt is dispatched again, with the turns and the tokens that it had."""
        mutation.require_live()
        sibling = self.group(group_id).siblings[generation_index]
        kept = keeps_tokens or self.staged(rollout_id(group_id, generation_index))
        waiting = replace(sibling, status=AttemptStatus.RESUMED if kept else AttemptStatus.RESERVED)
        self._put_sibling(group_id, waiting)
        return waiting

    def seal(self, mutation: Mutation, group_id: str, generation_index: int, sealed: SealedSibling) -> bool:
        """Record a sibling's terminal result. An equal result again is a no-op (False), a different one an error."""
        mutation.require_live()
        sibling = self.group(group_id).siblings[generation_index]
        if sibling.sealed is not None:
            if sibling.sealed == sealed:
                return False
            raise BrokenInvariant(f"sibling {group_id}_g{generation_index} is sealed again with another result")
        self._put_sibling(group_id, replace(sibling, status=AttemptStatus.SEALED, sealed=sealed))
        self._staged.pop(rollout_id(group_id, generation_index), None)
        group = self.group(group_id)
        if all(s.sealed is not None for s in group.siblings):
            self._put(replace(group, status=GroupStatus.READY_TO_FINALIZE))
        return True

    def abandon(self, mutation: Mutation, group_id: str, generation_index: int, *, infrastructure: bool) -> Sibling:
        """End a failed attempt; the sibling waits for its next one, its failure counted.

        The caller clears the calls of its finished turns (`staged`) before.
        """
        mutation.require_live()
        sibling = self.group(group_id).siblings[generation_index]
        if sibling.sealed is not None:
            raise BrokenInvariant(f"sealed sibling {group_id}_g{generation_index} can't be abandoned")
        failed = replace(
            sibling,
            attempt=sibling.attempt + 1,
            status=AttemptStatus.RESERVED,
            infrastructure_failures=sibling.infrastructure_failures + infrastructure,
            data_failures=sibling.data_failures + (not infrastructure),
        )
        self._put_sibling(group_id, failed)
        self._staged.pop(rollout_id(group_id, generation_index), None)
        return failed

    def interrupt(self, mutation: Mutation, group_id: str, generation_index: int) -> Sibling:
        """Whatever ran an attempt failed, but its tokens are there: the attempt goes on, its failure counted."""
        mutation.require_live()
        sibling = self.group(group_id).siblings[generation_index]
        if sibling.status is not AttemptStatus.DISPATCHED:
            raise BrokenInvariant(f"sibling {group_id}_g{generation_index} is interrupted while {sibling.status.value}")
        interrupted = replace(
            sibling,
            status=AttemptStatus.RESUMED,
            infrastructure_failures=sibling.infrastructure_failures + 1,
            resumes=sibling.resumes + 1,
        )
        self._put_sibling(group_id, interrupted)
        return interrupted

    def begin_finalize(self, mutation: Mutation, group_id: str) -> LedgerGroup:
        """The group's rows are being assembled; it can't be discarded any more."""
        mutation.require_live()
        group = self.group(group_id)
        if group.status is not GroupStatus.READY_TO_FINALIZE:
            raise BrokenInvariant(f"group {group_id} is finalized while {group.status.value}")
        return self._put(replace(group, status=GroupStatus.FINALIZING))

    def stop_finalizing(self, mutation: Mutation, group_id: str) -> LedgerGroup:
        """Nothing was written; the group can be discarded again."""
        mutation.require_live()
        return self._put(replace(self._finalizing(group_id, "stopped"), status=GroupStatus.READY_TO_FINALIZE))

    def mark_finalization_unknown(self, mutation: Mutation, group_id: str) -> LedgerGroup:
        """Whether the group's rows exist is unknown: this ledger is not captured any more."""
        mutation.require_live()
        unknown = GroupStatus.FINALIZATION_UNKNOWN
        return self._put(replace(self._finalizing(group_id, f"marked {unknown}"), status=unknown))

    def release(self, mutation: Mutation, group_id: str) -> None:
        """The replay buffer owns the group now."""
        mutation.require_live()
        del self._groups[self._finalizing(group_id, "released").group_id]

    def discard(self, mutation: Mutation, group_id: str) -> LedgerGroup:
        """Give a group up. Returns its last record. The caller clears its calls (`calls_of`) before."""
        mutation.require_live()
        group = self.group(group_id)
        if group.status in (GroupStatus.FINALIZING, GroupStatus.FINALIZATION_UNKNOWN):
            raise BrokenInvariant(f"group {group_id} is discarded while it is {group.status.value}")
        for sibling in group.siblings:
            self._staged.pop(rollout_id(group_id, sibling.generation_index), None)
        return self._groups.pop(group_id)

    def capture(self, cut: Cut) -> tuple[LedgerGroup, ...]:
        """All groups in dispatch order. Raises `FinalizationUnknown` if nobody knows what became of one."""
        cut.require_live()
        for group in self._groups.values():
            if group.status is GroupStatus.FINALIZATION_UNKNOWN:
                raise FinalizationUnknown(f"group {group.group_id} is {group.status.value}: nothing can be saved")
        return tuple(self.groups())

    def calls_of(self, group_id: str) -> list[str]:
        """Keys of every call in the data plane that belongs to a group."""
        sealed = [sibling.sealed for sibling in self.group(group_id).siblings if sibling.sealed is not None]
        return [*(key for result in sealed for key in result.call_keys), *self.staged_keys(group_id)]

    def load(
        self,
        mutation: Mutation,
        groups: Iterable[LedgerGroup],
        staged: Mapping[str, tuple[StagedTurn, ...]] | None = None,
    ) -> None:
        """Replace everything by restored groups (already normalized by `normalize_for_restart`), and by the finished
        turns of their resumed siblings.
        """
        mutation.require_live()
        self._groups = {group.group_id: group for group in groups}
        self._staged = dict(staged or {})

    def _finalizing(self, group_id: str, verb: str) -> LedgerGroup:
        group = self.group(group_id)
        if group.status is not GroupStatus.FINALIZING:
            raise BrokenInvariant(f"group {group_id} is {verb} while {group.status.value}, not while it is finalized")
        return group

    def _insert(self, mutation: Mutation, group: LedgerGroup) -> LedgerGroup:
        mutation.require_live()
        if group.group_id in self._groups:
            raise BrokenInvariant(f"group {group.group_id} is already in the recovery ledger")
        return self._put(group)

    def _put(self, group: LedgerGroup) -> LedgerGroup:
        self._groups[group.group_id] = group
        return group

    def _put_sibling(self, group_id: str, sibling: Sibling) -> None:
        group = self.group(group_id)
        siblings: Sequence[Sibling] = group.siblings
        index = sibling.generation_index
        self._put(replace(group, siblings=(*siblings[:index], sibling, *siblings[index + 1 :])))


def normalize_for_restart(
    group: LedgerGroup, resumed: Mapping[str, EpisodeRecord] | None = None, continued: Collection[str] = ()
) -> tuple[LedgerGroup, tuple[str, ...]]:
    """What a restart makes of a saved group, and the staged call keys that it no longer needs.

    Running attempts are abandoned and start again with the next attempt number, except those whose environment goes on
    from the turns it had (`resumed`, by rollout, under the environment's new attempt), and those whose call's tokens
    were saved (`continued`: rollouts). Sealed siblings are kept from level `sibling` on; at `prompt_group` they run
    again too. A group caught while finalizing is finalized again.
    """
    keep_sealed = group.level.keeps_siblings
    unneeded: list[str] = []
    siblings = []
    for sibling in group.siblings:
        if sibling.sealed is not None and keep_sealed:
            siblings.append(sibling)
            continue
        if sibling.sealed is not None:
            unneeded.extend(sibling.sealed.call_keys)
        rollout = rollout_id(group.group_id, sibling.generation_index)
        episode = (resumed or {}).get(rollout)
        if sibling.status in _RUNNING and (episode is not None or rollout in continued):
            resumes = sibling.resumes + 1 if episode is None else episode.attempt - sibling.attempt
            siblings.append(replace(sibling, status=AttemptStatus.RESUMED, resumes=resumes))
            continue
        started = sibling.status is not AttemptStatus.RESERVED
        siblings.append(replace(sibling, attempt=sibling.attempt + started, status=AttemptStatus.RESERVED, sealed=None))
    complete = all(s.sealed is not None for s in siblings)
    status = GroupStatus.READY_TO_FINALIZE if complete else GroupStatus.GENERATING
    return replace(group, siblings=tuple(siblings), status=status), tuple(unneeded)
