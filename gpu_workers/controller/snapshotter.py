"""Saves rollout state: rollout snapshots between train steps, and the rollout state of trainer checkpoints.

    save lock -> skip? -> anchor -> exclusive cut: copy references -> write parts, manifest last -> retention

One save lock keeps the two kinds from publishing at the same time. The cut only copies references to immutable records
and rows; everything slow happens after it, off the event loop.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from gpu_workers.controller.barrier import Cut
from gpu_workers.controller.parts import RolloutParts
from gpu_workers.controller.ports import Trainer
from storage.errors import BrokenInvariant, MidflightError
from storage.manifests import Anchor, FileEntry, Manifest
from storage.records import AttemptStatus, RolloutState
from storage.rows import RowHandle
from storage.snapshot_writer import CapturedBundle

_NO_ANCHOR = "missing_trainer_anchor"
_COMMITTING = "optimizer_commit_in_progress"
_MOVED = "trainer_state_changed"
# Reasons to skip an attempt that are gone once the step that is being trained has its trainer checkpoint.
PASSING_REASONS = frozenset({_NO_ANCHOR, _COMMITTING, _MOVED})


class BundleStore(Protocol):
    """Where bundles are published; blocking calls, made in a thread."""

    def publish(self, bundle: CapturedBundle) -> Manifest:
        """Write parts and state tables, the manifest last, then apply retention.

        Raises `BrokenInvariant` when rows and index disagree; nothing is written then.
        """
        ...

    def checkpoint_prefix(self, step: int) -> str:
        """Where the model files of a trainer checkpoint go: another place at each call."""
        ...


@dataclass(frozen=True, slots=True)
class SnapshotOutcome:
    """What an attempt came to: `completed` with the manifest's sequence, or `skipped` with a reason."""

    number: int
    outcome: str
    reason: str = ""
    sequence: int | None = None
    facts: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class _Captured:
    state: RolloutState
    rows: Mapping[str, RowHandle]
    cut_time: float
    mutation_version: int
    barrier_wait_ms: float
    cut_ms: float
    claimed_groups: int


class RolloutSnapshotter:
    """Owns the save lock, the anchor and the attempt numbers."""

    def __init__(self, parts: RolloutParts, trainer: Trainer, bundles: BundleStore, *, identity: str) -> None:
        self._parts = parts
        self._trainer = trainer
        self._bundles = bundles
        self._identity = identity
        self._save_lock = asyncio.Lock()
        self._durable: Anchor | None = None
        self._saved_version: int | None = None
        self._outcomes: dict[int, SnapshotOutcome] = {}
        self._failed: set[int] = set()  # numbers of the attempts that failed since the last one that did not
        self._reported_without_anchor: int | None = None
        self._fingerprint = parts.source.dataset.fingerprint()

    def adopt_anchor(self, anchor: Anchor | None) -> None:
        """After a restore: the durable checkpoint the run stands on, None for the initial model."""
        self._durable = anchor
        self._saved_version = None

    async def attempt(self, number: int, *, force: bool = False) -> SnapshotOutcome:
        """One numbered snapshot attempt; a number that was attempted already returns its outcome again.

        I/O failures are raised and may be retried with the same number; `max_consecutive_failures` numbers in a row
        that failed end the run, as does any broken invariant at once. The previous snapshot stays selectable always.
        """
        async with self._save_lock:  # looked up under the lock: the number may be running for another caller
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

    async def trainer_checkpoint(self, step: int) -> Manifest:
        """Save model, optimizer and rollout state of a committed step, holding the save lock for the whole length.

        A retryable failure may be tried again; any other one ends the run.
        """
        async with self._save_lock:
            try:
                return await self._checkpoint_locked(step)
            except Exception as error:
                if not _is_retryable(error):
                    self._parts.state.fail(error)
                raise

    async def _checkpoint_locked(self, step: int) -> Manifest:
        if self._durable is not None and self._durable.step == step:
            raise BrokenInvariant(f"trainer checkpoint of step {step} is already durable")
        if self._parts.buffer.claimed():
            raise BrokenInvariant(f"trainer checkpoint of step {step} while a train step holds claimed groups")
        captured = await self._capture()
        if captured.state.progress.train_steps != step:
            raise BrokenInvariant(
                f"trainer checkpoint of step {step} found the trainer at {captured.state.progress.train_steps}"
            )
        entries = await self._trainer.save(self._bundles.checkpoint_prefix(step))
        files = tuple(FileEntry(**entry) for entry in entries)
        manifest = await self._publish("trainer_checkpoint", captured, None, files)
        self._durable = Anchor(kind="checkpoint", step=step, sequence=manifest.sequence, identity=self._identity)
        self._parts.trace.record(
            "checkpoint_published",
            sequence=manifest.sequence,
            kind=manifest.kind,
            step=step,
            cut_time=captured.cut_time,
        )
        return manifest

    async def _attempt_locked(self, number: int, *, force: bool) -> SnapshotOutcome:
        state, barrier = self._parts.state, self._parts.barrier
        if state.in_commit_window:
            return SnapshotOutcome(number, "skipped", _COMMITTING)
        if not force and barrier.mutation_version == self._saved_version:
            return SnapshotOutcome(number, "skipped", "no_data_plane_mutations")
        anchor = self._anchor()
        if anchor is None:
            return SnapshotOutcome(number, "skipped", _NO_ANCHOR)
        captured = await self._capture()
        if state.in_commit_window or captured.state.progress.train_steps != anchor.step:
            return SnapshotOutcome(number, "skipped", _MOVED)
        started = time.perf_counter()
        manifest = await self._publish("rollout_snapshot", captured, anchor, ())
        self._saved_version = captured.mutation_version
        facts = {**_count(captured), "write_s": time.perf_counter() - started}
        return SnapshotOutcome(number, "completed", "", manifest.sequence, facts)

    def _anchor(self) -> Anchor | None:
        """The trainer state a snapshot taken now belongs to, if it is durable."""
        steps = self._parts.state.train_steps
        if steps == 0:
            return Anchor(kind="bootstrap", step=0, sequence=None, identity=self._identity)
        return self._durable if self._durable is not None and self._durable.step == steps else None

    async def _capture(self) -> _Captured:
        """References to everything, under a cut. Raises the run's failure: what failed half-way is not saved."""
        asked = time.perf_counter()
        async with self._parts.barrier.cut("snapshot") as cut:
            entered, cut_time = time.perf_counter(), time.time()
            if self._parts.state.failure is not None:
                raise self._parts.state.failure
            state = self._copy_state(cut)
            rows = self._parts.rows.capture(cut)
            version = self._parts.barrier.mutation_version
            claimed = len(self._parts.buffer.claimed())
            left = time.perf_counter()
        wait_ms, cut_ms = (entered - asked) * 1000, (left - entered) * 1000
        return _Captured(state, rows, cut_time, version, wait_ms, cut_ms, claimed)

    def _copy_state(self, cut: Cut) -> RolloutState:
        parts = self._parts
        return RolloutState(
            progress=parts.progress(cut),
            ledger=tuple(g for g in parts.ledger.capture(cut) if g.group_id not in parts.buffer),
            buffer=parts.buffer.capture(cut),
            spares=tuple(parts.state.spares),
            dropped=tuple(parts.state.dropped),
            trained=tuple(parts.state.trained),
        )

    async def _publish(
        self,
        kind: Literal["trainer_checkpoint", "rollout_snapshot"],
        captured: _Captured,
        anchor: Anchor | None,
        files: Sequence[FileEntry],
    ) -> Manifest:
        """Write off the event loop. A writing thread can't be stopped: a caller that is cancelled waits for its end,
        so that the save lock is never free while something is being published.
        """
        bundle = CapturedBundle(
            kind=kind,
            step=captured.state.progress.train_steps,
            anchor=anchor,
            state=captured.state,
            rows=captured.rows,
            cut_time=captured.cut_time,
            files=tuple(files),
            config=self._parts.config,
            dataset_fingerprint=self._fingerprint,
        )
        writing = asyncio.ensure_future(asyncio.to_thread(self._bundles.publish, bundle))
        try:
            return await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait([writing])
            raise

    def _count_failure(self, number: int, error: Exception) -> None:
        self._failed.add(number)
        self._record(SnapshotOutcome(number, "failed", str(error)))
        limit = self._parts.config.rollout_checkpointing.max_consecutive_failures
        if not _is_retryable(error) or len(self._failed) >= limit:
            self._parts.state.fail(error)

    def _record(self, outcome: SnapshotOutcome) -> None:
        """One trace event; a step without an anchor is reported once, however often it is attempted."""
        if outcome.reason == _NO_ANCHOR:
            if self._reported_without_anchor == self._parts.state.train_steps:
                return
            self._reported_without_anchor = self._parts.state.train_steps
        self._parts.trace.record(
            "snapshot_attempt",
            number=outcome.number,
            outcome=outcome.outcome,
            reason=outcome.reason,
            sequence=outcome.sequence,
            step=self._parts.state.train_steps,
            **(outcome.facts or {}),
        )


def _is_retryable(error: Exception) -> bool:
    return isinstance(error, MidflightError) and error.retryable


def _count(captured: _Captured) -> dict[str, float]:
    siblings = [sibling for group in captured.state.ledger for sibling in group.siblings]
    return {
        "cut_ms": captured.cut_ms,
        "barrier_wait_ms": captured.barrier_wait_ms,
        "groups": len(captured.state.ledger) + len(captured.state.buffer),
        "rows": len(captured.rows),
        "rolled_back_train_group_count": captured.claimed_groups,
        "sealed_siblings": sum(s.sealed is not None for s in siblings),
        "running_attempts": sum(s.status is AttemptStatus.DISPATCHED for s in siblings),
    }
