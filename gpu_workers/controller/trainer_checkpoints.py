"""Saves trainer checkpoints: model and optimizer by the trainer, rollout state beside them, the manifest last.

    idle --begin: cut, the trainer copies its state--> writing --all ranks have written--> written --publish--> idle

A checkpoint that is saved in the background stays `writing` while steps go on. It is published as soon as it is
written, or, deferred, at the next step boundary or snapshot attempt after that; always under the save lock. Its failure
is raised by the next save, or when the run is closed.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpu_workers.controller.bundle_publisher import BundlePublisher, Captured, is_retryable
from gpu_workers.controller.checkpoint_schedule import Trigger
from gpu_workers.controller.parts import RolloutParts
from gpu_workers.controller.ports import Trainer
from storage.errors import BrokenInvariant
from storage.fault_points import reached
from storage.manifests import Anchor, FileEntry


@dataclass(slots=True)
class _Pending:
    """A checkpoint on its way. `failure`: why it could not be published when nobody was there to be told."""

    captured: Captured
    prefix: str
    trigger: Trigger
    metrics: Mapping[str, float]
    writes: asyncio.Future[Sequence[Mapping[str, Any]]]
    failure: Exception | None = None

    @property
    def has_failed(self) -> bool:
        ended = self.writes.done()
        return self.failure is not None or (ended and (self.writes.cancelled() or self.writes.exception() is not None))

    @property
    def is_written(self) -> bool:
        return self.writes.done() and not self.has_failed


class TrainerCheckpoints:
    """Owns the checkpoint that is on its way, one at most."""

    def __init__(self, parts: RolloutParts, trainer: Trainer, publisher: BundlePublisher) -> None:
        self._parts = parts
        self._trainer = trainer
        self._publisher = publisher
        self._defers = parts.config.checkpointing.defer_async_checkpoint_finalize
        self._pending: _Pending | None = None
        self._watcher: asyncio.Task[None] | None = None

    @property
    def saved_step(self) -> int:
        """The newest step that is durable or, as far as is known, will be."""
        pending = self._pending
        if pending is not None and not pending.has_failed:
            return pending.captured.trainer_step
        return self._publisher.durable.step

    async def save(
        self, step: int, trigger: Trigger, *, metrics: Mapping[str, float] | None = None, in_background: bool = False
    ) -> Anchor:
        """Save the committed step `step`, with its `metrics`; one that is durable already is left as it is. Returns the
        durable anchor.

        Waits for an earlier checkpoint that is still on its way, and raises its failure. A retryable failure may be
        tried again; any other one ends the run.
        """
        async with self._publisher.lock:
            try:
                await self._finish()
                durable = self._publisher.durable
                if durable.kind == "checkpoint" and durable.step == step:
                    return durable
                await self._begin(step, trigger, metrics or {})
                if not in_background:
                    await self._finish()
                elif not self._defers:
                    self._watcher = asyncio.create_task(self._publish_when_written(), name="checkpoint publication")
            except Exception as error:
                self._end_run_unless_retryable(error)
                raise
            return self._publisher.durable

    async def publish_written(self) -> None:
        """At a step boundary: publish a checkpoint that is written but not published yet; never waits for writes."""
        if self._pending is not None and self._pending.is_written:
            async with self._publisher.lock:
                await self._publish_quietly()

    async def flush(self) -> None:
        """For the holder of the save lock: publish what is written, and raise the failure of what is not.

        A checkpoint that is still being written is left alone: a snapshot needs no newer anchor than the durable one.
        """
        if self._pending is not None and self._pending.writes.done():
            await self._finish()

    async def settle(self) -> None:
        """Wait until nothing is on its way any more. Raises its failure."""
        async with self._publisher.lock:
            await self._finish()

    async def forget_failed(self) -> None:
        """Before the last snapshot of a process: a checkpoint that failed is told in the trace, and in nobody's way."""
        async with self._publisher.lock:
            pending = self._pending
            if pending is not None and pending.has_failed:
                self._pending = None
                self._record_failure(pending, pending.failure or pending.writes.exception())

    def abandon(self) -> None:
        """The controller has ended: nothing is published any more."""
        if self._watcher is not None:
            self._watcher.cancel()

    async def _begin(self, step: int, trigger: Trigger, metrics: Mapping[str, float]) -> None:
        publisher = self._publisher
        if self._parts.buffer.claimed():
            raise BrokenInvariant(f"trainer checkpoint of step {step} while a train step holds claimed groups")
        captured = await publisher.capture(model_step=step)
        if (captured.trainer_step, captured.state.model_step) != (step, step):
            raise BrokenInvariant(
                f"trainer checkpoint of step {step} found the trainer at {captured.trainer_step} and rollout state on "
                f"{captured.state.model_step}"
            )
        prefix = publisher.checkpoint_prefix(step)
        await self._trainer.begin_save(prefix)
        reached("checkpoint:begun", self._parts.config.name)
        writes = asyncio.ensure_future(self._trainer.finish_save(prefix))
        self._pending = _Pending(captured, prefix, trigger, metrics, writes)

    async def _finish(self) -> None:
        """Wait for the writes and publish. A cancelled caller leaves the checkpoint on its way."""
        pending = self._pending
        if pending is None:
            return
        try:
            await asyncio.shield(pending.writes)
            if pending.failure is not None:
                raise pending.failure
            await self._publish(pending)
        except Exception as error:
            self._pending = None
            self._record_failure(pending, error)
            raise
        self._pending = None

    async def _publish(self, pending: _Pending) -> None:
        reached("checkpoint:written", self._parts.config.name)
        publisher, captured = self._publisher, pending.captured
        files = [FileEntry(**entry) for entry in pending.writes.result()]
        if pending.metrics:
            files.append(await publisher.put_metrics(pending.prefix, captured.trainer_step, pending.metrics))
        await publisher.publish_checkpoint(captured, files, trigger=pending.trigger)

    async def _publish_when_written(self) -> None:
        pending = self._pending
        assert pending is not None
        await asyncio.wait([pending.writes])
        async with self._publisher.lock:
            if self._pending is pending:
                await self._publish_quietly()

    async def _publish_quietly(self) -> None:
        """Publish what is written. Nobody waits for it: its failure is kept for the next save."""
        pending = self._pending
        if pending is None or not pending.is_written:
            return
        try:
            await self._publish(pending)
        except Exception as error:  # noqa: BLE001 - kept, and raised by whoever saves next
            pending.failure = error
            self._end_run_unless_retryable(error)
        else:
            self._pending = None

    def _end_run_unless_retryable(self, error: Exception) -> None:
        if not is_retryable(error):
            self._parts.state.fail(error)

    def _record_failure(self, pending: _Pending, error: BaseException | None) -> None:
        step, reason = pending.captured.trainer_step, f"{type(error).__name__}: {error}"
        self._parts.trace.record("checkpoint_failed", step=step, trigger=pending.trigger, reason=reason[:500])
