"""The controller as a detached Ray actor: store, trace, sign of life, driver lease, and the verbs that tasks call.

A verb that carries its driver is obeyed only while that driver holds the run.
"""

import asyncio
import gc
import logging
import os
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from gpu_workers.controller.driver_lease import DriverLease
from gpu_workers.controller.published_bundles import PublishedBundles
from gpu_workers.controller.restorer import RestorePlan
from gpu_workers.controller.single_controller import ControllerState, SingleController
from gpu_workers.environments.ports import EnvironmentControl
from gpu_workers.environments.served import control_of, served_instances
from gpu_workers.environments.tasks import Task, build_task
from gpu_workers.generation.supervision import SupervisedGenerators
from gpu_workers.narration import NarratedTrace
from gpu_workers.preemption import on_preemption
from gpu_workers.ray_generators import RayGenerator, RayGeneratorHost
from gpu_workers.ray_ports import RayTrainer
from gpu_workers.runtime_names import end_workers, hold_weights, remove_weights
from gpu_workers.worker_logs import Record, keep_logs
from storage.errors import Fenced, MidflightError, StaleIncarnation
from storage.filesystem import Store, open_store
from storage.identity import identity
from storage.layout import RunLayout
from storage.manifests import ManifestLog
from storage.ownership import SignOfLife, claim
from storage.run_config import RunConfig
from storage.run_record import create_run_record
from storage.trace import NoTrace, TraceWriter
from storage.trace_compaction import compact_at_end

_LEASE_CHECKS = 20
_LAST_WORDS_S = 0.2  # for the reply to leave the process
_LAST_SIGN_S = 5.0
_FENCED_WORDS_S = 5.0  # for a driver between two calls to ask, and be told

logger = logging.getLogger(__name__)


class ControllerActor:
    """Constructed only after its workers are ready. Claiming the manifest log fences every older controller."""

    def __init__(
        self,
        config: RunConfig,
        incarnation: str,
        engines: Sequence[Any],
        trainers: Sequence[Any],
        pids: Mapping[str, Any],
        weights_dir: str,
        model_dir: str,
        claimable_after: int | None,
    ) -> None:
        """`claimable_after` is the claim that this one may follow; None takes the run over from whoever holds it."""
        self._config = config
        self._incarnation = incarnation
        self._weights = hold_weights(Path(weights_dir) / incarnation)
        self._pids = {**pids, "controller": os.getpid()}
        store, layout = open_store(config.store.url, deadline_s=config.store.deadline_s), RunLayout(config.name)
        create_run_record(store, layout, config)
        log = ManifestLog(store, layout, incarnation)
        self._lease = DriverLease(config.name, incarnation, lease_s=config.cluster.driver_lease_s)
        self._sign_of_life = SignOfLife(
            store, layout, log, driver=lambda: self._lease.driver, on_fenced=self._hear_of_fence()
        )
        self._claim(store, layout, log, claimable_after)
        trace: NoTrace | TraceWriter = NoTrace()
        process = f"controller-{incarnation}"
        if config.rollout_checkpointing.trace:
            trace = TraceWriter(store, layout, process=process, run_process=incarnation)
        self._compact_trace = partial(compact_at_end, store, layout, process)
        self._fingerprint = identity(config).fingerprint
        facts = {"incarnation": incarnation, "config_fingerprint": self._fingerprint, "pids": self._pids}
        trace.record("run_started", **facts)
        self._trace = trace
        self._trace_is_closed = False
        self._logs = keep_logs("controller")
        narrated = NarratedTrace(trace, self._logs.add)
        self._generators = SupervisedGenerators(
            config,
            RayGeneratorHost(config, Path(model_dir)),
            [RayGenerator(actor, facts) for actor, facts in zip(engines, pids["generators"], strict=True)],
            trace=narrated,
        )
        task, saving = build_task(config.data), (config.checkpointing, config.rollout_checkpointing)
        self._controller = SingleController(
            config,
            environments=self._environments(task),
            incarnation=incarnation,
            dataset=task,
            trainer=RayTrainer(trainers, on_lost=lambda lost: self._controller.parts.state.fail(lost)),
            generator=self._generators,
            bundles=PublishedBundles(store, layout, log, checkpointing=saving[0], snapshots=saving[1]),
            trace=narrated,
        )
        gc.freeze()  # what start-up made stays: a full collection would stop the event loop for tens of milliseconds
        self._watch: asyncio.Task[None] | None = None
        self._fence_watch = asyncio.create_task(self._watch_for_failure(), name="fence watch")
        self._leaving: asyncio.Task[dict[str, Any]] | None = None
        on_preemption(lambda: self._leave("preempted: SIGTERM"))

    def _environments(self, task: Task) -> list[EnvironmentControl]:
        """Those inside the generators, or the servers that can save episodes. A Gym's `/run` saves none."""
        if not task.is_multi_turn:
            for agent in sorted(task.agents):
                self._trace.record("environment_restart_only", instance=agent)
            return []
        served = served_instances(self._config.environment.servers)
        for instance in served:
            if not instance.saves_episodes:
                self._trace.record("environment_restart_only", instance=instance.name)
        if not served:
            return self._generators.environments
        return [control_of(instance) for instance in served if instance.saves_episodes]

    def _claim(self, store: Store, layout: RunLayout, log: ManifestLog, after: int | None) -> None:
        """Show a sign of life, then claim: a claim without one counts as given up."""
        self._sign_of_life.begin()
        try:
            claim(store, layout, log, after=after)
        except BaseException:
            self._sign_of_life.close()
            raise
        self._sign_of_life.keep()

    async def describe(self) -> dict[str, Any]:
        """Identity, state, counts and process ids."""
        return {
            **self._controller.describe(),
            "incarnation": self._incarnation,
            "config_fingerprint": self._fingerprint,
            "driver": self._lease.driver,
            "pids": {**self._pids, "generators": self._generators.facts},
        }

    async def attach_driver(self, driver: str, take_over: bool = False) -> None:
        """Make `driver` the one that drives this run. Raises `RunAlreadyLive` while another's lease runs, unless
        `take_over`.
        """
        self._lease.attach(driver, take_over=take_over)
        if self._watch is None:
            self._watch = asyncio.create_task(self._watch_driver(), name="driver lease")

    async def detach_driver(self, driver: str) -> None:
        """`driver` has ended; another may attach at once. The runtime goes on until `driver_ttl_s`."""
        self._lease.detach(driver)

    async def heartbeat(self, driver: str) -> None:
        """Renew the lease. Raises `RunAlreadyLive` when another driver has taken the run."""
        self._lease.hear(driver)

    async def take_logs(self, records: Sequence[Record], lost: int) -> None:
        """What a worker logged."""
        self._logs.extend(records, lost)

    async def read_logs(self) -> dict[str, Any]:
        """`records` of all processes since the last call, by time, and how many more there were (`lost`)."""
        records, lost = self._logs.take()
        return {"records": records, "lost": lost}

    async def restore_link(
        self, link: str, plan: Mapping[str, int | None], incarnation: str, driver: str | None = None
    ) -> dict[str, Any]:
        """One link of the restore chain."""
        self._require(incarnation)
        restore_plan = RestorePlan(target=plan["target"], anchor=plan["anchor"])
        return dict(await self._detached(self._controller.restore_link(link, restore_plan), driver))

    async def train_steps(
        self, first: int, last: int, incarnation: str, driver: str | None = None
    ) -> list[dict[str, Any]]:
        """Numbered train steps; see `SingleController.train_steps`."""
        self._require(incarnation)
        reports = await self._detached(self._controller.train_steps(first, last), driver)
        return [dict(report) for report in reports]

    async def attempt_snapshot(
        self, number: int, force: bool, incarnation: str, driver: str | None = None
    ) -> dict[str, Any]:
        """One numbered snapshot attempt."""
        self._require(incarnation)
        return asdict(await self._detached(self._controller.attempt_snapshot(number, force=force), driver))

    async def checkpoint(self, incarnation: str) -> dict[str, Any]:
        """A trainer checkpoint at the next step boundary, on request; durable when this returns."""
        self._require(incarnation)
        return dict(await self._detached(self._controller.checkpoint(), None))

    async def close(self, snapshot: bool, driver: str | None = None) -> dict[str, Any]:
        """End the pumps, after a last forced snapshot if asked for and possible, and flush and compact the trace.

        A checkpoint that is still written in the background is waited for; `checkpoint_failure` says why it could not
        be published. The caller ends the actors (`launch.end_runtime`).
        """
        if driver is not None:
            self._lease.hear(driver)
        unsaved: str | None = None
        try:
            await self._controller.settle_saves()
        except MidflightError as error:
            unsaved = f"{type(error).__name__}: {error}"
        if snapshot:
            await self._publish_last()
        described = await self._end("closed by its driver")
        if self._trace_is_closed:
            await asyncio.to_thread(self._compact_trace)
        return {**described, "checkpoint_failure": unsaved}

    async def preempt(self, reason: str, driver: str | None = None) -> dict[str, Any]:
        """Publish what is in flight and end the runtime, within `cluster.grace_s`; answers just before it ends."""
        if driver is not None:
            self._lease.hear(driver)
        return await asyncio.shield(self._leave(reason))

    def _leave(self, reason: str) -> "asyncio.Task[dict[str, Any]]":
        """Start to leave, once."""
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._publish_and_end(reason), name="preemption")
        return self._leaving

    async def _publish_and_end(self, reason: str) -> dict[str, Any]:
        await self._publish_last()
        described = await self._end(reason)
        end = partial(end_workers, self._config.name, controller_last=True)
        asyncio.get_running_loop().call_later(_LAST_WORDS_S, end)
        return described

    async def _publish_last(self) -> None:
        """A forced snapshot outside the driver's numbering. Its failure is in the trace and costs nothing else."""
        if self._controller.state in (ControllerState.RUNNING, ControllerState.PARKED):
            with suppress(MidflightError, TimeoutError):
                async with asyncio.timeout(self._config.cluster.grace_s):
                    await self._controller.publish_last(-time.time_ns())

    async def _end(self, reason: str) -> dict[str, Any]:
        await self._generators.close()
        await self._controller.close(reason)
        self._trace_is_closed = await asyncio.to_thread(self._trace.close)
        with suppress(TimeoutError):  # a store that hangs: the record shows its age
            await asyncio.wait_for(asyncio.to_thread(self._sign_of_life.close), _LAST_SIGN_S)
        remove_weights(self._weights)
        return await self.describe()

    def _hear_of_fence(self) -> Callable[[Fenced], None]:
        """For the thread that looks whether another controller has claimed the run."""
        loop = asyncio.get_running_loop()

        def hear(fenced: Fenced) -> None:
            loop.call_soon_threadsafe(self._controller.parts.state.fail, fenced)

        return hear

    async def _watch_for_failure(self) -> None:
        """A run that failed publishes nothing more, so that it may be claimed from anywhere. When it failed because it
        was claimed, a publication or the sign of life found that out: say so, and end the runtime.
        """
        state = self._controller.parts.state
        await state.changed.wait_for(lambda: state.failure is not None)
        if not isinstance(state.failure, Fenced):
            await asyncio.to_thread(self._sign_of_life.close)
            return
        logger.error("%s", state.failure)
        self._trace.record("fenced", reason=str(state.failure))
        self._lease.end(state.failure)
        await self._end("fenced: another controller holds the run")
        end = partial(end_workers, self._config.name, controller_last=True)
        asyncio.get_running_loop().call_later(_FENCED_WORDS_S, end)

    async def _watch_driver(self) -> None:
        """Park after `driver_lease_s` of silence, with a snapshot; end the whole runtime after `driver_ttl_s`."""
        cluster = self._config.cluster
        parked = False
        while True:
            await asyncio.sleep(cluster.driver_lease_s / _LEASE_CHECKS)
            silence = self._lease.silence_s
            if silence > cluster.driver_ttl_s:
                await self._end(f"no driver for {silence:.0f} s")
                end_workers(self._config.name, controller_last=True)
                return
            if silence > cluster.driver_lease_s and not parked and self._controller.state is ControllerState.RUNNING:
                parked = True
                await self._publish_last()
            elif silence <= cluster.driver_lease_s and parked:
                parked = False
                self._controller.unpark()

    async def _detached(self, work: Coroutine[Any, Any, Any], driver: str | None) -> Any:
        """Finish `work` even if the call that asked for it is cancelled: a step may not stop half-way.

        A driver that is replaced meanwhile is told so at once; its successor joins the step.
        """
        if driver is None:
            return await asyncio.shield(asyncio.ensure_future(work))
        try:
            self._lease.hear(driver)
        except MidflightError:
            work.close()
            raise
        running = asyncio.ensure_future(work)
        running.add_done_callback(lambda done: done.cancelled() or done.exception())  # may be nobody's by then
        lost = asyncio.ensure_future(self._lease.lost(driver))
        try:
            await asyncio.wait({running, lost}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                raise lost.result()
            return running.result()
        finally:
            lost.cancel()

    def _require(self, incarnation: str) -> None:
        if incarnation != self._incarnation:
            raise StaleIncarnation(
                f"the task relied on incarnation {incarnation} of run '{self._config.name}', but {self._incarnation} "
                "is running; start again from the restore"
            )
