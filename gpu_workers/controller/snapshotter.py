"""Rollout snapshots: when one is taken, on which trainer checkpoint it stands, and what each attempt came to.

    save lock -> skip? -> publish a written checkpoint -> anchor -> environment closed -> look at running calls
              -> exclusive cut -> environment open again -> publish

A snapshot stands on the newest durable trainer checkpoint. The batches trained since then are part of it: a restart
trains them again, which leads to the very trainer state that the rest of the snapshot belongs to.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from gpu_workers.controller.bundle_publisher import BundlePublisher, is_retryable
from gpu_workers.controller.call_peeker import CallPeeker
from gpu_workers.controller.environment_checkpoint import EnvironmentCheckpoint
from gpu_workers.controller.parts import RolloutParts
from gpu_workers.controller.trainer_checkpoints import TrainerCheckpoints
from storage.errors import BrokenInvariant
from storage.fault_points import reached

_NO_ANCHOR = "missing_trainer_anchor"
_COMMITTING = "optimizer_commit_in_progress"
_MOVED = "trainer_state_changed"
# Reasons to skip an attempt that are gone once the step that is being trained has its trainer checkpoint.
PASSING_REASONS = frozenset({_NO_ANCHOR, _COMMITTING, _MOVED})


@dataclass(frozen=True, slots=True)
class SnapshotOutcome:
    """What an attempt came to: `completed` with the manifest's sequence, or `skipped` with a reason."""

    number: int
    outcome: str
    reason: str = ""
    sequence: int | None = None
    facts: Mapping[str, float] | None = None


class RolloutSnapshotter:
    """Owns the attempt numbers."""

    def __init__(
        self,
        parts: RolloutParts,
        publisher: BundlePublisher,
        checkpoints: TrainerCheckpoints,
        environment: EnvironmentCheckpoint,
        peeker: CallPeeker,
    ) -> None:
        self._environment = environment
        self._peeker = peeker
        self._parts = parts
        self._publisher = publisher
        self._checkpoints = checkpoints
        self._saved_version: int | None = None
        self._outcomes: dict[int, SnapshotOutcome] = {}
        self._failed: set[int] = set()  # numbers of the attempts that failed since the last one that did not
        self._reported_without_anchor: int | None = None

    async def attempt(self, number: int, *, force: bool = False) -> SnapshotOutcome:
        """One numbered snapshot attempt; a number that was attempted already returns its outcome again.

        I/O failures are raised and may be retried with the same number; `max_consecutive_failures` numbers in a row
        that failed end the run, as does any broken invariant at once. The previous snapshot stays selectable always.
        """
        async with self._publisher.lock:  # looked up under the lock: the number may be running for another caller
            if number in self._outcomes:
                return self._outcomes[number]
            try:
                outcome = await self._attempt_locked(number, force=force)
            except Exception as error:
                self._count_failure(number, error)
                raise
            self._failed.clear()
            self._outcomes[number] = outcome
            self._record(outcome)
            return outcome

    async def _attempt_locked(self, number: int, *, force: bool) -> SnapshotOutcome:
        state, barrier = self._parts.state, self._parts.barrier
        if state.in_commit_window:
            return SnapshotOutcome(number, "skipped", _COMMITTING)
        if not state.has_caught_up:
            # It would be the restored bundle again, and look as if this process had got further.
            return SnapshotOutcome(number, "skipped", "replaying_recorded_steps")
        if not force and barrier.mutation_version == self._saved_version:
            await self._peeker.look()  # what running calls have sampled since is worth a snapshot too
            if barrier.mutation_version == self._saved_version:
                return SnapshotOutcome(number, "skipped", "no_data_plane_mutations")
        await self._checkpoints.flush()
        anchor, trainer_step = self._publisher.durable, state.train_steps
        if not state.recorded.lead_from(anchor.step, to=state.rollout_step):
            return SnapshotOutcome(number, "skipped", _NO_ANCHOR)
        async with self._environment.snapshot(str(number)) as environment:
            if environment is not None:
                reached("snapshot:environment-closed", self._parts.config.name)
            if state.in_commit_window or state.train_steps != trainer_step:
                return SnapshotOutcome(number, "skipped", _MOVED)
            peek_ms = await self._peeker.look()
            captured = await self._publisher.capture(model_step=anchor.step, environment=environment)
        if state.in_commit_window or captured.trainer_step != trainer_step:
            return SnapshotOutcome(number, "skipped", _MOVED)
        if captured.state.model_step != anchor.step:
            raise BrokenInvariant(
                f"the snapshot would stand on the model of step {captured.state.model_step}, but step {anchor.step} is "
                "the durable one"
            )
        reached("snapshot:cut", self._parts.config.name)
        started = time.perf_counter()
        manifest = await self._publisher.publish_snapshot(captured)
        reached("snapshot:published", self._parts.config.name)
        self._saved_version = captured.mutation_version
        facts = {**captured.facts(), "write_s": time.perf_counter() - started, "step": manifest.step}
        facts |= {"peek_ms": peek_ms, "unreadable_calls": self._peeker.unreadable}
        return SnapshotOutcome(number, "completed", "", manifest.sequence, facts)

    def _count_failure(self, number: int, error: Exception) -> None:
        self._failed.add(number)
        self._record(SnapshotOutcome(number, "failed", str(error)))
        limit = self._parts.config.rollout_checkpointing.max_consecutive_failures
        if not is_retryable(error) or len(self._failed) >= limit:
            self._parts.state.fail(error)

    def _record(self, outcome: SnapshotOutcome) -> None:
        """One trace event; a step without an anchor is reported once, however often it is attempted."""
        if outcome.reason == _NO_ANCHOR:
            if self._reported_without_anchor == self._parts.state.train_steps:
                return
            self._reported_without_anchor = self._parts.state.train_steps
        facts = {"step": self._parts.state.train_steps, **(outcome.facts or {})}
        self._parts.trace.record(
            "snapshot_attempt",
            number=outcome.number,
            outcome=outcome.outcome,
            reason=outcome.reason,
            sequence=outcome.sequence,
            **facts,
        )
