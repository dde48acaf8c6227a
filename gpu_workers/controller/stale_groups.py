"""Groups that the sampler will never select any more: finished ones are evicted, unfinished ones aborted.

Either way the prompt is credited as dropped, with the reason, and never comes back. That is the sampler's doing and no
failure: it is not counted against the run's budget of skipped prompts.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from gpu_workers.controller.failures import FailurePolicy
from gpu_workers.controller.parts import RolloutParts
from gpu_workers.controller.ports import Generator
from storage.errors import BrokenInvariant, InfrastructureFailure
from storage.records import (
    AttemptStatus,
    BufferedGroup,
    DroppedPrompt,
    GroupStatus,
    LedgerGroup,
    rollout_id,
)

EVICTED = "evicted"
STALE = "stale"


def has_failed(dropped: DroppedPrompt) -> bool:
    """Whether a prompt was given up because it failed."""
    return dropped.reason not in (EVICTED, STALE)


def count_skipped(dropped: Iterable[DroppedPrompt]) -> int:
    """Prompts given up because they failed."""
    return sum(map(has_failed, dropped))


class StaleGroups:
    """`give_up` removes ownership first, in one mutation, and then tells the generators; never in a commit window."""

    def __init__(self, parts: RolloutParts, generator: Generator, *, stop: Callable[[str], None]) -> None:
        """`stop(group_id)` ends the task that runs a group."""
        self._parts = parts
        self._generator = generator
        self._stop = stop
        self._policy = FailurePolicy(parts.config)

    def __bool__(self) -> bool:
        """Whether there is anything to give up at the trainer's version."""
        return bool(self._evicted()) or any(self._aborted())

    async def give_up(self) -> None:
        """Give up what is stale at the trainer's version, if anything."""
        if not self:
            return
        parts = self._parts
        if parts.state.in_commit_window:
            raise BrokenInvariant("stale groups are given up inside an optimizer-commit window")
        async with parts.barrier.mutation("give_up_stale") as mutation:
            evicted, aborted = self._evicted(), list(self._aborted())
            stale: list[BufferedGroup | LedgerGroup] = [*evicted, *aborted]
            self._shrink_steps(stale)
            parts.rows.remove(mutation, [row for group in evicted for row in group.row_ids])
            parts.buffer.drop(mutation, evicted)
            for group in aborted:
                parts.rows.remove(mutation, parts.ledger.calls_of(group.group_id))
                parts.ledger.discard(mutation, group.group_id)
                self._stop(group.group_id)
            parts.state.dropped += [DroppedPrompt(g.prompt, EVICTED, g.target_step) for g in evicted]
            parts.state.dropped += [DroppedPrompt(g.prompt, STALE, g.target_step) for g in aborted]
        self._record(evicted, aborted)
        parts.state.changed.notify()
        for group in aborted:
            with contextlib.suppress(InfrastructureFailure):
                await self._generator.abort(group.group_id)

    def _evicted(self) -> list[BufferedGroup]:
        return self._parts.sampler.evict(self._parts.buffer.ready(), version=self._parts.state.trainer_version)

    def _aborted(self) -> Iterator[LedgerGroup]:
        """Also groups that queue for the finalizer. What it is working on it drops itself, or is evicted afterwards."""
        sampler, version = self._parts.sampler, self._parts.state.trainer_version
        for group in self._parts.ledger.admitted():
            waits = group.status in (GroupStatus.GENERATING, GroupStatus.READY_TO_FINALIZE)
            if waits and sampler.should_abort_inflight(group, version=version):
                yield group

    def _shrink_steps(self, stale: Iterable[BufferedGroup | LedgerGroup]) -> None:
        """Stamped groups will be missing in steps to come. Raises `BatchIncomplete` when one becomes too small."""
        state = self._parts.state
        missing = Counter(g.target_step for g in stale if g.target_step is not None)
        shortfall = {s: state.shortfall.get(s, 0) + n for s, n in missing.items() if s >= state.trainer_version}
        for step, groups in shortfall.items():
            self._policy.require_step_size(step, shortfall=groups)
        state.shortfall.update(shortfall)

    def _record(self, evicted: Iterable[BufferedGroup], aborted: Iterable[LedgerGroup]) -> None:
        for stopped in aborted:
            for sibling in stopped.siblings:
                if sibling.status is AttemptStatus.DISPATCHED:
                    rollout, attempt = rollout_id(stopped.group_id, sibling.generation_index), sibling.attempt
                    self._parts.trace.record("attempt_abandoned", rollout_id=rollout, attempt=attempt, reason=STALE)
            self._record_discarded(stopped, STALE)
        for finished in evicted:
            self._record_discarded(finished, EVICTED)

    def _record_discarded(self, group: BufferedGroup | LedgerGroup, reason: str) -> None:
        self._parts.trace.record(
            "group_discarded",
            group_id=group.group_id,
            reason=reason,
            target_step=group.target_step,
            start_version=group.start_version,
            version=self._parts.state.trainer_version,
        )
