"""Prompts that bring down whatever runs them, and generators that die: the guilty are given up, nobody else is lost."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from random import Random

import pytest

from gpu_workers.controller.ports import Failure, GroupOrder, SiblingResult, WeightsRef
from gpu_workers.generation.supervision import SupervisedGenerators
from storage.errors import GeneratorLost, InfrastructureFailure, MidflightError

DATA = Failure(infrastructure=False, message="the answer can't be scored")


class MortalGenerator:
    """The world's generator in a process that can die. `kills(group_id)`: whether running this group kills it."""

    def __init__(self, inner, index, life, kills):
        self.facts = {"index": index, "pid": 1000 + life}
        self._inner = inner
        self._kills = kills
        self._dead = asyncio.Event()

    def die(self):
        self._dead.set()

    async def is_alive(self) -> bool:
        return not self._dead.is_set()

    async def load_weights(self, weights: WeightsRef) -> Mapping[str, float]:
        self._require_life()
        return await self._inner.load_weights(weights)

    async def abort(self, group_id: str) -> None:
        await self._inner.abort(group_id)

    async def generate(self, order: GroupOrder) -> AsyncGenerator[SiblingResult, None]:
        self._require_life()
        results = self._inner.generate(order)
        dead = asyncio.ensure_future(self._dead.wait())
        try:
            while True:
                result = asyncio.ensure_future(anext(results))
                await asyncio.wait([result, dead], return_when=asyncio.FIRST_COMPLETED)
                if self._kills(order.group_id):
                    self.die()
                if not result.done() or self._dead.is_set():
                    result.cancel()
                    await asyncio.wait([result])
                    self._require_life()
                try:
                    yield result.result()
                except StopAsyncIteration:
                    return
        finally:
            dead.cancel()
            await results.aclose()

    def _require_life(self):
        if self._dead.is_set():
            raise InfrastructureFailure("its engine died")


class MortalHost:
    """Starts the world's generator again; `lives` are all it ever had."""

    def __init__(self, inner, kills):
        self._inner = inner
        self._kills = kills
        self.lives = []
        self.errors = []

    async def start(self, index):
        await asyncio.sleep(0)
        if self.errors:
            raise self.errors.pop(0)
        self.lives.append(MortalGenerator(self._inner, index, len(self.lives), self._kills))
        return self.lives[-1]


def _supervise(world, *, kills=lambda group_id: False):
    """From the next life on the world's generator is supervised; returns the hosts, one for each life."""
    hosts = []

    def build(inner):
        host = MortalHost(inner, kills)
        host.lives.append(MortalGenerator(inner, 0, 0, kills))
        hosts.append(host)
        return SupervisedGenerators(world.config, host, [host.lives[0]], trace=world.trace)

    world.supervised = build
    return hosts


def _attempts(world, group_id):
    dispatched = [e for _, trace in world.lives for e in trace.of("attempt_dispatched")]
    return [e["attempt"] for e in dispatched if e["rollout_id"] == f"{group_id}_g0"]


async def test_m_a_prompt_that_hangs_in_every_life_of_a_run_is_given_up_after_its_budget_of_restarts(make_world):
    world = make_world(async_rl={"max_interrupted_attempts": 3})
    stuck = world.passed_by(12)[9]
    for life in range(4):
        world.boot()
        world.generator.held = lambda group_id, index: group_id == stuck and index == 0
        await world.restore(world.plan())
        await world.settle(lambda: len(world.controller.parts.buffer) == 7)
        await world.settle(lambda life=life: _attempts(world, stuck)[-1:] == [life])
        await world.snapshot(1, force=True)
        await world.kill()
    controller = await world.start()
    await world.settle(lambda: len(controller.parts.state.dropped) == 1)
    (dropped,) = controller.parts.state.dropped
    assert dropped.prompt.group_id == stuck
    assert "4 restarts interrupted generation 0 while it ran" in dropped.reason
    assert "max_interrupted_attempts is 3" in dropped.reason
    assert _attempts(world, stuck) == [0, 1, 2, 3]
    reports = await world.train(1, 3)
    assert [len(report["group_ids"]) for report in reports] == [4, 4, 4]
    assert world.audit().problems == []
    await world.kill()


async def test_m_a_prompt_that_crashes_the_run_before_any_snapshot_is_given_up_too(make_world):
    """A life that published nothing is followed by one that saves at once what it dispatched."""
    world = make_world(async_rl={"max_interrupted_attempts": 2})
    crasher = world.passed_by(1)[0]
    for life in range(7):
        world.boot()
        world.generator.held = lambda group_id, index: True
        await world.restore(world.plan())
        await world.settle(lambda: bool(world.generator.orders) or bool(world.controller.parts.state.dropped))
        if world.controller.parts.state.dropped:
            break
        if life % 2:
            await world.settle(lambda: bool(world.trace.of("snapshot_attempt")))
        await world.kill()
    assert _attempts(world, crasher) == [0, 0, 1, 1, 2, 2]
    assert [d.prompt.group_id for d in world.controller.parts.state.dropped] == [crasher]
    await world.kill()


@pytest.mark.parametrize("guilty", [0, 1])
async def test_m_of_the_prompts_that_run_at_every_crash_only_the_guilty_one_is_given_up(make_world, guilty):
    """Two prompts are running whenever the run crashes. On their last chance they take turns."""
    world = make_world(async_rl={"max_interrupted_attempts": 2})
    pair = world.passed_by(2)
    for _ in range(2):
        world.boot()
        world.generator.held = lambda group_id, index: group_id in pair
        await world.restore(world.plan())
        await world.settle(lambda: len(world.controller.parts.buffer) == 6)
        await world.settle(lambda: set(pair) <= {order.group_id for order in world.generator.orders})
        await world.snapshot(1, force=True)
        await world.kill()
    world.boot()
    world.generator.held = lambda group_id, index: group_id == pair[guilty]
    controller = await world.restore(world.plan())
    finished = 6 + guilty  # an innocent prompt whose turn comes first is finished, one that comes later is not started
    await world.settle(lambda: len(controller.parts.buffer) == finished and _attempts(world, pair[guilty])[-1:] == [2])
    assert _attempts(world, pair[1 - guilty]) == ([0, 1, 2] if guilty == 1 else [0, 1])
    await world.snapshot(1, force=True)
    await world.kill()
    controller = await world.start()
    reports = await world.train(1, 1)
    assert [d.prompt.group_id for d in controller.parts.state.dropped] == [pair[guilty]]
    assert pair[1 - guilty] in reports[0]["group_ids"]
    await world.kill()


async def test_m_interruptions_of_a_run_that_gets_further_cost_no_prompt(make_world):
    """Stopped a dozen times, with other prompts running each time: nobody comes near the budget."""
    world = make_world(async_rl={"max_interrupted_attempts": 2, "spare_prompts": 0}, algorithm={"max_steps": 20})
    order = world.passed_by(40)
    for step in range(1, 10):
        world.boot()
        unlucky = set(order[4 * step - 1 : 4 * step + 2])
        world.generator.held = lambda group_id, index, unlucky=unlucky: group_id in unlucky
        await world.restore(world.plan())
        await world.settle(lambda: bool(world.generator.orders))
        await world.snapshot(1, force=True)
        await world.kill()
        await world.start()
        await world.train(step, step)
        await world.kill()
    controller = await world.start()
    await controller.train_steps(10, 20)
    assert controller.parts.state.dropped == []
    assert [g for step in sorted(world.history()) for g in world.history()[step]] == order
    await world.kill()


async def test_scenario_o_a_dead_engine_is_an_infrastructure_failure_and_the_run_goes_on_by_itself(make_world):
    world = make_world()
    hosts = _supervise(world)
    world.boot()
    first = world.passed_by(3)
    world.generator.held = lambda group_id, index: group_id in first and index == 1
    controller = await world.restore(world.plan())
    await world.settle(lambda: len(controller.parts.buffer) == 5 and controller.describe()["sealed_siblings"] == 3)
    hosts[0].lives[-1].die()
    await world.settle(lambda: len(world.trace.of("attempt_abandoned")) == 3)
    world.check()
    world.generator.release()
    reports = await world.train(1, 3)
    assert reports[0]["group_ids"] == world.passed_by(4)
    abandoned = world.trace.of("attempt_abandoned")
    assert {(e["reason"], e["rollout_id"]) for e in abandoned} == {("infrastructure", f"{g}_g1") for g in first}
    assert all("generator 0 died while it ran" in e["message"] for e in abandoned)
    assert [e["version"] for e in world.trace.of("generator_restarted")] == [0]
    assert [world.generator.generated.count(f"{group_id}_g0") for group_id in first] == [1, 1, 1]
    assert (world.audit().problems, controller.parts.state.dropped) == ([], [])
    await world.kill()


async def test_scenario_o_a_refit_that_meets_a_dead_engine_does_not_fail_the_run(make_world):
    world = make_world()
    hosts = _supervise(world)
    controller = await world.start()
    await world.settle(lambda: len(controller.parts.buffer) == 8)
    hosts[0].lives[-1].die()
    reports = await world.train(1, 3)
    assert [report["step"] for report in reports] == [1, 2, 3]
    assert [e["version"] for e in world.trace.of("generator_restarted")] == [1]
    assert world.trace.of("attempt_abandoned") == []
    await world.kill()


async def test_scenario_o_an_engine_that_dies_again_and_again_ends_the_run_with_a_clear_error(make_world):
    world = make_world(generation={"max_generator_restarts": 2})
    hosts = _supervise(world)
    world.boot()
    world.generator.held = lambda group_id, index: True
    controller = await world.restore(world.plan())
    await world.settle(lambda: len(world.generator.orders) == 8)
    hosts[0].errors = [InfrastructureFailure("no memory")] * 2
    hosts[0].lives[-1].die()
    with pytest.raises(GeneratorLost, match="started again 2 times in a row .*no memory"):
        await controller.train_steps(1, 1)
    assert controller.state == "failed"
    world.check()
    await world.kill()


async def test_a_prompt_that_kills_its_engine_each_time_is_given_up_and_those_that_ran_with_it_are_not(make_world):
    world = make_world(async_rl={"max_infrastructure_failures": 2}, generation={"max_generator_restarts": 9})
    poison = world.passed_by(3)[2]
    _supervise(world, kills=lambda group_id: group_id == poison)
    controller = await world.start()
    reports = await world.train(1, 3)
    assert [d.prompt.group_id for d in controller.parts.state.dropped] == [poison]
    assert [len(report["group_ids"]) for report in reports] == [4, 4, 4]
    assert len(world.trace.of("generator_died")) == 3
    assert _attempts(world, poison) == [0, 1, 2]
    await world.kill()


async def _random_life(world, hosts, random):
    """Train, snapshot, let the generator die and idle in a random order, several things at once, until the kill."""
    controller, works = world.controller, []
    for number in range(random.randrange(5, 25)):
        action = random.choice(("train", "snapshot", "die", "die", "idle"))
        if action == "train":
            step = controller.parts.state.train_steps + 1
            works.append(asyncio.create_task(controller.train_steps(step, step)))
        elif action == "snapshot":
            works.append(asyncio.create_task(controller.attempt_snapshot(number, force=True)))
        elif action == "die":
            hosts[-1].lives[-1].die()
        for _ in range(random.randrange(60)):
            await asyncio.sleep(0)
        if controller.state == "running":
            world.check()
    await world.kill()
    for result in await asyncio.gather(*works, return_exceptions=True):
        assert not isinstance(result, BaseException) or isinstance(result, MidflightError), result


@pytest.mark.parametrize("seed", range(12))
async def test_with_generators_and_controllers_that_die_at_random_every_prompt_is_trained_once_or_given_up(
    make_world, seed
):
    random = Random(seed)
    limits = {"max_data_failures": 0, "max_infrastructure_failures": 99, "max_skipped_prompts": 99}
    world = make_world(
        algorithm={"num_prompts_per_step": 2, "max_steps": 99},
        data={"num_prompts": 17},
        async_rl={**limits, "max_lookahead_versions": 2, "spare_prompts": 2, "retry_backoff_max_s": 0.001},
        generation={"max_generator_restarts": 99},
    )
    hosts, order = _supervise(world), world.passed_by(17)
    for _ in range(3):
        world.boot()
        world.generator.failures = {f"{group_id}_g1": [DATA] for group_id in order if random.random() < 0.2}
        await world.restore(world.plan())
        await _random_life(world, hosts, random)
    controller = await world.start()
    assert (await controller.train_steps(controller.parts.state.train_steps + 1, 99))[-1]["end_of_data"] is True
    world.check()
    audit = world.audit()
    assert (audit.problems, audit.frontier) == ([], 17)
    assert audit.owners["trained"] + audit.owners["dropped"] + audit.owners["spare_prompts"] == 17
    await world.kill()
