"""Whose fault a failure is, how many prompts in a row a run gives up, and what failed groups leave of the capacity."""

import urllib.error
from email.message import Message

import pytest

from gpu_workers.controller.failures import is_infrastructure
from gpu_workers.controller.ports import Failure
from storage.errors import (
    BatchIncomplete,
    DataFailure,
    InfrastructureFailure,
    StoreUnavailable,
    WorkerDied,
)

DATA = Failure(infrastructure=False, message="the answer can't be scored")
INFRASTRUCTURE = Failure(infrastructure=True, message="503 from the scorer")


class Response:
    def __init__(self, status_code):
        self.status_code = status_code


class HTTPStatusError(Exception):
    """As httpx raises it."""

    def __init__(self, status):
        super().__init__(f"status {status}")
        self.response = Response(status)


class APIStatusError(Exception):
    """As OpenAI's client raises it."""

    def __init__(self, status):
        super().__init__(f"status {status}")
        self.status_code = status


class TransportError(Exception):
    """As httpx calls everything that happens on the way."""


class ConnectTimeout(TransportError):
    pass


class RayActorError(Exception):
    pass


class EngineDeadError(Exception):
    pass


def _http_error(status):
    return urllib.error.HTTPError("http://scorer", status, "status", Message(), None)


def _wrapped(cause, error):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError("no answer"),
        ConnectionRefusedError("no listener"),
        ConnectionResetError(),
        BrokenPipeError(),
        EOFError(),
        _http_error(500),
        _http_error(503),
        HTTPStatusError(502),
        HTTPStatusError(408),
        APIStatusError(429),
        ConnectTimeout("connect"),
        RayActorError("died"),
        EngineDeadError(),
        InfrastructureFailure("503 from the engine"),
        WorkerDied("the engine died"),
        StoreUnavailable("no disk"),
        _wrapped(ConnectionResetError(), RuntimeError("the scorer failed")),
    ],
    ids=repr,
)
def test_time_outs_connections_server_errors_and_dead_workers_are_infrastructure(error):
    assert is_infrastructure(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no number in the answer"),
        KeyError("answer"),
        ZeroDivisionError(),
        AssertionError(),
        _http_error(400),
        HTTPStatusError(404),
        APIStatusError(422),
        DataFailure("too long"),
        _wrapped(TimeoutError(), DataFailure("too long")),
        _wrapped(TimeoutError(), HTTPStatusError(400)),
        _wrapped(ValueError("no number"), RuntimeError("the scorer failed")),
    ],
    ids=repr,
)
def test_everything_else_is_the_datas_fault(error):
    assert not is_infrastructure(error)


async def _failing(make_world, places, *, kinds=(DATA,), **async_rl):
    """A run in which the prompts at these places of the source fail for good at the first failure."""
    limits = {"max_data_failures": 0, "max_infrastructure_failures": 0, "max_skipped_prompts": 99}
    world = make_world(async_rl={**limits, **async_rl}, algorithm={"max_steps": 9})
    world.boot()
    order = world.passed_by(len(world.dataset))
    world.generator.failures = {f"{order[place]}_g0": list(kinds) for place in places}
    return world, order, await world.restore(world.plan())


@pytest.mark.parametrize(("kind", "error"), [(DATA, DataFailure), (INFRASTRUCTURE, InfrastructureFailure)])
async def test_too_many_dropped_prompts_in_a_row_fail_the_run_with_the_original_error(make_world, kind, error):
    limits = {"max_consecutive_dropped_prompts": 6, "min_step_batch_fraction": 0.25}
    world, order, controller = await _failing(make_world, range(4, 40), kinds=[kind], **limits)
    with pytest.raises(
        error, match=rf"{kind.message}.* the 7 prompts next to it .*max_consecutive_dropped_prompts is 6"
    ):
        await controller.train_steps(1, 9)
    assert len(controller.parts.state.dropped) == 7
    await world.kill()


async def test_as_many_dropped_prompts_that_are_not_in_a_row_are_no_reason_to_fail(make_world):
    world, order, controller = await _failing(
        make_world, range(0, 40, 2), max_consecutive_dropped_prompts=1, on_dropped_prompt="shrink"
    )
    await world.train(1, 5)
    assert len(controller.parts.state.dropped) >= 10
    world.check()
    await world.kill()


async def test_dropped_prompts_in_a_row_are_counted_over_restarts(make_world):
    """Of prompts 1 to 4 the first two fail before a restart, the others after it; 0 and 5 are finished."""
    limits = {"max_consecutive_dropped_prompts": 3, "on_dropped_prompt": "shrink", "min_step_batch_fraction": 0.25}
    world, order, controller = await _failing(make_world, [1, 2], **limits)
    world.generator.held = lambda group_id, index: group_id in order[3:5]
    await world.settle(lambda: len(controller.parts.buffer) == 4 and len(controller.parts.state.dropped) == 2)
    await world.snapshot(1)
    await world.kill()
    world.boot()
    world.generator.failures = {f"{group_id}_g0": [DATA] for group_id in order[3:5]}
    controller = await world.restore(world.plan())
    with pytest.raises(DataFailure, match="the 3 prompts next to it in the data were given up too"):
        await controller.train_steps(1, 9)
    await world.kill()


async def test_the_budget_of_prompts_in_a_row_can_be_raised_before_the_first_step(make_world):
    limits = {"max_consecutive_dropped_prompts": 0, "on_dropped_prompt": "shrink"}
    world, order, controller = await _failing(make_world, [1, 2], **limits)
    await world.settle(lambda: controller.state == "failed")
    await world.kill()
    world.change("async_rl", max_consecutive_dropped_prompts=2, max_skipped_prompts=5)
    controller = await world.start()
    await world.train(1, 1)
    await world.kill()


async def test_scenario_64_below_the_floor_the_error_has_step_size_and_share(make_world):
    world, order, controller = await _failing(
        make_world, [0, 1], on_dropped_prompt="shrink", min_step_batch_fraction=0.75
    )
    with pytest.raises(BatchIncomplete, match=r"step 1 would shrink to 2 of 4 groups; .* 0\.75 demands 3"):
        await controller.train_steps(1, 1)
    await world.kill()


@pytest.mark.parametrize("sampler", ["in_order", "ready_first"])
async def test_scenario_61_only_stamped_work_has_a_shortfall(make_world, sampler):
    options = {"sampler": sampler, "on_dropped_prompt": "shrink"}
    world, order, controller = await _failing(make_world, [1], **options)
    await world.settle(lambda: len(controller.parts.buffer) == 7)
    await world.snapshot(1)
    assert controller.parts.state.shortfall == ({0: 1} if sampler == "in_order" else {})
    reports = await world.train(1, 2)
    assert [len(report["group_ids"]) for report in reports] == ([3, 4] if sampler == "in_order" else [4, 4])
    await world.kill()


@pytest.mark.parametrize("fate", ["fails", "is skipped", "is replaced", "never starts", "is cancelled"])
async def test_scenario_60_a_child_leaves_no_capacity_behind_whatever_becomes_of_it(make_world, fate):
    """Room for 8 groups, 3 at once. The group of prompt 1 has its fate; afterwards all the room is used again."""
    options = {"on_dropped_prompt": "replace" if fate == "is replaced" else "shrink"}
    if fate in ("never starts", "is cancelled"):
        options = {"sampler": "windowed", "max_staleness_versions": 0, "buffer_capacity": 8}
    world = make_world(
        async_rl={"max_data_failures": 0, **options}, generation={"max_inflight_groups": 3}, algorithm={"max_steps": 9}
    )
    world.boot()
    order = world.passed_by(40)
    if fate == "fails":
        world.generator.failures[f"{order[1]}_g0"] = [INFRASTRUCTURE]
    elif fate in ("is skipped", "is replaced"):
        world.generator.failures[f"{order[1]}_g0"] = [DATA]
    elif fate == "is cancelled":
        world.generator.held = lambda group_id, index: group_id == order[1]
    else:  # two groups hold two of three places, so that others wait for room until they are stale
        world.generator.held = lambda group_id, index: group_id in order[:3] and index == 1
        world.change("generation", max_inflight_groups=3)
    controller = await world.restore(world.plan())
    await _until_settled(world, fate, order)
    world.generator.release()
    for step in range(1, 4):
        await world.train(step, step)
    wanted = 8 if fate in ("never starts", "is cancelled") else 4
    await world.settle(lambda: len(controller.parts.buffer) >= wanted and controller.describe()["running_groups"] == 0)
    world.check()
    await world.kill()


async def _until_settled(world, fate, order):
    if fate == "is cancelled":
        await world.settle(lambda: len(world.controller.parts.buffer) == 7)
    elif fate == "never starts":
        await world.settle(lambda: len(world.generator.orders) == 3)
