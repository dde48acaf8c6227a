"""From a cut to a published bundle: what rollout snapshots and trainer checkpoints share.

    save lock -> exclusive cut: copy references -> write parts, manifest last -> retention

One save lock keeps the two kinds from publishing at the same time. The cut only copies references to immutable records
and rows; everything slow happens after it, off the event loop.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeVar

from gpu_workers.controller.barrier import Cut
from gpu_workers.controller.environment_snapshot import EnvironmentSnapshot, with_episodes_of_nobody
from gpu_workers.controller.owed import without_rows
from gpu_workers.controller.parts import RolloutParts
from storage.errors import MidflightError
from storage.manifests import Anchor, FileEntry, Manifest
from storage.records import AttemptStatus, EpisodeRecord, RolloutState
from storage.rows import RowHandle
from storage.snapshot_writer import CapturedBundle

T = TypeVar("T")

_SMALLEST_STEP_S = 1e-6


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

    def put_metrics(self, prefix: str, step: int, metrics: Mapping[str, float]) -> FileEntry:
        """Write the metrics of a step beside its model files."""
        ...


@dataclass(frozen=True, slots=True)
class Captured:
    """What one cut captured. `trainer_step`: the trainer's step, which recorded batches of `state` may go beyond."""

    state: RolloutState
    rows: Mapping[str, RowHandle]
    trainer_step: int
    cut_time: float
    mutation_version: int
    barrier_wait_ms: float
    cut_ms: float
    claimed_groups: int

    def facts(self) -> dict[str, float]:
        """Counts and timings for the trace."""
        siblings = [sibling for group in self.state.ledger for sibling in group.siblings]
        return {
            "cut_ms": self.cut_ms,
            "barrier_wait_ms": self.barrier_wait_ms,
            "groups": len(self.state.ledger) + len(self.state.buffer),
            "rows": len(self.rows),
            "recorded_steps": self.state.progress.train_steps - self.state.model_step,
            "rolled_back_train_group_count": self.claimed_groups,
            "sealed_siblings": sum(s.sealed is not None for s in siblings),
            "running_attempts": sum(s.status is AttemptStatus.DISPATCHED for s in siblings),
            "episodes": len(self.state.episodes),
            "finished_turns": sum(episode.turn for episode in self.state.episodes),
            "partial_calls": len(self.state.partial_calls),
            "partial_tokens": sum(call.num_tokens for call in self.state.partial_calls),
        }


class BundlePublisher:
    """Owns the save lock and the newest durable anchor. Every other method is for the holder of the lock."""

    def __init__(
        self,
        parts: RolloutParts,
        bundles: BundleStore,
        *,
        identity: str,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._wall_clock = wall_clock
        self._parts = parts
        self._bundles = bundles
        self._identity = identity
        self._fingerprint = parts.source.dataset.fingerprint()
        self.lock = asyncio.Lock()
        self._durable = Anchor.bootstrap(identity)
        self._newest_cut = 0.0

    @property
    def durable(self) -> Anchor:
        """The newest durable trainer checkpoint, or the initial model."""
        return self._durable

    def adopt_anchor(self, anchor: Anchor | None) -> None:
        """After a restore: the durable checkpoint the run stands on, None for the initial model."""
        self._durable = anchor or Anchor.bootstrap(self._identity)

    def checkpoint_prefix(self, step: int) -> str:
        """Where the model files of a trainer checkpoint go: another place at each call."""
        return self._bundles.checkpoint_prefix(step)

    async def capture(self, *, model_step: int, environment: EnvironmentSnapshot | None = None) -> Captured:
        """References to everything, under a cut, for a bundle that stands on the model of `model_step`.

        Without an `environment` running episodes are left out: a restart runs them again. Raises the run's failure:
        what failed half-way is not saved.
        """
        parts = self._parts
        await parts.partial_calls.stage()
        asked = time.perf_counter()
        async with parts.barrier.cut("snapshot") as cut:
            entered, cut_time = time.perf_counter(), self._next_cut_time()
            if parts.state.failure is not None:
                raise parts.state.failure
            state = self._copy_state(cut, model_step, environment)
            episodes = {episode.rollout_id: episode for episode in state.episodes}
            calls, tokens = parts.partial_calls.capture(cut, state.ledger, episodes)
            rows = parts.rows.capture(cut)
            running = set(parts.ledger.staged_keys())
            durable_rows = frozenset(parts.state.recorded.rows(up_to=model_step))
            version = parts.barrier.mutation_version
            trainer_step, claimed = parts.state.train_steps, len(parts.buffer.claimed())
            left = time.perf_counter()
        state = replace(state, partial_calls=calls)
        left_out = durable_rows | (running - {key for episode in state.episodes for key in episode.calls})
        if left_out:
            rows = {row_id: row for row_id, row in rows.items() if row_id not in left_out}
        rows = {**rows, **tokens} if tokens else rows
        wait_ms, cut_ms = (entered - asked) * 1000, (left - entered) * 1000
        return Captured(state, rows, trainer_step, cut_time, version, wait_ms, cut_ms, claimed)

    def _next_cut_time(self) -> float:
        """Now; after a clock that was set back, just behind the cut before: later cuts have later times."""
        self._newest_cut = max(self._wall_clock(), self._newest_cut + _SMALLEST_STEP_S)
        return self._newest_cut

    def _copy_state(self, cut: Cut, model_step: int, environment: EnvironmentSnapshot | None) -> RolloutState:
        parts = self._parts
        dropped = {gone.prompt.group_id for gone in parts.state.dropped}
        episodes: tuple[EpisodeRecord, ...] = ()
        if environment is not None:
            episodes = environment.check_against_cut(
                cut, parts.ledger, is_gone=lambda group_id: group_id in parts.buffer or group_id in dropped
            )
            timeout_s = parts.config.async_rl.rollout_timeout_s
            episodes = with_episodes_of_nobody(cut, parts.ledger, episodes, deadline_left_s=timeout_s)
        return RolloutState(
            progress=parts.progress(cut),
            ledger=tuple(g for g in parts.ledger.capture(cut) if g.group_id not in parts.buffer),
            buffer=parts.buffer.capture(cut),
            spares=tuple(parts.state.spares),
            dropped=tuple(parts.state.dropped),
            trained=parts.state.recorded.capture(cut, after=model_step),
            episodes=episodes,
        )

    async def publish_snapshot(self, captured: Captured) -> Manifest:
        """A rollout snapshot on the durable anchor."""
        step = captured.state.progress.train_steps
        return await self._publish("rollout_snapshot", step, captured, self._durable, ())

    async def put_metrics(self, prefix: str, step: int, metrics: Mapping[str, float]) -> FileEntry:
        """Write the metrics of a step beside its model files."""
        return await asyncio.to_thread(self._bundles.put_metrics, prefix, step, metrics)

    async def publish_checkpoint(self, captured: Captured, files: Sequence[FileEntry], *, trigger: str) -> Manifest:
        """A trainer checkpoint, on which later snapshots stand: the batches that led to it are not needed any more."""
        return await _to_its_end(self._publish_checkpoint(captured, files, trigger))

    async def _publish_checkpoint(self, captured: Captured, files: Sequence[FileEntry], trigger: str) -> Manifest:
        step, parts = captured.trainer_step, self._parts
        manifest = await self._publish("trainer_checkpoint", step, captured, None, files)
        self._durable = Anchor(kind="checkpoint", step=step, sequence=manifest.sequence, identity=self._identity)
        parts.trace.record(
            "checkpoint_published",
            sequence=manifest.sequence,
            kind=manifest.kind,
            step=step,
            trigger=trigger,
            cut_time=captured.cut_time,
        )
        async with parts.barrier.mutation("forget_recorded_steps") as mutation:
            parts.rows.remove(mutation, parts.state.recorded.forget(mutation, up_to=step))
        return manifest

    async def _publish(
        self,
        kind: Literal["trainer_checkpoint", "rollout_snapshot"],
        step: int,
        captured: Captured,
        anchor: Anchor | None,
        files: Sequence[FileEntry],
    ) -> Manifest:
        """Write off the event loop."""
        bundle = CapturedBundle(
            kind=kind,
            step=step,
            anchor=anchor,
            state=captured.state,
            rows=captured.rows,
            cut_time=captured.cut_time,
            files=tuple(files),
            config=self._parts.config,
            dataset_fingerprint=self._fingerprint,
        )
        return await _to_its_end(asyncio.to_thread(self._publish_blocking, bundle))

    def _publish_blocking(self, bundle: CapturedBundle) -> Manifest:
        """With `checkpointing.save_data_plane` off, a trainer checkpoint owes groups again instead of holding rows."""
        if bundle.kind == "trainer_checkpoint" and not self._parts.config.checkpointing.save_data_plane:
            state = without_rows(bundle.state, bundle.rows, self._parts.level_of)
            bundle = replace(bundle, state=state, rows={row_id: bundle.rows[row_id] for row_id in state.row_ids()})
        return self._bundles.publish(bundle)


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """A writing thread can't be stopped: a caller that is cancelled waits for its end, so that the save lock is never
    free while something is being published.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def is_retryable(error: BaseException) -> bool:
    """Whether saving again can help."""
    return isinstance(error, MidflightError) and error.retryable
