"""The single controller: builds the parts, owns the loops, answers verbs.

    empty --restore links--> restoring --start--> running <--park/unpark--> parked
    any --failure--> failed;  any --close--> ended

It moves metadata only. It knows neither Ray nor Prefect; `controller_actor.py` makes it an actor.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Any

from gpu_workers.controller.bundle_publisher import BundlePublisher
from gpu_workers.controller.call_peeker import CallPeeker
from gpu_workers.controller.checkpoint_schedule import CheckpointSchedule, Trigger, require_metric, step_metrics
from gpu_workers.controller.counted_trace import CountedTrace
from gpu_workers.controller.environment_checkpoint import build_environment_checkpoint
from gpu_workers.controller.finalizer import Assemble, Finalizer
from gpu_workers.controller.group_runner import GroupRunner
from gpu_workers.controller.parts import RolloutParts
from gpu_workers.controller.ports import Generator, Trace, Trainer
from gpu_workers.controller.prompt_source import Dataset
from gpu_workers.controller.published_bundles import PublishedBundles
from gpu_workers.controller.restorer import LINKS, RestorePlan, RolloutRestorer
from gpu_workers.controller.rollout_deadlines import RolloutDeadlines
from gpu_workers.controller.rollout_pump import RolloutPump
from gpu_workers.controller.row_assembly import assemble_group
from gpu_workers.controller.snapshotter import PASSING_REASONS, RolloutSnapshotter, SnapshotOutcome
from gpu_workers.controller.stale_groups import StaleGroups
from gpu_workers.controller.train_pump import TrainPump
from gpu_workers.controller.trainer_checkpoints import TrainerCheckpoints
from gpu_workers.controller.watchdog import Watchdog
from gpu_workers.controller.weight_sync import WeightSync
from gpu_workers.environments.ports import EnvironmentControl
from storage.errors import BrokenInvariant, ConfigurationError, MidflightError, StaleIncarnation
from storage.fault_points import reached
from storage.identity import identity
from storage.manifests import Anchor
from storage.run_config import RunConfig

_EARLY_SNAPSHOT = -1  # drivers number theirs from 1
_TURNS_TO_DISPATCH = 10  # of the event loop, after which all restored groups that there is room for are dispatched


class ControllerState(StrEnum):
    """Where a controller is in its life."""

    EMPTY = "empty"
    RESTORING = "restoring"
    RUNNING = "running"
    PARKED = "parked"
    FAILED = "failed"
    ENDED = "ended"


class SingleController:
    """One run's rollout pump, train pump, snapshots and restore, behind a few verbs."""

    def __init__(
        self,
        config: RunConfig,
        *,
        dataset: Dataset,
        trainer: Trainer,
        generator: Generator,
        bundles: PublishedBundles,
        trace: Trace,
        environments: Sequence[EnvironmentControl] = (),
        incarnation: str = "controller",
        assemble: Assemble = assemble_group,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`environments`: the instances of a multi-turn environment; none for single-turn tasks. `assemble` makes the
        training rows of a group from its calls, in a thread; `clock`, in seconds of any origin, is what the stall
        watchdog goes by.
        """
        self.parts = RolloutParts.empty(config, dataset, CountedTrace(trace, clock=clock))
        self._bundles = bundles
        self._weight_sync = WeightSync(self.parts, trainer, generator)
        deadlines = RolloutDeadlines()
        self._environment = build_environment_checkpoint(self.parts, environments, deadlines, incarnation=incarnation)
        finalizer = Finalizer(self.parts, assemble)
        self._peeker = CallPeeker(self.parts, generator)
        runner = GroupRunner(self.parts, generator, finalizer, self._environment, deadlines, self._peeker)
        self._rollout_pump = RolloutPump(self.parts, runner)
        self.watchdog = Watchdog(self.parts, running_groups=lambda: runner.running, clock=clock)
        stale_groups = StaleGroups(self.parts, generator, stop=runner.stop)
        self._train_pump = TrainPump(self.parts, trainer, self._weight_sync, stale_groups)
        fingerprint = identity(config).fingerprint
        self._publisher = BundlePublisher(self.parts, bundles, identity=fingerprint)
        self._checkpoints = TrainerCheckpoints(self.parts, trainer, self._publisher)
        self._snapshotter = RolloutSnapshotter(
            self.parts, self._publisher, self._checkpoints, self._environment, self._peeker
        )
        self._schedule = CheckpointSchedule(config)
        self._durable_after: dict[int, int] = {}
        self._restorer = RolloutRestorer(self.parts, trainer, self._weight_sync, bundles, self._environment)
        self._train_lock = asyncio.Lock()
        self._restore_lock = asyncio.Lock()
        self._started: tuple[RestorePlan, Mapping[str, Any]] | None = None
        self._rollouts: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._peeking: asyncio.Task[None] | None = None
        self._early_snapshot: asyncio.Task[None] | None = None
        self._state = ControllerState.EMPTY

    @property
    def state(self) -> ControllerState:
        """Where the controller is in its life."""
        if self.parts.state.failure is not None and self._state is not ControllerState.ENDED:
            return ControllerState.FAILED
        if self._state is ControllerState.RUNNING and self.parts.state.parked:
            return ControllerState.PARKED
        return self._state

    async def restore_link(self, link: str, plan: RestorePlan) -> Mapping[str, Any]:
        """Run one link of the restore chain; the last one, `redispatch`, starts the pumps.

        Links run one after the other. A `redispatch` whose reply was lost gives the same reply again.
        """
        async with self._restore_lock:
            if link == "redispatch" and self._started is not None and self._started[0] == plan:
                return self._started[1]
            self._require_unrestored(f"restore link '{link}'")
            self._state = ControllerState.RESTORING
            reached(f"restore:{link.replace('_', '-')}", self.parts.config.name)
            if link != "redispatch":
                return await self._restorer.run_link(link, plan)
            follows_silent_life = await asyncio.to_thread(self._bundles.follows_silent_life, plan.target)
            self._started = (plan, await self._start(plan))
            if follows_silent_life:
                self._early_snapshot = asyncio.create_task(self._record_dispatch(), name="early snapshot")
            return self._started[1]

    async def restore(self, plan: RestorePlan) -> None:
        """The whole chain and the start: all of it, or an empty controller as before."""
        self._require_unrestored("a restore")
        try:
            for link in (*LINKS, "redispatch"):
                await self.restore_link(link, plan)
        except BaseException:
            await self._restorer.reset()
            self._state = ControllerState.EMPTY
            raise

    async def train_steps(self, first: int, last: int) -> list[Mapping[str, Any]]:
        """Steps `first` to `last`: committed ones give their reports again, a running one is joined, others are driven.

        Fewer reports than steps mean that the data has ended; the last one then carries `end_of_data`.
        """
        self._require_running("train_steps")
        reports: list[Mapping[str, Any]] = []
        for step in range(first, last + 1):
            async with self._train_lock:
                self._require_running("train_steps")  # it may have been closed while this call waited for its turn
                with self.watchdog.over_step():
                    report = await self._drive_step(step)
            if report is None:
                return [*reports, {"step": step - 1, "end_of_data": True}]
            reports.append(report)
        return reports

    async def _drive_step(self, step: int) -> Mapping[str, Any] | None:
        """One step and the trainer checkpoint that is due after it. A broken invariant ends the run."""
        self._schedule.begin_step()
        try:
            report = await self._train_pump.train_step(step)
            await self._checkpoint_if_due(end_of_data=report is None)
        except (BrokenInvariant, ConfigurationError) as error:
            self.parts.state.fail(error)
            raise
        durable_step = self._durable_after.setdefault(step, self._publisher.durable.step)
        return None if report is None else {**report, "durable_step": durable_step}

    async def checkpoint(self) -> Mapping[str, Any]:
        """Save the trainer on request, at the next step boundary; durable when this returns."""
        self._require_running("checkpoint")
        async with self._train_lock:  # free between two steps only
            self._require_running("checkpoint")
            step, newest = self.parts.state.train_steps, self._publisher.durable
            if step == newest.step:
                return {"outcome": "skipped", "reason": "durable_already", "step": step, "sequence": newest.sequence}
            metrics = step_metrics(self._train_pump.report(step))
            saved = await self._checkpoints.save(step, Trigger.REQUEST, metrics=metrics)
            return {"outcome": "completed", "reason": "", "step": step, "sequence": saved.sequence}

    async def settle_saves(self) -> None:
        """Wait until a checkpoint that is written in the background is durable. Raises why it can't be."""
        await self._checkpoints.settle()

    async def attempt_snapshot(self, number: int, *, force: bool = False) -> SnapshotOutcome:
        """One numbered snapshot attempt; the same number gives the same outcome again."""
        self._require_running("attempt_snapshot")
        return await self._snapshotter.attempt(number, force=force)

    async def publish_last(self, number: int) -> SnapshotOutcome:
        """Launch nothing new and publish what is in flight: before the runtime ends, or while nobody drives it.

        Where a committing step is in the way, the snapshot follows it; no other step starts before.
        """
        self.park()
        await self._checkpoints.forget_failed()
        outcome = await self.attempt_snapshot(number, force=True)
        if outcome.reason in PASSING_REASONS:
            async with self._train_lock:
                outcome = await self.attempt_snapshot(number + 1, force=True)
        return outcome

    async def _record_dispatch(self) -> None:
        """Save at once what runs now: a prompt that crashes the run before the next snapshot must be counted too.

        Nothing runs before the steps that the restored bundle has recorded are trained again.
        """
        await self.parts.state.changed.wait_for(lambda: self.parts.state.has_caught_up)
        for _ in range(_TURNS_TO_DISPATCH):
            await asyncio.sleep(0)
        with suppress(MidflightError):
            await self._snapshotter.attempt(_EARLY_SNAPSHOT, force=True)

    def park(self) -> None:
        """Launch nothing new; running groups end and are kept."""
        self.parts.state.parked = True

    def unpark(self) -> None:
        """Go on after `park`."""
        self.parts.state.parked = False
        self.parts.state.changed.notify()

    async def close(self, reason: str) -> None:
        """End the rollout pump. What was not snapshotted is generated again by the next incarnation."""
        self._state = ControllerState.ENDED
        self._checkpoints.abandon()
        if self._train_lock.locked():
            self.parts.state.fail(StaleIncarnation(f"the controller was closed ({reason}) while it trained a step"))
        for loop in (self._peeking, self._watching, self._rollouts):
            if loop is not None:
                loop.cancel()
                await asyncio.wait([loop])
        self.parts.trace.record("run_ended", reason=reason)

    def describe(self) -> dict[str, Any]:
        """Counts for people and for drivers."""
        siblings = [s for group in self.parts.ledger.groups() for s in group.siblings]
        failure = self.parts.state.failure
        return {
            "run": self.parts.config.name,
            "state": self.state.value,
            "train_steps": self.parts.state.train_steps,
            "trainer_version": self.parts.state.trainer_version,
            "max_steps": self.parts.config.algorithm.max_steps,
            "steps_to_replay": self.parts.state.rollout_step - self.parts.state.train_steps,
            "ledger_groups": len(self.parts.ledger),
            "sealed_siblings": sum(s.sealed is not None for s in siblings),
            "buffered_groups": len(self.parts.buffer),
            "running_groups": self._rollout_pump.running,
            "failure": None if failure is None else f"{type(failure).__name__}: {failure}",
        }

    async def _start(self, plan: RestorePlan) -> Mapping[str, Any]:
        self._restorer.require_complete(plan)
        bundle, anchor = await self._restorer.bundle(plan), await self._anchor_of(plan)
        await self._environment.open_restored()
        # Nothing is awaited from here on: the controller starts whole or, closed meanwhile, not at all.
        self._require_unrestored("redispatch")
        self._publisher.adopt_anchor(anchor)
        if bundle is not None:
            self._bundles.adopt(bundle)
            self._restorer.record_restored(plan, bundle)
        self._restorer.release()
        unfinished = len(self.parts.ledger)
        self._rollouts = asyncio.create_task(self._run_rollouts(), name="rollout pump")
        self._watching = asyncio.create_task(self.watchdog.run(), name="stall watchdog")
        self._peeking = asyncio.create_task(self._run_peeker(), name="look at running calls")
        self._state = ControllerState.RUNNING
        return {"redispatched_groups": unfinished, "queued": unfinished > 0}

    async def _anchor_of(self, plan: RestorePlan) -> Anchor | None:
        """The restored checkpoint as an anchor, under the identity it was saved with."""
        if plan.anchor is None:
            return None
        manifest = await asyncio.to_thread(self._bundles.manifest, plan.anchor)
        return Anchor(kind="checkpoint", step=manifest.step, sequence=plan.anchor, identity=manifest.identity)

    async def _run_rollouts(self) -> None:
        try:
            await self._rollout_pump.run()
        except BaseExceptionGroup as group:
            self.parts.state.fail(_first_cause(group))
        except Exception as error:
            self.parts.state.fail(error)
            raise

    async def _run_peeker(self) -> None:
        try:
            await self._peeker.run()
        except Exception as error:
            self.parts.state.fail(error)
            raise

    async def _checkpoint_if_due(self, *, end_of_data: bool) -> None:
        """At a step boundary. A retry saves what is still due; only periodic checkpoints go to the background."""
        step, saves, saving = self.parts.state.train_steps, self._checkpoints, self.parts.config.checkpointing
        metrics = step_metrics(self._train_pump.report(step))
        if metrics:
            require_metric(saving.metric_name, metrics)
        trigger = self._schedule.due(step, saved_step=saves.saved_step, end_of_data=end_of_data)
        if trigger is None:
            await (saves.settle() if end_of_data else saves.publish_written())
            return
        in_background = trigger is Trigger.PERIOD and saving.async_save
        await saves.save(step, trigger, metrics=metrics, in_background=in_background)
        self._schedule.served(trigger)

    def _require_unrestored(self, asked: str) -> None:
        if self._state not in (ControllerState.EMPTY, ControllerState.RESTORING):
            raise BrokenInvariant(
                f"{asked} was asked of a controller that is {self.state.value}; a restore needs an empty one"
            )

    def _require_running(self, verb: str) -> None:
        if self.parts.state.failure is not None:
            raise self.parts.state.failure
        if self._state is not ControllerState.RUNNING:
            raise BrokenInvariant(f"{verb} was asked of a controller that is {self.state.value}; restore it first")


def _first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error inside nested exception groups that is not a cancellation."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            return _first_cause(error)
        if not isinstance(error, asyncio.CancelledError):
            return error
    return group
