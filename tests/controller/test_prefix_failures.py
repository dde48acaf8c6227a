"""Failures at level `prefix` without a restart of the run: whatever ran an attempt fails, the attempt goes on."""

from collections.abc import Callable
from typing import Any

import pytest

from gpu_workers.controller.ports import Failure
from storage.errors import InfrastructureFailure, WorkerDied
from tests.controller.prefix_runs import SECTIONS, running_with, trained_rows, uninterrupted


@pytest.fixture
def worlds(make_world: Callable[..., Any]) -> Callable[..., Any]:
    """Worlds at level prefix with lookahead 0 and prompts in the order of their numbers, unless told otherwise."""
    return lambda **sections: make_world(**{**SECTIONS, **sections})


async def test_a_generator_that_dies_loses_nothing_that_can_still_be_read(worlds):
    expected = await uninterrupted(worlds())
    world = worlds()
    world.boot()
    died: list[str] = []

    def dies(group_id: str, index: int) -> bool:
        if not died:
            died.append(f"{group_id}_g{index}")
            world.generator.failures[died[0]] = [WorkerDied("generator 0 died")]
        return False

    world.generator.held = dies
    world.generator.had = lambda rollout: 2
    await world.restore(world.plan())
    await world.train(1, 3)
    assert trained_rows(world) == expected
    interrupted = world.trace.of("attempt_interrupted")
    assert [(event["rollout_id"], event["attempt"], event["tokens"]) for event in interrupted] == [(died[0], 0, 2)]
    (resumed,) = [event for event in world.trace.of("attempt_resumed") if event["rollout_id"] == died[0]]
    assert resumed["tokens"] == 2
    assert set(world.generator.sampled.values()) == {1}
    assert not world.audit().problems


async def test_an_attempt_that_runs_out_of_time_goes_on_from_its_tokens(worlds):
    expected = await uninterrupted(worlds())
    world = worlds(async_rl={"max_lookahead_versions": 0, "rollout_timeout_s": 0.05, "stall_timeout_s": None})
    world.boot()
    waits = {"e0-p0_g0"}
    world.generator.held = lambda group_id, index: f"{group_id}_g{index}" in waits
    world.generator.had = lambda rollout: 2
    await world.restore(world.plan())
    await world.settle(lambda: bool(world.trace.of("attempt_interrupted")))
    waits.clear()
    await world.train(1, 3)
    assert trained_rows(world) == expected
    assert {event["rollout_id"] for event in world.trace.of("attempt_interrupted")} >= {"e0-p0_g0"}
    assert not world.audit().problems


async def test_an_interruption_counts_as_an_infrastructure_failure_of_the_sibling(worlds):
    world = worlds(
        async_rl={"max_lookahead_versions": 0, "max_infrastructure_failures": 2, "retry_backoff_s": 0.001}
        | {"retry_backoff_max_s": 0.002}
    )
    world.boot()
    failure = Failure(infrastructure=True, message="the connection was reset")
    failures = world.generator.failures = {"e0-p0_g0": [failure] * 3}
    world.generator.had = lambda rollout: 3 - len(failures["e0-p0_g0"])
    await world.restore(world.plan())
    await world.train(1, 3)
    assert [event["group_id"] for event in world.trace.of("prompt_dropped")] == ["e0-p0"]
    assert len(world.trace.of("attempt_interrupted")) == 3


async def test_an_attempt_that_fails_again_where_it_went_on_begins_anew_on_its_last_chance(worlds):
    expected = await uninterrupted(worlds())
    world = worlds()
    world.boot()
    world.generator.failures = {
        "e0-p0_g0": [Failure(infrastructure=True, message="these tokens crash the sampler")] * 5
    }
    world.generator.had = lambda rollout: 2
    await world.restore(world.plan())
    await world.train(1, 3)
    failed = (*world.trace.of("attempt_interrupted"), *world.trace.of("attempt_abandoned"))
    assert [event["event"] for event in failed] == [*["attempt_interrupted"] * 4, "attempt_abandoned"]
    starts = [e["event"] for _, trace in world.lives for e in trace.events if e.get("rollout_id") == "e0-p0_g0"]
    assert starts[-2:] == ["attempt_dispatched", "attempt_sealed"]
    assert trained_rows(world) == expected
    assert not world.audit().problems


async def test_a_failure_of_the_prompt_starts_a_new_attempt_without_the_tokens(worlds, data_failure):
    world = worlds()
    world.boot()
    world.generator.failures = {"e0-p0_g0": [data_failure]}
    world.generator.had = lambda rollout: 2
    await world.restore(world.plan())
    await world.train(1, 1)
    (abandoned,) = world.trace.of("attempt_abandoned")
    assert (abandoned["rollout_id"], abandoned["reason"]) == ("e0-p0_g0", "data")
    orders = [s for order in world.generator.orders for s in order.siblings if order.group_id == "e0-p0"]
    assert [s.partial for s in orders if s.attempt == 1] == [None]


async def test_tokens_that_a_generator_can_not_continue_are_reported_and_sampled_anew(worlds):
    expected = await uninterrupted(worlds())
    world = worlds()
    await running_with(world, 2)
    bundle = await world.snapshot(1)
    await world.kill()
    world.boot()
    world.generator.discards = lambda rollout: "temperature is 0.7, it was 1.0"
    await world.restore(world.plan())
    await world.train(1, 3)
    assert trained_rows(world) == expected
    discarded = world.trace.of("prefix_discarded")
    assert {event["rollout_id"] for event in discarded} == {call.rollout_id for call in bundle.state.partial_calls}
    assert {event["tokens"] for event in discarded} == {2}
    assert not world.audit().problems


async def test_calls_that_can_not_be_read_are_reported_once_and_run_again_from_their_beginning(worlds):
    expected = await uninterrupted(worlds())
    world = worlds()
    await running_with(world, 2)
    world.generator.unreadable = {"e0-p0_g0": "the engine does not tell its tokens"}
    bundle = await world.snapshot(1)
    await world.snapshot(2, force=True)
    assert "e0-p0_g0" not in {call.rollout_id for call in bundle.state.partial_calls}
    (told,) = world.trace.of("call_unreadable")
    assert told["rollout_id"] == "e0-p0_g0"
    attempts = world.trace.of("snapshot_attempt")
    assert [event["unreadable_calls"] for event in attempts] == [1, 1]
    await world.kill()
    await world.start()
    await world.train(1, 3)
    assert trained_rows(world) == expected


async def test_what_a_failed_refit_leaves_is_no_reason_to_lose_tokens(worlds):
    world = worlds()
    world.boot()
    world.generator.failures = {"e0-p0_g0": [InfrastructureFailure("vLLM was busy")]}
    world.generator.had = lambda rollout: 1
    await world.restore(world.plan())
    await world.train(1, 1)
    assert set(world.generator.sampled.values()) == {1}


async def test_a_prompt_that_kills_its_generator_is_given_up_within_its_budget_over_restarts_too(worlds):
    limits = {"max_infrastructure_failures": 3, "retry_backoff_s": 0.001, "retry_backoff_max_s": 0.002}
    world = worlds(async_rl={"max_lookahead_versions": 0, **limits})
    for life in range(2):
        world.boot()
        deaths = [WorkerDied("generator 0 died") for _ in range(2)]
        world.generator.failures = {"e0-p0_g0": deaths}
        world.generator.held = lambda group_id, index, deaths=deaths: (group_id, index) != ("e0-p0", 0) or not deaths
        world.generator.had = lambda rollout, life=life: 1 + life
        await world.restore(world.plan())
        end = "prompt_dropped" if life else "attempt_interrupted"
        await world.settle(lambda end=end, life=life: len(world.trace.of(end)) == 2 - life)
        await world.snapshot(1, force=True)
        await world.kill()
    await world.start()
    await world.train(1, 3)
    (dropped,) = [event for _, trace in world.lives for event in trace.of("prompt_dropped")]
    assert (dropped["group_id"], dropped["place"]) == ("e0-p0", "replaced")
    assert "e0-p0" not in [group for groups in world.history().values() for group in groups]
    assert not world.audit().problems
