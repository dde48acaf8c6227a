"""Rollouts that fail: budgets, back-off, replacement, shrinking, floors, and what a restart remembers of them."""

import asyncio

import pytest

from gpu_workers.controller.failures import FailurePolicy
from gpu_workers.controller.ports import Failure
from storage.errors import BatchIncomplete, DataFailure, InfrastructureFailure
from storage.records import Sibling

DATA = Failure(infrastructure=False, message="the answer can't be scored")
INFRASTRUCTURE = Failure(infrastructure=True, message="503 from the engine")


async def _started(make_world, failures, **sections):
    """A run in which the n-th prompt's sibling 0 fails so: `failures` is {n: [failure, ...]}."""
    world = make_world(**sections)
    world.boot()
    order = world.passed_by(len(world.dataset))
    world.generator.failures = {f"{order[n]}_g0": list(kinds) for n, kinds in failures.items()}
    return world, order, await world.restore(world.plan())


def test_infrastructure_retries_back_off_exponentially_up_to_a_cap(configure):
    policy = FailurePolicy(configure(async_rl={"retry_backoff_s": 0.5, "retry_backoff_max_s": 3.0}))
    pauses = [policy.pause_s(Sibling(0, infrastructure_failures=count)) for count in range(6)]
    assert pauses == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0]
    assert policy.pause_s(Sibling(0, data_failures=3)) == 0.0


def test_each_class_of_failure_has_its_own_budget(configure):
    policy = FailurePolicy(configure(async_rl={"max_infrastructure_failures": 2, "max_data_failures": 1}))
    assert not policy.is_spent(Sibling(0, infrastructure_failures=2, data_failures=1))
    assert policy.is_spent(Sibling(0, infrastructure_failures=3))
    assert policy.is_spent(Sibling(0, data_failures=2))


@pytest.mark.parametrize("failure", [DATA, INFRASTRUCTURE, InfrastructureFailure("the engine's actor died")])
async def test_a_failure_within_the_budget_is_retried_with_the_next_attempt(make_world, failure):
    world, order, controller = await _started(make_world, {1: [failure]})
    reports = await world.train(1, 2)
    assert reports[0]["group_ids"] == order[:4]
    attempts = [e["attempt"] for e in world.trace.of("attempt_dispatched") if e["rollout_id"] == f"{order[1]}_g0"]
    assert attempts == [0, 1]
    reasons = {e["reason"] for e in world.trace.of("attempt_abandoned")}
    assert reasons == {"data"} if failure is DATA else {"infrastructure"}
    assert world.generator.closed.count(order[1]) == 2
    await world.kill()


async def test_a_retry_keeps_the_siblings_that_were_sealed(make_world):
    world, order, controller = await _started(make_world, {1: [DATA]})
    await controller.train_steps(1, 1)
    orders = [[s.generation_index for s in o.siblings] for o in world.generator.orders if o.group_id == order[1]]
    assert orders == [[0, 1], [0]]
    assert world.generator.generated.count(f"{order[1]}_g1") == 1
    await world.kill()


async def test_an_attempt_past_its_deadline_is_aborted_and_retried(make_world):
    world = make_world(async_rl={"rollout_timeout_s": 0.3})
    world.boot()
    slow = world.passed_by(1)[0]
    world.generator.held = lambda group_id, index: group_id == slow and slow not in world.generator.aborted
    controller = await world.restore(world.plan())
    reports = await controller.train_steps(1, 1)
    assert slow in reports[0]["group_ids"]
    assert world.generator.aborted.count(slow) == 1
    assert world.generator.closed.count(slow) == 2
    reasons = {e["message"] for e in world.trace.of("attempt_abandoned") if e["rollout_id"] == f"{slow}_g0"}
    assert reasons == {"no result within async_rl.rollout_timeout_s 0.3"}
    await world.kill()


async def test_a_result_of_an_attempt_that_is_no_longer_owed_is_ignored(make_world):
    world = make_world()
    world.boot()
    whole = world.generator.result
    world.generator.result = lambda order, index, attempt: whole(order, index, attempt - (attempt == 1))
    late = world.passed_by(1)[0]
    world.generator.failures[f"{late}_g0"] = [DATA]
    controller = await world.restore(world.plan())
    await controller.train_steps(1, 1)
    dispatched = [e["attempt"] for e in world.trace.of("attempt_dispatched") if e["rollout_id"] == f"{late}_g0"]
    assert dispatched == [0, 1, 2]
    world.check()
    await world.kill()


async def test_a_given_up_prompt_is_replaced_by_a_spare_with_its_place(make_world):
    world, order, controller = await _started(make_world, {8: [DATA, DATA]}, algorithm={"max_steps": 3})
    await world.settle(lambda: len(controller.parts.buffer) == 8)
    reports = await world.train(1, 3)
    (dropped,) = controller.parts.state.dropped
    assert (dropped.prompt.group_id, dropped.target_step) == (order[8], 1)
    assert [len(r["group_ids"]) for r in reports] == [4, 4, 4]
    assert order[4] in reports[1]["group_ids"]  # the first of the four spares
    assert controller.parts.state.shortfall == {}
    admitted = {e["group_id"]: e["target_step"] for e in world.trace.of("group_admitted")}
    assert admitted[order[4]] == 1
    await world.kill()


async def test_scenario_62_without_a_spare_a_replacement_shrinks_the_step(make_world):
    failures = {0: [DATA, DATA], 1: [DATA, DATA]}
    world, order, controller = await _started(make_world, failures, async_rl={"spare_prompts": 1})
    reports = await world.train(1, 2)
    assert reports[0]["group_ids"] == [order[4], *order[2:4]]
    assert len(reports[1]["group_ids"]) == 4
    await world.kill()


async def test_scenario_65_a_drop_that_arrives_while_the_train_pump_waits_closes_the_step(make_world):
    world = make_world(async_rl={"on_dropped_prompt": "shrink"})
    world.boot()
    last = world.passed_by(4)[3]
    world.generator.held = lambda group_id, index: group_id == last
    world.generator.failures[f"{last}_g0"] = [DATA, DATA]
    controller = await world.restore(world.plan())
    step = asyncio.create_task(controller.train_steps(1, 1))
    await world.settle(lambda: len(controller.parts.buffer) == 7)
    assert not step.done()
    world.generator.release()
    assert [len(r["group_ids"]) for r in await step] == [3]
    world.check()
    await world.kill()


async def test_scenario_64_below_the_floor_the_run_fails_with_figures(make_world):
    world, order, controller = await _started(
        make_world, {n: [DATA, DATA] for n in range(3)}, async_rl={"on_dropped_prompt": "shrink"}
    )
    with pytest.raises(BatchIncomplete, match=r"train step 1 would shrink to 1 of 4 groups; .*0\.5 demands 2"):
        await controller.train_steps(1, 1)
    assert controller.state == "failed"
    world.check()
    await world.kill()


@pytest.mark.parametrize(
    ("kinds", "error"),
    [
        ([DATA, DATA], DataFailure),
        ([INFRASTRUCTURE] * 3, InfrastructureFailure),
        ([INFRASTRUCTURE, INFRASTRUCTURE, DATA, DATA], DataFailure),
        ([DATA, INFRASTRUCTURE, INFRASTRUCTURE, INFRASTRUCTURE], InfrastructureFailure),
    ],
)
async def test_beyond_the_skip_limit_the_run_fails_with_the_original_error(make_world, kinds, error):
    world, order, controller = await _started(
        make_world, {1: kinds}, async_rl={"max_skipped_prompts": 0, "max_infrastructure_failures": 2}
    )
    with pytest.raises(error, match=f"group {order[1]} failed for good .*{kinds[-1].message}"):
        await controller.train_steps(1, 1)
    assert order[1] in controller.parts.ledger
    assert controller.parts.state.dropped == []
    await world.kill()


async def test_the_skip_limit_counts_what_was_skipped_before_a_restart(make_world):
    world, order, controller = await _started(
        make_world, {0: [DATA, DATA]}, async_rl={"max_skipped_prompts": 1, "on_dropped_prompt": "shrink"}
    )
    await controller.train_steps(1, 1)
    await world.kill()
    world.boot()
    waiting = world.passed_by(40)[12]
    world.generator.failures[f"{waiting}_g0"] = [DATA, DATA]
    controller = await world.restore(world.plan())
    with pytest.raises(DataFailure, match="max_skipped_prompts 1 prompts were given up already"):
        await controller.train_steps(2, 5)
    await world.kill()


async def test_m_failure_counts_survive_a_restart(make_world):
    world, order, controller = await _started(make_world, {0: [DATA], 1: [INFRASTRUCTURE]})
    world.generator.held = lambda group_id, index: index == 0 and not world.generator.failures.get(f"{group_id}_g0", 1)
    await world.settle(lambda: len([o for o in world.generator.orders if o.group_id in order[:2]]) == 4)
    await world.snapshot(1)
    await world.kill()
    world.boot()
    world.generator.failures[f"{order[0]}_g0"] = [DATA]
    controller = await world.restore(world.plan())
    siblings = [controller.parts.ledger.group(group_id).siblings[0] for group_id in order[:2]]
    assert [(s.data_failures, s.infrastructure_failures, s.attempt) for s in siblings] == [(1, 0, 2), (0, 1, 2)]
    reports = await world.train(1, 1)
    assert order[0] not in reports[0]["group_ids"]
    assert [d.prompt.group_id for d in controller.parts.state.dropped] == [order[0]]
    await world.kill()


async def test_invariant_12_what_was_given_up_does_not_come_back_after_restarts(make_world):
    world, order, controller = await _started(
        make_world, {n: [DATA, DATA] for n in (1, 9, 14)}, algorithm={"max_steps": 20}
    )
    await world.train(1, 2)
    await world.snapshot(1, force=True)
    await world.kill()
    for _ in range(2):
        controller = await world.start()
        await world.snapshot(1, force=True)
        await world.kill()
    world.boot()
    world.generator.failures = {f"{order[14]}_g0": [DATA, DATA]}
    controller = await world.restore(world.plan())
    await controller.train_steps(3, 20)
    trained = {g for groups in world.history().values() for g in groups}
    dropped = {d.prompt.group_id for d in controller.parts.state.dropped}
    assert {order[1], order[9]} <= dropped
    assert not trained & dropped
    assert trained | dropped | {s.group_id for s in controller.parts.state.spares} == set(order)
    await world.kill()


async def test_shortfall_and_replacements_keep_their_places_over_restarts(make_world):
    """Two places of step 1 are replaced, a third one shrinks; two restarts while the spares are running."""
    failures = {n: [DATA, DATA] for n in range(3)}
    world, order, controller = await _started(make_world, failures, async_rl={"spare_prompts": 2})
    world.generator.held = lambda group_id, index: group_id in order[4:6]
    await world.settle(lambda: len(controller.parts.state.dropped) == 3 and len(controller.parts.buffer) == 5)
    saved = (await world.snapshot(1)).state
    assert saved.progress.shortfall == {0: 1}
    await world.kill()
    for _ in range(2):
        world.boot()
        world.generator.held = lambda group_id, index: True
        controller = await world.restore(world.plan())
        await world.kill()
    controller = await world.start()
    reports = await world.train(1, 2)
    assert [len(r["group_ids"]) for r in reports] == [3, 4]
    assert sorted(reports[0]["group_ids"]) == sorted(order[3:6])
    await world.kill()


async def test_an_unknown_error_of_a_generator_ends_the_run_with_that_error(make_world):
    world, order, controller = await _started(make_world, {2: [ValueError("a bug")]})
    with pytest.raises(ValueError, match="a bug"):
        await controller.train_steps(1, 1)
    assert controller.state == "failed"
    assert "ValueError: a bug" in controller.describe()["failure"]
    await world.settle(lambda: controller.describe()["running_groups"] == 0)
    await world.kill()


async def test_scenario_39_a_failure_and_a_stop_in_the_same_turn_the_failure_wins(make_world):
    world, order, controller = await _started(make_world, {})
    failure = InfrastructureFailure("first")
    controller.parts.state.fail(failure)
    await world.kill()
    assert controller.parts.state.failure is failure
    with pytest.raises(InfrastructureFailure, match="first"):
        await controller.train_steps(1, 1)


async def test_a_pause_before_a_retry_does_not_hold_up_other_groups(make_world):
    world, order, controller = await _started(
        make_world, {1: [INFRASTRUCTURE]}, async_rl={"retry_backoff_s": 60, "retry_backoff_max_s": 60}
    )
    await world.settle(lambda: len(controller.parts.buffer) == 7)
    assert [o.group_id for o in world.generator.orders].count(order[1]) == 1
    assert controller.describe()["running_groups"] == 1
    await world.kill()
