"""Both pumps: numbered steps that are trained once, dispatch within capacity, and the end of the data."""

import asyncio

import pytest

from storage.errors import (
    BrokenInvariant,
    InfrastructureFailure,
    StaleIncarnation,
    StepOutOfOrder,
    StoreUnavailable,
)


def _fail_once(error):
    errors = [error]

    def strike():
        if errors:
            raise errors.pop()

    return strike


async def test_scenario_67_a_step_that_is_asked_for_again_returns_its_result_and_trains_nothing(make_world):
    world = make_world()
    controller = await world.start()
    reports = await controller.train_steps(1, 2)
    assert await controller.train_steps(1, 2) == reports
    assert len(world.trainer.trained) == 2
    assert len(world.trace.of("train_step")) == 2
    await world.kill()
    controller = await world.start()
    assert [r["step"] for r in await controller.train_steps(1, 2)] == [1, 2]
    assert world.trainer.trained == []
    await world.kill()


async def test_scenario_67_a_running_step_is_joined(make_world):
    world = make_world()
    controller = await world.start()
    world.trainer.microbatch_gate = asyncio.Event()
    tasks = [asyncio.create_task(controller.train_steps(1, 2)) for _ in range(3)]
    await world.settle(lambda: world.trainer.waiting_at == "microbatch")
    world.trainer.microbatch_gate.set()
    first, *others = [await task for task in tasks]
    assert all(other == first for other in others)
    assert len(world.trainer.trained) == 2
    await world.kill()


async def test_a_step_before_its_predecessor_is_refused_and_the_run_goes_on(make_world):
    world = make_world()
    controller = await world.start()
    with pytest.raises(StepOutOfOrder, match="train step 3 was asked for after step 0"):
        await controller.train_steps(3, 3)
    await world.train(1, 2)
    await world.kill()


async def test_a_failure_before_the_commit_window_leaves_the_claimed_groups_to_the_next_try(make_world):
    world = make_world()
    controller = await world.start()
    world.trainer.before_microbatch = _fail_once(InfrastructureFailure("trainer rank 0 lost its connection"))
    with pytest.raises(InfrastructureFailure):
        await controller.train_steps(1, 1)
    assert controller.parts.buffer.claimed() == []
    world.check()
    await world.train(1, 1)
    assert len(world.trainer.trained) == 1
    assert len(world.trainer.trained[0]) == 8
    await world.kill()


async def test_a_failure_inside_the_commit_window_ends_the_run_and_nothing_is_saved(make_world):
    world = make_world()
    controller = await world.start()
    await controller.train_steps(1, 1)
    world.trainer.before_finish = _fail_once(InfrastructureFailure("the optimizer's rank died"))
    for _ in range(2):
        with pytest.raises(BrokenInvariant, match="train step 2 failed inside its commit window .*rank died"):
            await controller.train_steps(2, 2)
    with pytest.raises(BrokenInvariant, match="commit window"):
        await controller.attempt_snapshot(1, force=True)
    await world.kill()
    await world.start()
    await world.train(2, 3)
    await world.kill()


async def test_a_refit_that_fails_after_the_commit_is_made_up_for_by_the_retry(make_world):
    world = make_world()
    controller = await world.start()
    world.generator.refit_failures = [InfrastructureFailure("engine 0 timed out")]
    with pytest.raises(InfrastructureFailure):
        await controller.train_steps(1, 1)
    assert (controller.parts.state.train_steps, controller.parts.state.generator_version) == (1, 0)
    assert len(world.trace.of("train_step")) == 1
    (report,) = await world.train(1, 1)
    assert len(report["rollouts_sha256"]) == 64
    assert (len(world.trainer.trained), world.generator.version) == (1, 1)
    await world.train(2, 3)
    await world.kill()


@pytest.mark.parametrize("place", ["model", "manifest"])
async def test_a_trainer_checkpoint_that_fails_after_the_commit_is_saved_by_the_retry(make_world, place):
    world = make_world()
    controller = await world.start()
    if place == "model":
        world.trainer.before_save = _fail_once(StoreUnavailable("the store is down"))
    else:
        world.store.fail("create_exclusive", "/manifests/", StoreUnavailable("the store is down"))
    with pytest.raises(StoreUnavailable):
        await controller.train_steps(1, 1)
    bundle = await world.snapshot(1)
    assert (bundle.manifest.anchor.kind, len(bundle.state.trained)) == ("bootstrap", 4)
    assert world.plan().anchor is None
    (report,) = await world.train(1, 1)
    assert report["weights_sha256"] == world.trainer.weights
    assert world.plan().anchor is not None
    assert len(world.trainer.trained) == 1
    await world.kill()
    assert (await world.start()).parts.state.train_steps == 1
    await world.kill()


@pytest.mark.parametrize("place", ["waiting", "microbatch", "save"])
async def test_a_cancelled_step_is_done_by_the_next_call_and_trained_once(make_world, place):
    world = make_world()
    world.boot()
    world.generator.held = lambda group_id, index: place == "waiting"
    controller = await world.restore(world.plan())
    gate = asyncio.Event()
    world.trainer.microbatch_gate = gate if place == "microbatch" else None
    world.trainer.save_gate = gate if place == "save" else None
    step = asyncio.create_task(controller.train_steps(1, 1))
    reached = {"waiting": lambda: len(world.generator.orders) == 8}
    await world.settle(reached.get(place, lambda: world.trainer.waiting_at == place))
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    world.check()
    assert controller.parts.buffer.claimed() == []
    gate.set()
    world.generator.release()
    await world.train(1, 2)
    assert len(world.trainer.trained) == 2
    assert [e["step"] for e in world.trace.of("checkpoint_published")] == [1, 2]
    await world.kill()


async def test_a_step_cancelled_twice_while_a_cut_blocks_its_clean_up_does_not_wedge_the_run(make_world):
    world = make_world()
    controller = await world.start()
    world.trainer.microbatch_gate = asyncio.Event()
    step = asyncio.create_task(controller.train_steps(1, 1))
    await world.settle(lambda: world.trainer.waiting_at == "microbatch")
    async with controller.parts.barrier.cut("someone else's"):
        for _ in range(2):
            step.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await step
    assert len(controller.parts.buffer.claimed()) == 4
    world.trainer.microbatch_gate.set()
    await world.train(1, 2)
    await world.kill()


async def test_closing_a_controller_wakes_whoever_waits_for_a_step(make_world):
    world = make_world()
    world.boot()
    world.generator.held = lambda group_id, index: True
    controller = await world.restore(world.plan())
    step = asyncio.create_task(controller.train_steps(1, 1))
    await world.settle(lambda: len(world.generator.orders) == 8)
    await world.kill()
    with pytest.raises(StaleIncarnation, match="closed"):
        await step
    with pytest.raises(StaleIncarnation):
        await controller.train_steps(1, 1)
    assert controller.state == "ended"


@pytest.mark.parametrize("lookahead", [0, 1, 2])
async def test_dispatch_stays_within_lookahead_and_capacity(make_world, lookahead):
    world = make_world(
        async_rl={"max_lookahead_versions": lookahead},
        generation={"max_inflight_groups": 3},
        algorithm={"max_steps": 5},
    )
    controller = await world.start()
    for step in range(1, 6):
        await world.settle(lambda: len(controller.parts.buffer) == 4 * (lookahead + 1))
        await world.train(step, step)
    for event in world.trace.of("group_admitted"):
        assert event["start_version"] <= event["target_step"] <= event["start_version"] + lookahead
    ages = [e["batch_age"] for e in world.trace.of("train_step")]
    assert max(ages) <= lookahead
    assert (max(ages) > 0) == (lookahead > 0)
    await world.kill()


async def test_a_parked_controller_launches_nothing_keeps_what_ends_and_goes_on(make_world):
    world = make_world()
    world.boot()
    world.generator.held = lambda group_id, index: True
    controller = await world.restore(world.plan())
    await world.settle(lambda: len(world.generator.orders) == 8)
    controller.park()
    assert controller.state == "parked"
    world.generator.release()
    await world.settle(lambda: len(controller.parts.buffer) == 8)
    assert (await controller.attempt_snapshot(1)).outcome == "completed"
    (report,) = await controller.train_steps(1, 1)
    assert len(report["group_ids"]) == 4
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(world.generator.orders) == 8
    step = asyncio.create_task(controller.train_steps(2, 3))
    controller.unpark()
    assert [r["step"] for r in await step] == [2, 3]
    assert controller.state == "running"
    await world.kill()


async def test_the_data_ends_with_a_smaller_step_when_a_whole_one_cannot_be_filled(make_world):
    world = make_world(data={"num_prompts": 10}, algorithm={"max_steps": 9}, async_rl={"on_dropped_prompt": "shrink"})
    controller = await world.start()
    reports = await controller.train_steps(1, 9)
    assert [len(r.get("group_ids", ())) for r in reports] == [4, 4, 2, 0]
    assert reports[-1] == {"step": 3, "end_of_data": True}
    assert await controller.train_steps(1, 9) == reports
    world.check()
    await world.kill()
    controller = await world.start()
    assert (await controller.train_steps(4, 9))[-1]["end_of_data"] is True
    world.check()
    await world.kill()


async def test_scenario_63_spares_are_trained_as_whole_steps_after_the_data_and_a_partial_pool_is_not(make_world):
    world = make_world(data={"num_prompts": 18}, algorithm={"max_steps": 9}, async_rl={"spare_prompts": 6})
    controller = await world.start()
    reports = await controller.train_steps(1, 9)
    assert [len(r.get("group_ids", ())) for r in reports] == [4, 4, 4, 4, 0]
    assert len(controller.parts.state.spares) == 2
    world.check()
    await world.kill()
    controller = await world.start()
    assert len(controller.parts.state.spares) == 2
    assert (await controller.train_steps(5, 9))[-1]["end_of_data"] is True
    await world.kill()


@pytest.mark.parametrize("stop", range(1, 6))
async def test_scenarios_58_and_59_a_resume_at_or_around_an_epoch_boundary_skips_and_repeats_nothing(make_world, stop):
    world = make_world(
        data={"num_prompts": 8, "num_epochs": 2},
        algorithm={"max_steps": 9},
        async_rl={"max_lookahead_versions": 0, "spare_prompts": 0},
    )
    for first in range(1, 5, stop):
        await world.start()
        for step in range(first, min(first + stop, 5)):
            await world.train(step, step)
        await world.snapshot(1, force=True)
        await world.kill()
    controller = await world.start()
    assert (await controller.train_steps(5, 9))[-1]["end_of_data"] is True
    trained = [g for step in sorted(world.history()) for g in world.history()[step]]
    assert trained == world.passed_by(16)
    assert {g[:2] for g in trained[:8]} == {"e0"}
    assert {g[:2] for g in trained[8:]} == {"e1"}
    await world.kill()


async def test_an_epoch_boundary_inside_a_batch_and_inside_the_spare_pool_is_crossed(make_world):
    world = make_world(
        data={"num_prompts": 7, "num_epochs": 3}, algorithm={"max_steps": 9}, async_rl={"spare_prompts": 5}
    )
    controller = await world.start()
    reports = await controller.train_steps(1, 9)
    trained = [g for r in reports for g in r.get("group_ids", ())]
    assert len(trained) == len(set(trained)) == 20
    assert len(controller.parts.state.spares) == 1
    await world.kill()
