"""Deployment `train`: restore the run, train it to its last step, take snapshots beside the training.

A crash of this flow leaves the runtime alive; started again (`resume-guard` does it) it finds that and goes on. When
the runtime is gone too, it restores from the store.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import prefect.runtime
from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal
from prefect.states import Crashed

from flows.config_files import resolved
from flows.driver import Driver, owner_is_gone, send_away
from flows.failures import RestoreFailed, TrainFailed
from flows.home import Home
from flows.lost_worker import outlive_the_worker
from flows.restore import restore, restore_child
from flows.tags import tag_with_run
from flows.termination import cancelled_by_sigterm
from storage.errors import MidflightError, StaleIncarnation
from storage.filesystem import open_store
from storage.run_config import RunConfig
from tasks.ray_runtime import RayRuntime
from tasks.reports import TrainingReport
from tasks.restore_artifact import RestoreOutcome
from tasks.results import forget_results
from tasks.retries import first_cause, is_mended_by_resume, is_retryable
from tasks.run_progress import progress_of
from tasks.runtime import (
    UNRESTORED_STATES,
    OwnerIsGone,
    Runtime,
    RuntimeStatus,
    SendAway,
    close_runtime,
    ensure_runtime,
    held,
    leave,
    reached_end_of_data,
)
from tasks.snapshots import attempt_number, attempt_snapshot
from tasks.training import segment_end, train_steps

HEARTBEATS_PER_LEASE = 4

RestoreRun = Callable[[RuntimeStatus], Awaitable[None]]


@flow(name="train", flow_run_name="train-{config.name}", persist_result=False)
async def train(config: RunConfig, take_over: bool = False) -> dict[str, Any] | State[Any]:
    """Train a run to `algorithm.max_steps`, from wherever its store says it stands.

    What a new start can mend (the runtime or the store was lost) ends it as Crashed, so that it is resumed; all else as
    Failed.

    Args:
        config: The run. All keys: docs/configuration.md.
        take_over: Take the run over from a `train` that drives it now, or from a controller in another cluster. Without
            it this flow run is refused while somebody else holds the run. It counts for the first try: resumed or
            retried, this flow run takes nothing over from whoever came after it.
    """
    outlive_the_worker()
    config = resolved(config)
    await tag_with_run(config.name)
    driver = str(Driver.this_flow_run())

    async def restore_run(status: RuntimeStatus) -> None:
        if prefect.runtime.deployment.id:
            await restore_by_deployment(config, driver, status.incarnation)
        else:
            await restore(config, driver)

    runtime = RayRuntime(config.name, cache=Home.current().cache, driver=driver)
    try:
        return await drive(
            config,
            runtime,
            driver=driver,
            restore_run=restore_run,
            owner_is_gone=owner_is_gone,
            send_away=send_away if take_over and prefect.runtime.flow_run.run_count <= 1 else None,
        )
    except MidflightError as error:
        if not is_mended_by_resume(error):
            raise
        get_run_logger().exception("a new start can mend this")
        return Crashed(message=f"{type(error).__name__}: {error}")


async def drive(
    config: RunConfig,
    runtime: Runtime,
    *,
    driver: str,
    restore_run: RestoreRun,
    owner_is_gone: OwnerIsGone,
    send_away: SendAway | None = None,
) -> dict[str, Any]:
    """Hold the run's runtime, restore it if nothing runs in it yet, train, close it."""
    status = await ensure_runtime(runtime, config, driver, owner_is_gone, send_away)
    async with held(runtime, driver, every_s=config.cluster.driver_lease_s / HEARTBEATS_PER_LEASE):
        try:
            with cancelled_by_sigterm():
                if status.state in UNRESTORED_STATES:
                    await restore_run(status)
                    status = await _restored_status(runtime)
                loops = TrainingLoops(config, runtime, status, await asyncio.to_thread(_report, config))
                summary = await loops.run()
        except (asyncio.CancelledError, TerminationSignal):  # SIGTERM arrives as either
            await leave(runtime, "its flow run was cancelled or preempted", grace_s=config.cluster.grace_s)
            raise
        closed = await close_runtime(runtime, config.rollout_checkpointing.enabled)
        if closed.get("checkpoint_failure"):
            raise TrainFailed(
                f"run {config.name} ended, but its last trainer checkpoint was not published "
                f"({closed['checkpoint_failure']}): remove the cause and start `train` again, it saves it"
            )
        return {**summary, "closed": closed}


async def restore_by_deployment(config: RunConfig, driver: str, incarnation: str) -> None:
    """Run the `restore` deployment as a child, so that it can be retried at its failed link from the UI.

    A retried `train` finds the child of its earlier try; if that failed, its failed link is tried again.
    """
    this = prefect.runtime.flow_run
    child = await restore_child(config, driver, key=f"restore-of-{this.id}-{incarnation}", earlier_than=_started())
    if child.state is None or not child.state.is_completed():
        reason = child.state.message if child.state is not None else "it has no state"
        raise RestoreFailed(
            f"flow run {child.name} ({child.id}) did not restore {config.name}; after the cause is removed, press "
            f"Retry on it or start `train` again: {reason}"
        )


def _started() -> datetime | None:
    """When this try of the flow run began; None for its first."""
    this = prefect.runtime.flow_run
    return this.scheduled_start_time if this.run_count > 1 else None


async def _restored_status(runtime: Runtime) -> RuntimeStatus:
    status = await runtime.status()
    if status is None or status.state in UNRESTORED_STATES:
        raise StaleIncarnation(f"run {runtime.run}: its runtime ended right after the restore; start `train` again")
    return status


def _report(config: RunConfig) -> TrainingReport:
    store = open_store(config.store.url, deadline_s=config.store.deadline_s)
    earlier = progress_of(store, config.name)
    return TrainingReport(config.name, max_steps=config.algorithm.max_steps, earlier=earlier)


@dataclass(slots=True)
class _Counts:
    steps: int
    snapshots: int = 0
    skipped: int = 0
    failed: int = 0
    reward: float | None = None


class TrainingLoops:
    """Two loops beside each other: segments of train steps, and snapshot attempts until the steps are done."""

    def __init__(self, config: RunConfig, runtime: Runtime, status: RuntimeStatus, report: TrainingReport) -> None:
        self._config = config
        self._runtime = runtime
        self._incarnation = status.incarnation
        self._report = report
        self._trained = False
        self._woken = asyncio.Event()
        self._durable_step = 0
        self._outcome = RestoreOutcome(config)
        self._counts = _Counts(steps=status.train_steps)

    async def run(self) -> dict[str, Any]:
        """Both loops to their end. Raises what the first of them failed with."""
        failure: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._train(), name="segments")
                if self._config.rollout_checkpointing.enabled:
                    group.create_task(self._snapshot(), name="snapshot attempts")
        except BaseExceptionGroup as errors:
            failure = first_cause(errors)
        if failure is not None:  # raised here, so that its own cause stays attached to it
            raise failure
        counts = self._counts
        return {
            "steps": counts.steps,
            "snapshots": counts.snapshots,
            "skipped_attempts": counts.skipped,
            "failed_attempts": counts.failed,
            "reward": counts.reward,
        }

    async def _train(self) -> None:
        """Takes step numbers, gives reports to the artifacts, waits for the controller."""
        max_steps, step_s = self._config.algorithm.max_steps, None
        while self._counts.steps < max_steps:
            first = self._counts.steps + 1
            last = segment_end(first, max_steps=max_steps, step_s=step_s)
            started = time.perf_counter()
            reports = await train_steps(self._runtime, first, last, self._incarnation)
            forget_results()
            step_s = (time.perf_counter() - started) / max(1, len(reports))
            await self._publish(reports)
            if reached_end_of_data(reports) or not reports:
                break
        await self._report.finish()
        self._trained = True
        self._woken.set()

    async def _publish(self, reports: list[dict[str, Any]]) -> None:
        for report in reports:
            self._notice_late_checkpoint(report)
        if reports:
            self._counts.steps = int(reports[-1]["step"])
            self._counts.reward = reports[-1].get("rewards_mean", self._counts.reward)
        await self._report.add(reports)
        await self._outcome.refresh()

    async def _snapshot(self) -> None:
        """Takes the time, gives numbered attempts to the controller, until the steps are trained.

        An attempt that failed although it was retried fails alone: the next one tries again. It is the controller that
        ends the run after `rollout_checkpointing.max_consecutive_failures` of them, and the train steps then say so.
        """
        while not await self._trained_within(self._config.rollout_checkpointing.interval_s):
            try:
                outcome = await attempt_snapshot(self._runtime, attempt_number(), False, self._incarnation)
                forget_results()
            except MidflightError as error:
                if not is_retryable(error):
                    raise
                self._counts.failed += 1
                continue
            if outcome["outcome"] == "completed":
                self._counts.snapshots += 1
            else:
                self._counts.skipped += 1

    def _notice_late_checkpoint(self, report: dict[str, Any]) -> None:
        """A checkpoint that was published after later steps had been trained: a snapshot on it is due at once."""
        durable_step = int(report.get("durable_step", 0))
        if self._durable_step < durable_step < int(report["step"]):
            self._woken.set()
        self._durable_step = max(self._durable_step, durable_step)

    async def _trained_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._woken.wait(), seconds)
        self._woken.clear()
        return self._trained
