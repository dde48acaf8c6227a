"""Borrowing: a ready group of a later step takes the place of one that failed for good, and a spare repays it."""

import asyncio

import pytest

from gpu_workers.controller.ports import Failure

DATA = Failure(infrastructure=False, message="the answer can't be scored")
COUNTS = ("dropped_groups", "replaced_groups", "promoted_groups")


async def _failing_last(make_world, *failing, then_held=(), **async_rl):
    """Two steps of four groups are generated; those of `failing` (places in the source) fail after all the others.

    The source hands out step 1's groups as 0 to 3, four spares as 4 to 7, step 2's groups as 8 to 11.
    """
    world = make_world(async_rl=async_rl)
    world.boot()
    order = world.passed_by(len(world.dataset))
    failed = [order[place] for place in failing]
    world.generator.failures = {f"{group_id}_g0": [DATA, DATA] for group_id in failed}
    world.generator.held = lambda group_id, index: group_id in failed
    controller = await world.restore(world.plan())
    await world.settle(lambda: len(controller.parts.buffer) == 8 - len(failing))
    world.generator.release()
    world.generator.held = lambda group_id, index: group_id in [order[place] for place in then_held]
    await world.settle(lambda: len(controller.parts.state.dropped) == len(failing))
    world.check()
    return world, order, controller


async def test_a_failed_groups_place_is_taken_by_the_ready_group_furthest_in_the_future_and_a_spare_repays_it(
    make_world,
):
    world, order, controller = await _failing_last(make_world, 1)
    (promoted,) = world.trace.of("group_promoted")
    expected = {"group_id": order[11], "from_step": 1, "to_step": 0, "instead_of": order[1], "repaid_by": order[4]}
    assert {name: promoted[name] for name in expected} == expected
    assert [e["place"] for e in world.trace.of("prompt_dropped")] == ["promoted"]
    admitted = {e["group_id"]: e["target_step"] for e in world.trace.of("group_admitted")}
    assert (admitted[order[11]], admitted[order[4]]) == (1, 1)
    reports = await world.train(1, 2)
    assert reports[0]["group_ids"] == [order[0], order[11], order[2], order[3]]
    assert reports[1]["group_ids"] == [*order[8:11], order[4]]
    assert [reports[0]["metrics"][name] for name in COUNTS] == [1, 0, 1]
    assert [reports[1]["metrics"][name] for name in COUNTS] == [0, 0, 0]
    assert controller.parts.state.shortfall == {}
    await world.kill()


async def test_scenario_13_with_a_promotion_outstanding_a_restart_accounts_for_every_prompt(make_world):
    world, order, controller = await _failing_last(make_world, 1, then_held=[4])
    await world.settle(lambda: order[4] in {o.group_id for o in world.generator.orders})
    saved = (await world.snapshot(1)).state
    places = {g.group_id: (g.target_step, g.order) for g in (*saved.buffer, *saved.ledger)}
    assert (places[order[11]], places[order[4]]) == ((0, 1), (1, 7))
    assert [g.group_id for g in saved.ledger if g.target_step is not None] == [order[4]]
    await world.kill()
    await world.start()
    await world.kill()
    await world.start()
    await world.settle(lambda: order[4] in {o.group_id for o in world.generator.orders})
    reports = await world.train(1, 3)
    assert reports[0]["group_ids"] == [order[0], order[11], order[2], order[3]]
    assert reports[1]["group_ids"] == [*order[8:11], order[4]]
    assert not {f"{group}_g0" for group in (*order[:4], *order[8:12])} & set(world.generator.generated)
    audit = world.audit()
    assert (audit.problems, audit.owners["dropped"]) == ([], 1)
    await world.kill()


async def test_scenario_13_a_repaying_group_that_fails_borrows_again_or_shrinks_its_own_step(make_world):
    world, order, controller = await _failing_last(make_world, 1, then_held=[4], spare_prompts=1)
    # With one spare, step 2's groups are 5 to 8.
    assert {e["group_id"] for e in world.trace.of("group_promoted")} == {order[8]}
    await world.settle(lambda: order[4] in {o.group_id for o in world.generator.orders})
    world.generator.failures[f"{order[4]}_g0"] = [DATA, DATA]
    world.generator.release()
    await world.settle(lambda: len(controller.parts.state.dropped) == 2)
    world.check()
    assert controller.parts.state.shortfall == {1: 1}
    reports = await world.train(1, 2)
    assert [len(report["group_ids"]) for report in reports] == [4, 3]
    await world.kill()


async def test_scenario_14_without_a_spare_in_hand_nothing_is_promoted(make_world):
    world, order, controller = await _failing_last(make_world, 0, 1, spare_prompts=1)
    assert [e["place"] for e in world.trace.of("prompt_dropped")] == ["promoted", "lost"]
    assert len(world.trace.of("group_promoted")) == 1
    reports = await world.train(1, 2)
    assert [len(report["group_ids"]) for report in reports] == [3, 4]
    await world.kill()


async def test_scenario_14_an_unready_group_is_never_promoted(make_world):
    world = make_world()
    world.boot()
    order = world.passed_by(12)
    world.generator.failures = {f"{order[1]}_g0": [DATA, DATA]}
    world.generator.held = lambda group_id, index: group_id in order[8:] and index == 1
    controller = await world.restore(world.plan())
    await world.settle(lambda: len(controller.parts.state.dropped) == 1)
    assert [e["place"] for e in world.trace.of("prompt_dropped")] == ["replaced"]
    assert world.trace.of("group_promoted") == []
    reports = await world.train(1, 1)
    assert reports[0]["group_ids"] == [order[0], order[4], order[2], order[3]]
    assert [reports[0]["metrics"][name] for name in COUNTS] == [1, 1, 0]
    await world.kill()


async def test_scenario_14_under_shrink_nothing_is_promoted(make_world):
    world, order, controller = await _failing_last(make_world, 1, on_dropped_prompt="shrink")
    assert world.trace.of("group_promoted") == []
    assert controller.parts.state.shortfall == {0: 1}
    await world.kill()


@pytest.mark.parametrize("seed", range(5))
async def test_scenario_14_a_promotion_is_always_of_a_ready_group_into_a_step_that_is_still_to_come(make_world, seed):
    world = make_world(
        async_rl={"max_lookahead_versions": 3, "spare_prompts": 6, "max_data_failures": 0, "max_skipped_prompts": 99},
        algorithm={"max_steps": 9},
        data={"seed": seed},
    )
    world.boot()
    order = world.passed_by(40)
    late = set(order[seed::5])
    world.generator.failures = {f"{group_id}_g1": [DATA] for group_id in late}
    world.generator.held = lambda group_id, index: group_id in late
    controller = await world.restore(world.plan())
    training = asyncio.create_task(controller.train_steps(1, 6))

    def a_later_group_is_ready() -> bool:
        next_step = controller.parts.state.train_steps + 1
        return any(group.target_step > next_step for group in controller.parts.buffer.ready())

    while not training.done():
        for turn in range(1000):  # before the late ones fail; towards the end there are none
            if training.done() or (turn > 100 and a_later_group_is_ready()):
                break
            await asyncio.sleep(0 if turn % 10 else 0.0005)
        world.check()
        world.generator.release()
        world.generator.held = lambda group_id, index: group_id in late
    await training
    ready, trained = set(), 0
    for event in world.trace.events:
        if event["event"] == "train_step":
            ready -= set(event["group_ids"])
            trained = event["step"]
        elif event["event"] == "group_published":
            ready.add(event["group_id"])
        elif event["event"] == "group_promoted":
            assert event["group_id"] in ready
            assert trained <= event["to_step"] < event["from_step"]
    assert world.trace.of("group_promoted")
    await world.kill()
