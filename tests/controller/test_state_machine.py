"""A run under arbitrary failures, delays, snapshots and kills, one event-loop turn at a time: I1 to I14 hold.

Hypothesis chooses what happens; time and disk stand still unless it says otherwise, so that an example is a function
of its choices. A failing one prints them, shrunk, and a `@reproduce_failure` line. `--hypothesis-profile=fuzz` looks
for new ones.
"""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gpu_workers.controller.finalizer import digest_of_rows
from gpu_workers.controller.ports import Failure
from storage.errors import InfrastructureFailure, MidflightError, StoreUnavailable
from storage.records import RecoveryLevel, rollout_id

SIZE = 2  # siblings of a group, groups of a step
DATA = Failure(infrastructure=False, message="the answer can't be scored")
INFRASTRUCTURE = Failure(infrastructure=True, message="503 from the engine")
TURNS_TO_THE_END = 200_000
LIFE = 6  # rules between two kills, at least

SLOTS = [(1,), (0,), (0, 1), ()]
SAMPLERS = [
    {"sampler": "in_order", "max_lookahead_versions": 0},
    {"sampler": "in_order", "max_lookahead_versions": 2},
    {"sampler": "weight_fifo", "max_staleness_versions": 1},
    {"sampler": "ready_first", "max_staleness_versions": 1},
    {"sampler": "windowed", "max_staleness_versions": 2},
]


class Disk(ThreadPoolExecutor):
    """Work for threads waits until the test lets it happen, in the order of its submission."""

    def __init__(self) -> None:
        super().__init__(max_workers=1)
        self._waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._waiting.append((future, lambda: fn(*args, **kwargs)))
        return future

    def work(self) -> bool:
        """Do the oldest piece of work; whether there was one."""
        if not self._waiting:
            return False
        future, job = self._waiting.pop(0)
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(job())
            except BaseException as error:  # noqa: BLE001 -- an executor hands over whatever it was
                future.set_exception(error)
        return True


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock is set by hand."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self.disk = Disk()
        self.set_default_executor(self.disk)

    def time(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now += seconds


class RunMachine(RuleBasedStateMachine):
    """One run over any number of lives."""

    def __init__(self, make_world: Callable[..., Any]) -> None:
        super().__init__()
        self._make_world = make_world
        self.loop = SimulatedLoop()
        asyncio.set_event_loop(self.loop)
        self.works: list[asyncio.Task[Any]] = []
        self.attempts = 0
        self.held: set[tuple[str, int]] = set()
        self.age = 0

    @initialize(
        sampler=st.sampled_from(SAMPLERS),
        dropped=st.sampled_from(["replace", "shrink"]),
        spares=st.sampled_from([0, 1, 3]),
        period=st.sampled_from([1, 2, 4]),
        rows=st.booleans(),
        level=st.sampled_from(["sibling", "prefix", "prompt_group"]),
        remainder=st.integers(0, 2),
        slots=st.sampled_from(SLOTS),
    )
    def begin(
        self,
        sampler: dict[str, Any],
        dropped: str,
        spares: int,
        period: int,
        rows: bool,
        level: str,
        remainder: int,
        slots: tuple[int, ...],
    ) -> None:
        self.world = self._make_world(
            algorithm={"num_prompts_per_step": SIZE, "num_generations_per_prompt": SIZE, "max_steps": 99},
            data={"num_prompts": 9, "num_epochs": 2},
            async_rl={
                **sampler,
                "on_dropped_prompt": dropped,
                "spare_prompts": spares,
                "max_data_failures": 0,
                "max_infrastructure_failures": 50,
                "max_skipped_prompts": 99,
                "min_step_batch_fraction": 0.5,
                "rollout_timeout_s": 100.0,
                "retry_backoff_s": 1.0,
                "retry_backoff_max_s": 8.0,
            },
            checkpointing={"save_period": period, "save_data_plane": rows},
            rollout_recovery={"target_level": level},
        )
        self.resume()
        self.hold_siblings(remainder, slots)

    # What happens to a run

    @rule(turns=st.sampled_from([40, 200, 5, 1]), disk=st.sampled_from([True, True, False]))
    def go_on(self, turns: int, disk: bool) -> None:
        """Some turns of the event loop, with or without progress on the disk."""
        self.run(self.turn(turns, disk=disk))

    @rule(seconds=st.sampled_from([0.5, 2.0, 101.0]))
    def time_passes(self, seconds: float) -> None:
        """Back-offs end, deadlines pass."""
        self.loop.advance(seconds)
        self.run(self.turn(20, disk=True))

    @precondition(lambda self: self.is_running())
    @rule(steps=st.integers(1, 3), turns=st.sampled_from([300, 50, 0]))
    def train(self, steps: int, turns: int) -> None:
        first = self.world.controller.parts.state.train_steps + 1
        self.begin_work(self.world.controller.train_steps(first, first + steps - 1))
        self.run(self.turn(turns, disk=True))

    @precondition(lambda self: self.is_running())
    @rule(force=st.booleans(), turns=st.sampled_from([100, 5, 1, 0]))
    def attempt_a_snapshot(self, force: bool, turns: int) -> None:
        self.attempts += 1
        self.begin_work(self.world.controller.attempt_snapshot(self.attempts, force=force))
        self.run(self.turn(turns, disk=True))

    @rule(remainder=st.integers(0, 2), slots=st.sampled_from(SLOTS))
    def hold_siblings(self, remainder: int, slots: tuple[int, ...]) -> None:
        """From now on, in this life and the next ones, siblings in these slots of every third prompt don't finish."""
        self.world.generator.release()
        self.held = {(group, slot) for group in self.world.passed_by(18)[remainder::3] for slot in slots}
        self.hold()

    def hold(self) -> None:
        held = self.held
        self.world.generator._released = asyncio.Event()
        self.world.generator.held = lambda group_id, index: (group_id, index) in held
        self.world.generator.had = lambda rollout: self.age // 2

    @rule()
    def release_siblings(self) -> None:
        self.held = set()
        self.world.generator.release()

    @rule(group=st.integers(0, 17), index=st.integers(0, SIZE - 1), kind=st.sampled_from(["data", "attempt", "engine"]))
    def let_a_sibling_fail(self, group: int, index: int, kind: str) -> None:
        failures: dict[str, Any] = {"data": DATA, "attempt": INFRASTRUCTURE, "engine": InfrastructureFailure("dead")}
        self.world.generator.failures[rollout_id(self.world.passed_by(18)[group], index)] = [failures[kind]]

    @rule(
        place=st.sampled_from(["store", "before_microbatch", "before_finish", "before_save"]), passing=st.integers(0, 9)
    )
    def let_store_or_trainer_fail_once(self, place: str, passing: int) -> None:
        errors = [InfrastructureFailure("a rank died")]

        def strike() -> None:
            if errors:
                raise errors.pop()

        if place == "store":
            self.world.store.fail("change", "", StoreUnavailable("the store is down"), passing=passing)
        else:
            setattr(self.world.trainer, place, strike)

    @precondition(lambda self: self.age > LIFE)
    @rule(notice=st.booleans())
    def kill_and_resume(self, notice: bool) -> None:
        """A life ends, at once or after a preemption notice, and another begins."""
        if notice and self.is_running():
            self.attempts += 1
            self.begin_work(self.world.controller.publish_last(-10 * self.attempts))
            self.run(self.turn(100, disk=True))
        self.kill()
        self.resume()

    # What always holds

    @invariant()
    def ownership_capacity_rows_and_stamps(self) -> None:
        """I1 to I5, and the state machine of each group."""
        if hasattr(self, "world") and self.is_running():
            self.world.check()

    @invariant()
    def sealed_work_is_not_run_again(self) -> None:
        """I6."""
        if hasattr(self, "world"):
            assert not self.kept & set(self.world.generator.generated)

    @invariant()
    def what_was_given_up_stays_given_up(self) -> None:
        """I12."""
        if hasattr(self, "world"):
            assert not self.given_up & {order.group_id for order in self.world.generator.orders}

    @invariant()
    def restored_work_precedes_new_prompts(self) -> None:
        """I13. Groups of the restored ledger that still run at all were dispatched before the first new prompt."""
        if not hasattr(self, "world"):
            return
        ordered = [order.group_id for order in self.world.generator.orders]
        new = next((place for place, group in enumerate(ordered) if group in self.beyond), None)
        if new is not None:
            ledger = self.world.controller.parts.ledger
            late = [g for g in self.owed if g in ledger and g not in ordered[:new] and self._needs_generation(g)]
            assert not late

    def _needs_generation(self, group_id: str) -> bool:
        group = self.world.controller.parts.ledger.group(group_id)
        return all(sibling.sealed is None for sibling in group.siblings)

    def teardown(self) -> None:
        """Whatever happened: let go on, the run trains everything exactly once and ends well."""
        try:
            if hasattr(self, "world"):
                self.end_well()
        finally:
            asyncio.set_event_loop(None)
            self.loop.close()

    def end_well(self) -> None:
        self.kill()
        self.held = set()
        self.resume()
        first = self.world.controller.parts.state.train_steps + 1
        last = self.finish(self.world.controller.train_steps(first, 99))[-1]
        assert last["end_of_data"] is True
        self.world.check()
        self.sealed_work_is_not_run_again()
        self.what_was_given_up_stays_given_up()
        self.require_everything_trained_once()
        self.kill()

    def require_everything_trained_once(self) -> None:
        """I1, I8, I14, and what the audit finds in trace and store."""
        state = self.world.controller.parts.state
        trained = [group_id for groups in self.world.history().values() for group_id in groups]
        dropped = [prompt.prompt.group_id for prompt in state.dropped]
        pool = [prompt.group_id for prompt in state.spares]
        assert sorted([*trained, *dropped, *pool]) == sorted(self.world.passed_by(18))
        published: dict[str, set[str]] = {}
        for _, trace in self.world.lives:
            for event in trace.of("group_published"):
                published.setdefault(event["group_id"], set()).add(event["rollout_sha256"])
        steps = [event["group_ids"] for event in self.world.trace.of("train_step")]
        for group_ids, digests in zip(steps, self.world.trainer.trained, strict=True):
            rows = [digests[SIZE * place : SIZE * (place + 1)] for place in range(len(group_ids))]
            assert all(digest_of_rows(row) in published[group] for group, row in zip(group_ids, rows, strict=True))
        audit = self.world.audit()
        assert (audit.problems, audit.pairs_trained) == ([], SIZE * len(trained))

    # How the test drives the run

    def is_running(self) -> bool:
        return str(self.world.controller.state) in ("running", "parked")

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(coroutine)

    @invariant()
    def grows_older(self) -> None:
        self.age += 1

    async def turn(self, turns: int, *, disk: bool) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
            if disk:
                self.loop.disk.work()

    def begin_work(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self.works.append(self.loop.create_task(coroutine))

    def finish(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run to the end, with a disk that works and time that passes when nothing else moves."""

        async def drive() -> Any:
            task = asyncio.ensure_future(coroutine)
            for turn in range(TURNS_TO_THE_END):
                if task.done():
                    return task.result()
                await asyncio.sleep(0)
                if not self.loop.disk.work() and turn % 50 == 0:
                    self.loop.advance(1.0)
            raise AssertionError("the run stands still")

        return self.run(drive())

    def kill(self) -> None:
        """The end of a life, without goodbye, and whatever was asked of it ends with a result or an error."""

        async def end_works() -> list[Any]:
            return await asyncio.gather(*self.works, return_exceptions=True)

        self.finish(self.world.kill())
        self.world.store.troubles.clear()
        results, self.works = self.finish(end_works()), []
        for result in results:
            assert not isinstance(result, BaseException) or isinstance(result, MidflightError), repr(result)

    def resume(self) -> None:
        """Another life from what the store holds; the restore changes nothing there (I9)."""
        self.age = 0
        self.world.boot()
        self.hold()
        plan = self.world.plan()
        before = len(self.world.store.changes())
        bundle = None if plan.target is None else self.world.bundles.read(plan.target)
        self.finish(self.world.restore(plan))
        assert len(self.world.store.changes()) == before
        if bundle is not None:  # I7: what is restored belongs to the model it stands on, plus the recorded batches
            model_step = 0 if plan.anchor is None else self.world.bundles.manifest(plan.anchor).step
            assert bundle.state.model_step == model_step
            steps = {trained.step for trained in bundle.state.trained}
            assert set(range(model_step + 1, bundle.state.progress.train_steps + 1)) <= steps
        state = None if bundle is None else bundle.state
        self.kept = set()
        self.given_up = set() if state is None else {d.prompt.group_id for d in state.dropped}
        self.owed = [] if state is None else [group.group_id for group in state.ledger]
        position = None if state is None else state.progress.source
        passed = [] if position is None else self.world.passed(position)
        self.beyond = set(self.world.passed_by(18)) - set(passed)
        if state is not None:
            self.kept |= {row for group in state.buffer for row in group.row_ids}
            self.kept |= {
                rollout_id(group.group_id, sibling.generation_index)
                for group in state.ledger
                for sibling in group.siblings
                if sibling.sealed is not None and group.level is not RecoveryLevel.PROMPT_GROUP
            }


def test_invariants_hold_whatever_happens_to_a_run_and_it_trains_everything_once(make_world):
    run_state_machine_as_test(
        lambda: RunMachine(make_world),
        settings=settings(
            deadline=None,
            stateful_step_count=40,
            suppress_health_check=list(HealthCheck),
        ),
    )
