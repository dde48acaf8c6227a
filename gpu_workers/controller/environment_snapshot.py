"""What environments exported at a snapshot, and whether it belongs to the cut."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gpu_workers.controller.barrier import Cut
from gpu_workers.controller.recovery_ledger import RecoveryLedger
from gpu_workers.environments.ports import Exported
from storage.errors import BrokenInvariant
from storage.records import AttemptStatus, EpisodeRecord, LedgerGroup, Sibling, rollout_id

RESTART_ONLY = "restart_only"  # the mode of environments whose state can't come back
RUNNING = (AttemptStatus.DISPATCHED, AttemptStatus.RESUMED)


@dataclass(frozen=True, slots=True)
class EnvironmentSnapshot:
    """What the instances exported, while they are closed."""

    exported: tuple[Exported, ...]

    @property
    def episodes(self) -> tuple[EpisodeRecord, ...]:
        """Every exported episode, by rollout."""
        found = [episode for export in self.exported for episode in export.episodes]
        return tuple(sorted(found, key=lambda episode: episode.rollout_id))

    def missing_calls(self, ledger: RecoveryLedger) -> list[str]:
        """Calls of exported turns that have not arrived yet, of siblings that still run."""
        missing = []
        for episode in self.episodes:
            found = sibling_of(ledger, episode.rollout_id)
            if found is not None and found[1].status in RUNNING and found[1].environment_attempt == episode.attempt:
                staged = {turn.key for turn in ledger.staged(episode.rollout_id)}
                missing += [key for key in episode.calls if key not in staged]
        return missing

    def check_against_cut(
        self, cut: Cut, ledger: RecoveryLedger, *, is_gone: Callable[[str], bool]
    ) -> tuple[EpisodeRecord, ...]:
        """The episodes that belong to the cut. One whose completion has arrived meanwhile is the ledger's; one of an
        abandoned attempt, or of a group that has left the ledger (`is_gone`), is on its way to be stopped.

        Raises BrokenInvariant when an episode is of an attempt that was never dispatched, is exported by two instances,
        or includes calls that are not those staged for it.
        """
        cut.require_live()
        exporters = Counter(episode.rollout_id for episode in self.episodes)
        kept = []
        for episode in self.episodes:
            if exporters[episode.rollout_id] > 1:
                raise BrokenInvariant(
                    f"episode of {episode.rollout_id} is exported {exporters[episode.rollout_id]} times"
                )
            found = sibling_of(ledger, episode.rollout_id)
            if found is None:
                if is_gone(group_of(episode.rollout_id)):
                    continue
                raise BrokenInvariant(f"{episode.instance} exports episode {episode.row_key}, which no group owes")
            group, sibling = found
            abandoned = episode.attempt < sibling.environment_attempt
            if sibling.sealed is not None or abandoned or not group.level.keeps_turns:
                continue
            _require_current(episode, sibling, [turn.key for turn in ledger.staged(episode.rollout_id)])
            kept.append(episode)
        return tuple(kept)


def with_episodes_of_nobody(
    cut: Cut, ledger: RecoveryLedger, kept: Sequence[EpisodeRecord], *, deadline_left_s: float
) -> tuple[EpisodeRecord, ...]:
    """Those that were exported (`kept`), and those that no environment has (any more, or yet) of siblings that go on in
    their middle all the same: as they stood behind their last turn, with their whole time. By rollout.
    """
    cut.require_live()
    exported, found = {episode.rollout_id for episode in kept}, list(kept)
    for group in ledger.groups():
        for sibling in group.siblings if group.level.keeps_tokens else ():
            rollout = rollout_id(group.group_id, sibling.generation_index)
            staged = ledger.staged(rollout)
            episode = staged[-1].episode if staged else None
            if episode is None or rollout in exported or sibling.status not in RUNNING or episode.mode == RESTART_ONLY:
                continue
            executed = sibling.environment_attempt
            found.append(replace(episode, attempt=executed, deadline_left_s=deadline_left_s, parked_s=0.0))
    return tuple(sorted(found, key=lambda episode: episode.rollout_id))


def group_of(rollout: str) -> str:
    """The group of a rollout."""
    return rollout.rpartition("_g")[0]


def sibling_of(ledger: RecoveryLedger, rollout: str) -> tuple[LedgerGroup, Sibling] | None:
    """Who a rollout is in the ledger; None when it is owed no more."""
    group_id, _, index = rollout.rpartition("_g")
    if group_id not in ledger:
        return None
    group = ledger.group(group_id)
    found = [s for s in group.siblings if rollout_id(group_id, s.generation_index) == f"{group_id}_g{index}"]
    return (group, found[0]) if found else None


def _require_current(episode: EpisodeRecord, sibling: Sibling, staged: list[str]) -> None:
    if sibling.status not in RUNNING or sibling.environment_attempt != episode.attempt:
        raise BrokenInvariant(
            f"{episode.instance} exports episode {episode.row_key}, but its sibling is {sibling.status} with "
            f"environment attempt {sibling.environment_attempt}"
        )
    if list(episode.calls) != staged[: episode.turn] or len(episode.calls) != episode.turn:
        raise BrokenInvariant(
            f"episode {episode.row_key} includes {episode.turn} turns with calls {list(episode.calls)[:3]}, staged are "
            f"{staged[:3]} ({len(staged)})"
        )
