"""The stall watchdog: what counts as progress, when none is expected, what it does. Time is simulated."""

import asyncio

import pytest
from pydantic import ValidationError

from storage.errors import RunStalled

QUICK = {"stall_timeout_s": 0.4, "rollout_timeout_s": 0.3}  # looks every 0.02 s; the clock moves when the test says so
SLOW = {"stall_timeout_s": 400.0, "rollout_timeout_s": 300.0}  # the test looks


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def _watched(make_world, *, held=lambda group_id, index: False, on_stall="report", async_rl=None):
    world = make_world(async_rl={"on_stall": on_stall, **(async_rl or QUICK)})
    world.clock = Clock()
    world.boot()
    world.generator.held = held
    await world.restore(world.plan())
    return world


def _stalls(world):
    return world.trace.of("run_stalled")


async def _looks(seconds=0.1):
    """Time for the watchdog to look a few times."""
    await asyncio.sleep(seconds)


async def test_a_step_that_waits_for_groups_that_never_come_is_reported_once_per_timeout_with_what_there_is(make_world):
    world = await _watched(make_world, held=lambda group_id, index: True, async_rl=SLOW)
    step = asyncio.create_task(world.controller.train_steps(1, 1))
    await world.settle(lambda: len(world.generator.orders) == 8)
    await asyncio.sleep(0)  # the step was asked for
    watchdog = world.controller.watchdog
    for seconds, reports in ((399, 0), (1, 1), (1, 1), (398, 1), (2, 2)):
        world.clock.now += seconds
        watchdog.look()
        assert len(_stalls(world)) == reports
    stall = _stalls(world)[0]
    assert {name: stall[name] for name in ("step_asked_for", "running_groups", "buffered_groups", "train_steps")} == {
        "step_asked_for": True,
        "running_groups": 8,
        "buffered_groups": 0,
        "train_steps": 0,
    }
    assert world.controller.state == "running"
    world.generator.release()
    (report,) = await step
    assert report["metrics"]["rollout/stalls"] == 2
    await world.kill()


async def test_progress_of_any_kind_starts_the_time_again(make_world):
    world = await _watched(make_world, held=lambda group_id, index: index == 1, async_rl=SLOW)
    await world.settle(lambda: world.controller.describe()["sealed_siblings"] == 8)
    watchdog = world.controller.watchdog
    world.clock.now += 300
    world.generator.release()
    await world.settle(lambda: len(world.controller.parts.buffer) == 8)
    step = asyncio.create_task(world.controller.train_steps(1, 1))
    world.clock.now += 300
    watchdog.look()
    await step
    world.clock.now += 300
    watchdog.look()
    assert _stalls(world) == []
    await world.kill()


async def test_a_run_without_anything_in_flight_is_reported_too(make_world):
    """The gate stays closed: a refit that hangs holds up the step and all dispatch."""
    world = await _watched(make_world, async_rl={**SLOW, "max_lookahead_versions": 0})
    hangs = asyncio.Event()

    async def load_weights(weights):
        await hangs.wait()
        world.generator.version = weights.version
        return {"load_s": 0.0}

    world.generator.load_weights = load_weights
    step = asyncio.create_task(world.controller.train_steps(1, 1))
    await world.settle(lambda: world.controller.parts.state.train_steps == 1)
    assert world.controller.describe()["running_groups"] == 0
    world.clock.now += 400
    world.controller.watchdog.look()
    assert [e["running_groups"] for e in _stalls(world)] == [0]
    hangs.set()
    await step
    await world.kill()


async def test_between_asked_steps_with_all_that_may_be_generated_done_nothing_is_reported(make_world):
    world = await _watched(make_world, async_rl=SLOW)
    await world.settle(lambda: len(world.controller.parts.buffer) == 8)
    watchdog = world.controller.watchdog
    for _ in range(5):
        world.clock.now += 500
        watchdog.look()
    await world.train(1, 1)
    await world.settle(lambda: len(world.controller.parts.buffer) == 8)
    world.clock.now += 399  # what the driver took is not counted
    watchdog.look()
    assert _stalls(world) == []
    await world.kill()


async def test_a_parked_run_is_not_expected_to_get_further(make_world):
    world = await _watched(make_world, held=lambda group_id, index: True, async_rl=SLOW)
    await world.settle(lambda: len(world.generator.orders) == 8)
    world.controller.park()
    world.clock.now += 5000
    world.controller.watchdog.look()
    world.controller.unpark()
    world.clock.now += 399
    world.controller.watchdog.look()
    assert _stalls(world) == []
    world.clock.now += 1
    world.controller.watchdog.look()
    assert len(_stalls(world)) == 1
    await world.kill()


async def test_it_looks_by_itself_while_the_run_lives_and_no_longer(make_world):
    world = await _watched(make_world)
    await world.settle(lambda: len(world.controller.parts.buffer) == 8)
    world.trainer.microbatch_gate = asyncio.Event()
    step = asyncio.create_task(world.controller.train_steps(1, 1))
    await world.settle(lambda: world.trainer.waiting_at == "microbatch")
    world.clock.now += 0.5
    await world.settle(lambda: len(_stalls(world)) == 1)
    world.trainer.microbatch_gate.set()
    await step
    await world.kill()
    world.clock.now += 500
    await _looks()
    assert len(_stalls(world)) == 1


async def test_told_to_end_the_run_it_does_so_with_an_error_even_if_the_trainer_hangs(make_world):
    world = await _watched(make_world, on_stall="end")
    await world.settle(lambda: len(world.controller.parts.buffer) == 8)
    world.trainer.microbatch_gate = asyncio.Event()
    step = asyncio.create_task(world.controller.train_steps(1, 1))
    await world.settle(lambda: world.trainer.waiting_at == "microbatch")
    world.clock.now += 7.5
    with pytest.raises(RunStalled, match=r"for 8 s \(async_rl\.stall_timeout_s 0\.4\): train_steps 0, step_ask"):
        await step
    assert world.controller.state == "failed"
    with pytest.raises(RunStalled):
        await world.controller.train_steps(1, 1)
    assert world.controller.parts.buffer.claimed() == []
    world.clock.now += 500
    await _looks()
    assert len(_stalls(world)) == 1
    await world.kill()


async def test_a_step_that_is_cancelled_by_its_caller_is_just_cancelled(make_world):
    world = await _watched(make_world, held=lambda group_id, index: True, on_stall="end")
    step = asyncio.create_task(world.controller.train_steps(1, 1))
    await world.settle(lambda: len(world.generator.orders) == 8)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    assert world.controller.state == "running"
    await world.kill()


def test_a_watchdog_that_would_mistake_one_long_rollout_for_a_stall_is_refused(configure):
    with pytest.raises(ValidationError, match=r"stall_timeout_s is 600\.0, not more than async_rl\.rollout_timeout_s"):
        configure(async_rl={"stall_timeout_s": 600.0, "rollout_timeout_s": 600.0})
    assert configure(async_rl={"stall_timeout_s": None, "rollout_timeout_s": 9e9}).async_rl.stall_timeout_s is None
