"""The controller as a detached Ray actor: store, trace, driver lease, and the verbs that tasks call."""

import asyncio
import gc
import os
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from gpu_workers.controller.published_bundles import PublishedBundles
from gpu_workers.controller.restorer import RestorePlan
from gpu_workers.controller.single_controller import ControllerState, SingleController
from gpu_workers.environments.tasks import build_task
from gpu_workers.generation.supervision import SupervisedGenerators
from gpu_workers.narration import NarratedTrace
from gpu_workers.preemption import on_preemption
from gpu_workers.ray_generators import RayGenerator, RayGeneratorHost
from gpu_workers.ray_ports import RayTrainer
from gpu_workers.runtime_names import end_workers, remove_weights
from gpu_workers.worker_logs import Record, keep_logs
from storage.errors import MidflightError, RunAlreadyLive, StaleIncarnation
from storage.filesystem import open_store
from storage.identity import identity
from storage.layout import RunLayout
from storage.manifests import ManifestLog
from storage.run_config import RunConfig
from storage.run_record import create_run_record
from storage.trace import NoTrace, TraceWriter

_LEASE_CHECKS = 20
_LAST_WORDS_S = 0.2  # for the reply to leave the process


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
    ) -> None:
        self._config = config
        self._incarnation = incarnation
        self._weights_dir = Path(weights_dir)
        self._pids = {**pids, "controller": os.getpid()}
        store, layout = (
            open_store(config.store.url, deadline_s=config.store.deadline_s),
            RunLayout(config.name),
        )
        create_run_record(store, layout, config)
        log = ManifestLog(store, layout, incarnation)
        log.claim()
        trace: NoTrace | TraceWriter = NoTrace()
        if config.rollout_checkpointing.trace:
            trace = TraceWriter(store, layout, process=f"controller-{incarnation}", run_process=incarnation)
        self._fingerprint = identity(config).fingerprint
        facts = {"incarnation": incarnation, "config_fingerprint": self._fingerprint, "pids": self._pids}
        trace.record("run_started", **facts)
        self._trace = trace
        self._logs = keep_logs("controller")
        narrated = NarratedTrace(trace, self._logs.add)
        self._generators = SupervisedGenerators(
            config,
            RayGeneratorHost(config, Path(model_dir)),
            [RayGenerator(actor, facts) for actor, facts in zip(engines, pids["generators"], strict=True)],
            trace=narrated,
        )
        self._controller = SingleController(
            config,
            dataset=build_task(config.data),
            trainer=RayTrainer(trainers),
            generator=self._generators,
            bundles=PublishedBundles(
                store,
                layout,
                log,
                checkpointing=config.checkpointing,
                snapshots=config.rollout_checkpointing,
            ),
            trace=narrated,
        )
        gc.freeze()  # what start-up made stays: a full collection would stop the event loop for tens of milliseconds
        self._driver: str | None = None
        self._heard = time.monotonic()
        self._watch: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[dict[str, Any]] | None = None
        on_preemption(lambda: self._leave("preempted: SIGTERM"))

    async def describe(self) -> dict[str, Any]:
        """Identity, state, counts and process ids."""
        driver = self._driver if self._lease_is_live() else None
        return {
            **self._controller.describe(),
            "incarnation": self._incarnation,
            "config_fingerprint": self._fingerprint,
            "driver": driver,
            "pids": {**self._pids, "generators": self._generators.facts},
        }

    async def attach_driver(self, driver: str) -> None:
        """Make `driver` the one that drives this run. Raises `RunAlreadyLive` while another's lease runs."""
        if self._driver not in (None, driver) and self._lease_is_live():
            raise RunAlreadyLive(
                f"run '{self._config.name}' is driven by {self._driver} (incarnation {self._incarnation}); "
                "wait for it, cancel it, or choose another name"
            )
        self._driver = driver
        self._hear()
        if self._watch is None:
            self._watch = asyncio.create_task(self._watch_driver(), name="driver lease")

    async def detach_driver(self, driver: str) -> None:
        """`driver` has ended; another may attach at once. The runtime goes on until `driver_ttl_s`."""
        if self._driver == driver:
            self._driver = None

    async def heartbeat(self, driver: str) -> None:
        """Renew the lease. Raises `RunAlreadyLive` when another driver has taken the run."""
        if self._driver != driver:
            raise RunAlreadyLive(f"run '{self._config.name}' is driven by {self._driver}, no longer by {driver}")
        self._hear()

    async def take_logs(self, records: Sequence[Record], lost: int) -> None:
        """What a worker logged."""
        self._logs.extend(records, lost)

    async def read_logs(self) -> dict[str, Any]:
        """`records` of all processes since the last call, by time, and how many more there were (`lost`)."""
        records, lost = self._logs.take()
        return {"records": records, "lost": lost}

    async def restore_link(self, link: str, plan: Mapping[str, int | None], incarnation: str) -> dict[str, Any]:
        """One link of the restore chain."""
        self._require(incarnation)
        restore_plan = RestorePlan(target=plan["target"], anchor=plan["anchor"])
        return dict(await self._detached(self._controller.restore_link(link, restore_plan)))

    async def train_steps(self, first: int, last: int, incarnation: str) -> list[dict[str, Any]]:
        """Numbered train steps; see `SingleController.train_steps`."""
        self._require(incarnation)
        reports = await self._detached(self._controller.train_steps(first, last))
        return [dict(report) for report in reports]

    async def attempt_snapshot(self, number: int, force: bool, incarnation: str) -> dict[str, Any]:
        """One numbered snapshot attempt."""
        self._require(incarnation)
        return asdict(await self._detached(self._controller.attempt_snapshot(number, force=force)))

    async def checkpoint(self, incarnation: str) -> dict[str, Any]:
        """A trainer checkpoint at the next step boundary, on request; durable when this returns."""
        self._require(incarnation)
        return dict(await self._detached(self._controller.checkpoint()))

    async def close(self, snapshot: bool) -> dict[str, Any]:
        """End the pumps, after a last forced snapshot if asked for and possible, and flush the trace.

        A checkpoint that is still written in the background is waited for; `checkpoint_failure` says why it could not
        be published. The caller ends the actors (`launch.end_runtime`).
        """
        unsaved: str | None = None
        try:
            await self._controller.settle_saves()
        except MidflightError as error:
            unsaved = f"{type(error).__name__}: {error}"
        if snapshot:
            await self._publish_last()
        return {**await self._end("closed by its driver"), "checkpoint_failure": unsaved}

    async def preempt(self, reason: str) -> dict[str, Any]:
        """Publish what is in flight and end the runtime, within `cluster.grace_s`; answers just before it ends."""
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
        await asyncio.to_thread(self._trace.close)
        remove_weights(self._weights_dir)
        return await self.describe()

    async def _watch_driver(self) -> None:
        """Park after `driver_lease_s` of silence, with a snapshot; end the whole runtime after `driver_ttl_s`."""
        cluster = self._config.cluster
        parked = False
        while True:
            await asyncio.sleep(cluster.driver_lease_s / _LEASE_CHECKS)
            silence = time.monotonic() - self._heard
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

    async def _detached(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Finish `work` even if the call that asked for it is cancelled: a step may not stop half-way."""
        self._hear()
        return await asyncio.shield(asyncio.ensure_future(work))

    def _hear(self) -> None:
        self._heard = time.monotonic()

    def _lease_is_live(self) -> bool:
        return time.monotonic() - self._heard < self._config.cluster.driver_lease_s

    def _require(self, incarnation: str) -> None:
        if incarnation != self._incarnation:
            raise StaleIncarnation(
                f"the task relied on incarnation {incarnation} of run '{self._config.name}', but {self._incarnation} "
                "is running; start again from the restore"
            )
