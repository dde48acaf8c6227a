"""Promised, unfinished prompt groups: reserve -> admit -> dispatch -> seal each sibling -> finalize -> release.

    reserved --admit--> admitted --dispatch/seal/abandon--> generating
    generating --last sibling sealed--> ready_to_finalize --begin_finalize--> finalizing --release--> (replay buffer)
    finalizing --stop_finalizing--> ready_to_finalize;  finalizing --mark_finalization_unknown--> not captured any more
    any but the last two --discard--> gone

Records are immutable and replaced on every change, so a capture is a copy of references.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from gpu_workers.controller.barrier import Cut, Mutation
from storage.errors import BrokenInvariant, FinalizationUnknown
from storage.records import (
    AttemptStatus,
    GroupPhase,
    GroupStatus,
    LedgerGroup,
    PromptRef,
    RecoveryLevel,
    SealedSibling,
    Sibling,
)


class RecoveryLedger:
    """Who is owed what. Control-plane data only; tokens lie in the data plane under the sealed call keys."""

    def __init__(self) -> None:
        self._groups: dict[str, LedgerGroup] = {}

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
        self, mutation: Mutation, dropped: LedgerGroup, prompt: PromptRef, *, start_version: int
    ) -> LedgerGroup:
        """Give a discarded group's place (batch, order, stamp) to another prompt, which starts from today's weights."""
        siblings = tuple(Sibling(s.generation_index) for s in dropped.siblings)
        fresh = replace(
            dropped,
            prompt=prompt,
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
        """Mark every unsealed sibling as running; returns them with their attempt numbers."""
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

    def seal(self, mutation: Mutation, group_id: str, generation_index: int, sealed: SealedSibling) -> bool:
        """Record a sibling's terminal result. An equal result again is a no-op (False), a different one an error."""
        mutation.require_live()
        sibling = self.group(group_id).siblings[generation_index]
        if sibling.sealed is not None:
            if sibling.sealed == sealed:
                return False
            raise BrokenInvariant(f"sibling {group_id}_g{generation_index} is sealed again with another result")
        self._put_sibling(group_id, replace(sibling, status=AttemptStatus.SEALED, sealed=sealed))
        group = self.group(group_id)
        if all(s.sealed is not None for s in group.siblings):
            self._put(replace(group, status=GroupStatus.READY_TO_FINALIZE))
        return True

    def abandon(self, mutation: Mutation, group_id: str, generation_index: int, *, infrastructure: bool) -> Sibling:
        """End a failed attempt; the sibling waits for its next one, its failure counted."""
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
        return failed

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
        """Give a group up. Returns its last record, whose staged calls the caller clears."""
        mutation.require_live()
        group = self.group(group_id)
        if group.status in (GroupStatus.FINALIZING, GroupStatus.FINALIZATION_UNKNOWN):
            raise BrokenInvariant(f"group {group_id} is discarded while it is {group.status.value}")
        return self._groups.pop(group_id)

    def capture(self, cut: Cut) -> tuple[LedgerGroup, ...]:
        """All groups in dispatch order. Raises `FinalizationUnknown` if nobody knows what became of one."""
        cut.require_live()
        for group in self._groups.values():
            if group.status is GroupStatus.FINALIZATION_UNKNOWN:
                raise FinalizationUnknown(f"group {group.group_id} is {group.status.value}: nothing can be saved")
        return tuple(self.groups())

    def load(self, mutation: Mutation, groups: Iterable[LedgerGroup]) -> None:
        """Replace everything by restored groups (already normalized by `normalize_for_restart`)."""
        mutation.require_live()
        self._groups = {group.group_id: group for group in groups}

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


def normalize_for_restart(group: LedgerGroup) -> tuple[LedgerGroup, tuple[str, ...]]:
    """What a restart makes of a saved group, and the staged call keys that it no longer needs.

    Running attempts are abandoned and start again with the next attempt number. Sealed siblings are kept at level
    `sibling`; at `prompt_group` they run again too. A group caught while finalizing is finalized again.
    """
    keep_sealed = group.level is not RecoveryLevel.PROMPT_GROUP
    unneeded: list[str] = []
    siblings = []
    for sibling in group.siblings:
        if sibling.sealed is not None and keep_sealed:
            siblings.append(sibling)
            continue
        if sibling.sealed is not None:
            unneeded.extend(sibling.sealed.call_keys)
        started = sibling.status is not AttemptStatus.RESERVED
        siblings.append(replace(sibling, attempt=sibling.attempt + started, status=AttemptStatus.RESERVED, sealed=None))
    complete = all(s.sealed is not None for s in siblings)
    status = GroupStatus.READY_TO_FINALIZE if complete else GroupStatus.GENERATING
    return replace(group, siblings=tuple(siblings), status=status), tuple(unneeded)
