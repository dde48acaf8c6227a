"""Generators that die: their groups fail at once, they are started again with the current weights, or given up."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import pytest

from gpu_workers.controller.ports import GroupOrder, KnownCall, Peek, SiblingOrder, SiblingResult, WeightsRef
from gpu_workers.generation.supervision import SupervisedGenerators
from storage.errors import ConfigurationError, GeneratorLost, InfrastructureFailure, WorkerDied
from storage.records import Prompt, PromptRef
from storage.run_config import RunConfig


class Mortal:
    """A generator that runs groups while it lives, as long as the test holds them."""

    def __init__(self, index: int, life: int) -> None:
        self.facts = {"index": index, "pid": 100 * index + life}
        self.alive = True
        self.loaded: list[int] = []
        self.groups: list[str] = []
        self.aborted: list[str] = []
        self.unfit: list[Exception] = []
        self.loading: asyncio.Event | None = None
        self._end = asyncio.Event()

    def die(self) -> None:
        self.alive = False
        self._end.set()

    def finish(self) -> None:
        self._end.set()

    def _require_life(self) -> None:
        if not self.alive:
            raise InfrastructureFailure("its engine died")

    async def generate(self, order: GroupOrder) -> AsyncGenerator[SiblingResult, None]:
        self._require_life()
        self.groups.append(order.group_id)
        yield SiblingResult(0, 0)
        await self._end.wait()
        self._require_life()
        yield SiblingResult(1, 0)

    async def peek(self, wanted: Mapping[str, KnownCall] | None) -> Peek:
        return Peek()

    async def load_weights(self, weights: WeightsRef) -> Mapping[str, float]:
        if self.loading is not None:
            await self.loading.wait()
        self._require_life()
        if self.unfit:
            raise self.unfit.pop(0)
        self.loaded.append(weights.version)
        return {"load_s": float(self.facts["pid"])}

    async def abort(self, group_id: str) -> None:
        self._require_life()
        self.aborted.append(group_id)

    async def is_alive(self) -> bool:
        await asyncio.sleep(0)
        return self.alive


class Host:
    """Starts `Mortal`s; the next starts fail as the test says, and wait while `gate` is set to an event."""

    def __init__(self, count: int) -> None:
        self.lives = [[Mortal(index, 0)] for index in range(count)]
        self.errors: list[Exception] = []
        self.gate: asyncio.Event | None = None
        self.prepare: Callable[[Mortal], None] = lambda mortal: None
        self.starts = 0

    def now(self, index: int = 0) -> Mortal:
        return self.lives[index][-1]

    async def start(self, index: int) -> Mortal:
        self.starts += 1
        await asyncio.sleep(0)
        if self.gate is not None:
            await self.gate.wait()
        if self.errors:
            raise self.errors.pop(0)
        mortal = Mortal(index, len(self.lives[index]))
        self.prepare(mortal)
        self.lives[index].append(mortal)
        return mortal


class Facts:
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def record(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, **fields})

    def of(self, event: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == event]


class Scene:
    """A host with its generators under supervision."""

    def __init__(self, count: int = 1, *, max_restarts: int = 3) -> None:
        config = RunConfig(
            name="run",
            async_rl={"retry_backoff_s": 0.001, "retry_backoff_max_s": 0.004},
            generation={"max_generator_restarts": max_restarts},
        )
        self.host, self.facts = Host(count), Facts()
        first = [self.host.now(index) for index in range(count)]
        self.generators = SupervisedGenerators(config, self.host, first, trace=self.facts)

    def run(self, group_id: str) -> "asyncio.Task[list[SiblingResult]]":
        async def collect() -> list[SiblingResult]:
            return [result async for result in self.generators.generate(order(group_id))]

        return asyncio.create_task(collect())

    async def started(self, *groups: str, index: int = 0) -> None:
        await until(lambda: set(groups) <= set(self.host.now(index).groups))


def order(group_id: str) -> GroupOrder:
    return GroupOrder(group_id, Prompt(PromptRef(0, 0, ""), (4,), "{}"), (SiblingOrder(0, 0), SiblingOrder(1, 0)))


async def until(predicate: Callable[[], bool]) -> None:
    for _ in range(20_000):
        if predicate():
            return
        await asyncio.sleep(0)
    raise AssertionError("the awaited condition never came true")


async def test_scenario_o_all_groups_of_a_dead_generator_fail_at_once_and_it_is_started_again_once():
    scene = Scene()
    groups = [scene.run(name) for name in "abc"]
    await scene.started("a", "b", "c")
    scene.host.now().die()
    failures = await asyncio.gather(*groups, return_exceptions=True)
    assert [type(failure) for failure in failures] == [WorkerDied] * 3
    assert "generator 0 died while it ran a: its engine died" in str(failures[0])
    again = scene.run("a")
    await until(lambda: scene.host.now().groups == ["a"])
    scene.host.now().finish()
    assert len(await again) == 2
    assert scene.host.starts == 1
    (restarted,) = scene.facts.of("generator_restarted")
    assert (restarted["index"], restarted["restarts_in_a_row"], restarted["pids"]["pid"]) == (0, 1, 1)
    assert [e["groups"] for e in scene.facts.of("generator_died")] == [3]
    assert [facts["pid"] for facts in scene.generators.facts] == [1]


async def test_a_failure_of_a_living_generator_is_passed_on_and_starts_nothing():
    scene = Scene()
    group = scene.run("a")
    await scene.started("a")
    living = scene.host.now()
    living.die()
    living.alive = True  # only the call failed

    async def broken(_order: GroupOrder) -> AsyncGenerator[SiblingResult, None]:
        raise InfrastructureFailure("can't unpack the order")
        yield

    assert len(await group) == 2
    living.generate = broken  # type: ignore[method-assign]
    with pytest.raises(InfrastructureFailure, match="can't unpack") as caught:
        await scene.run("b")
    assert type(caught.value) is InfrastructureFailure
    assert scene.host.starts == 0


async def test_groups_go_to_the_living_generators_while_another_is_down():
    scene = Scene(2)
    scene.host.gate = asyncio.Event()
    group = scene.run("a")
    await scene.started("a", index=0)
    scene.host.now(0).die()
    with pytest.raises(WorkerDied):
        await group
    others = [scene.run(name) for name in "bcd"]
    await scene.started("b", "c", "d", index=1)
    scene.host.gate.set()
    await until(lambda: len(scene.host.lives[0]) == 2)
    await until(lambda: bool(scene.facts.of("generator_restarted")))
    fifth = scene.run("e")
    await scene.started("e", index=0)
    scene.host.now(0).finish()
    scene.host.now(1).finish()
    assert [len(results) for results in await asyncio.gather(*others, fifth)] == [2] * 4


async def test_a_generator_takes_no_work_before_it_holds_the_current_weights():
    scene = Scene()
    await scene.generators.load_weights(WeightsRef(4, "four"))
    gate = asyncio.Event()
    scene.host.prepare = lambda mortal: setattr(mortal, "loading", gate)
    scene.host.now().die()
    with pytest.raises(WorkerDied):
        await scene.run("a")
    waiting = scene.run("a")
    await until(lambda: len(scene.host.lives[0]) == 2)
    for _ in range(20):
        await asyncio.sleep(0)
    assert scene.host.now().groups == []
    gate.set()
    await scene.started("a")
    assert scene.host.now().loaded == [4]
    assert scene.facts.of("generator_restarted")[0]["version"] == 4
    scene.host.now().finish()
    await waiting


async def test_a_refit_during_a_restart_is_made_up_for_before_the_generator_takes_work():
    scene = Scene(2)
    await scene.generators.load_weights(WeightsRef(4, "four"))
    gate = asyncio.Event()
    scene.host.prepare = lambda mortal: setattr(mortal, "loading", gate)
    scene.host.now(0).die()
    with pytest.raises(WorkerDied):
        await scene.run("a")
    await until(lambda: len(scene.host.lives[0]) == 2)
    timings = await scene.generators.load_weights(WeightsRef(5, "five"))  # does not wait for the one that is down
    assert timings == {"load_s": 100.0}
    scene.host.now(0).unfit = [InfrastructureFailure("version 4 is gone")]
    gate.set()
    await until(lambda: bool(scene.facts.of("generator_restarted")))
    assert (scene.host.now(0).loaded, scene.host.now(1).loaded) == ([5], [4, 5])
    assert [e["version"] for e in scene.facts.of("generator_restarted")] == [5]


async def test_a_refit_that_finds_a_dead_generator_waits_for_it_to_live_again():
    scene = Scene()
    scene.host.now().die()
    assert await scene.generators.load_weights(WeightsRef(1, "one")) == {"load_s": 1.0}
    assert scene.host.now().loaded[0] == 1
    assert scene.host.starts == 1


async def test_a_refit_that_a_living_generator_cannot_do_fails_as_before():
    scene = Scene()
    scene.host.now().unfit = [InfrastructureFailure("does not fit the engine's model")]
    with pytest.raises(InfrastructureFailure, match="does not fit"):
        await scene.generators.load_weights(WeightsRef(1, "one"))
    assert scene.host.starts == 0


async def test_an_abort_reaches_every_living_generator():
    scene = Scene(2)
    await scene.generators.abort("a")
    assert [scene.host.now(index).aborted for index in (0, 1)] == [["a"], ["a"]]


async def test_starts_that_fail_are_tried_again_with_pauses_up_to_a_limit_and_the_error_says_so():
    scene = Scene(max_restarts=3)
    scene.host.errors = [InfrastructureFailure("no memory")] * 5
    scene.host.now().die()
    with pytest.raises(WorkerDied):
        await scene.run("a")
    with pytest.raises(GeneratorLost, match=r"generator 0 was started again 3 times in a row .*no memory; see its log"):
        await scene.run("a")
    with pytest.raises(GeneratorLost):
        await scene.generators.load_weights(WeightsRef(1, "one"))
    assert scene.host.starts == 3
    assert len(scene.facts.of("generator_lost")) == 1


async def test_a_generator_that_its_configuration_does_not_let_start_is_not_tried_again():
    scene = Scene()
    scene.host.errors = [ConfigurationError("generation.top_p is 0.5")]
    scene.host.now().die()
    with pytest.raises(WorkerDied):
        await scene.run("a")
    with pytest.raises(GeneratorLost, match=r"generation\.top_p is 0\.5"):
        await scene.run("a")
    assert scene.host.starts == 1


async def test_a_finished_group_resets_the_count_of_restarts_and_deaths_without_one_add_up():
    scene = Scene(max_restarts=2)
    for _ in range(5):
        group = scene.run("a")
        await until(lambda: scene.host.now().alive and scene.host.now().groups == ["a"])
        scene.host.now().finish()
        await group
        scene.host.now().die()
        with pytest.raises(WorkerDied):
            await scene.run("b")
        await until(lambda: scene.host.now().alive)
    scene.host.prepare = lambda mortal: mortal.die()
    scene.host.now().die()
    failures = [await asyncio.gather(scene.run("b"), return_exceptions=True) for _ in range(4)]
    assert [type(failure) for (failure,) in failures] == [WorkerDied, WorkerDied, GeneratorLost, GeneratorLost]


async def test_while_one_generator_is_lost_the_run_goes_on_with_the_others():
    scene = Scene(2, max_restarts=0)
    group = scene.run("a")
    await scene.started("a")
    scene.host.now(0).die()
    with pytest.raises(WorkerDied):
        await group
    other = scene.run("a")
    await scene.started("a", index=1)
    scene.host.now(1).finish()
    assert len(await other) == 2
    assert await scene.generators.load_weights(WeightsRef(1, "one")) == {"load_s": 100.0}


async def test_after_it_was_closed_nothing_is_started_any_more():
    scene = Scene(2)
    scene.host.gate = asyncio.Event()
    scene.host.now(0).die()
    with pytest.raises(WorkerDied):
        await scene.run("a")
    await until(lambda: scene.host.starts == 1)
    await scene.generators.close()
    scene.host.gate.set()
    scene.host.now(1).die()
    with pytest.raises(InfrastructureFailure):
        await scene.run("b")
    for _ in range(20):
        await asyncio.sleep(0)
    assert (scene.host.starts, [len(lives) for lives in scene.host.lives]) == (1, [1, 1])
