"""How a run stops: at its last step, at the end of its data, and on notice of its preemption."""

import asyncio

import pytest

from storage.errors import StoreUnavailable


async def test_on_notice_in_the_middle_of_a_step_what_is_in_flight_is_published_and_nothing_new_starts(make_world):
    world = make_world()
    world.boot()
    world.generator.held = lambda group_id, index: index == 1
    controller = await world.restore(world.plan())
    step = asyncio.create_task(controller.train_steps(1, 1))
    await world.settle(lambda: controller.describe()["sealed_siblings"] == 8)
    outcome = await controller.publish_last(-1)
    saved = world.bundles.read(outcome.sequence)
    assert sum(s.sealed is not None for g in saved.state.ledger for s in g.siblings) == 8
    launched = len(world.generator.orders)
    world.generator.release()
    await step  # what was running may end; no group was dispatched any more
    assert len(world.generator.orders) == launched
    await world.kill()
    controller = await world.start()
    await world.train(controller.parts.state.train_steps + 1, 3)
    assert not world.audit().problems
    await world.kill()


async def test_on_notice_in_the_commit_window_the_snapshot_follows_the_step(make_world):
    world = make_world()
    controller = await world.start()
    world.trainer.finish_gate = asyncio.Event()
    steps = asyncio.create_task(controller.train_steps(1, 3))
    await world.settle(lambda: world.trainer.waiting_at == "finish")
    leaving = asyncio.create_task(controller.publish_last(-10))
    await world.settle(lambda: bool(world.trace.of("snapshot_attempt")))
    assert world.trace.of("snapshot_attempt")[0]["reason"] == "optimizer_commit_in_progress"
    world.trainer.finish_gate.set()
    outcome = await leaving
    assert outcome.outcome == "completed"
    assert world.bundles.manifest(outcome.sequence).step == 1
    steps.cancel()
    await world.kill()
    assert (await world.start()).parts.state.train_steps >= 1
    await world.kill()


async def test_a_store_that_fails_on_notice_leaves_the_previous_snapshot(make_world):
    world = make_world()
    controller = await world.start()
    await controller.train_steps(1, 1)
    before = world.plan()
    world.store.fail("change", "", StoreUnavailable("the disk is gone"))
    with pytest.raises(StoreUnavailable):
        await controller.publish_last(-1)
    await world.kill()
    assert world.plan() == before
    await world.start()
    await world.train(2, 3)
    assert not world.audit().problems
    await world.kill()


async def test_the_last_step_is_checkpointed_and_a_finished_run_trains_nothing_more(make_world):
    world = make_world(checkpointing={"save_period": 10})
    controller = await world.start()
    await controller.train_steps(1, 3)
    assert [e["step"] for e in world.trace.of("checkpoint_published")] == [3]
    await world.kill()
    controller = await world.start()
    assert controller.parts.state.train_steps == 3
    again = await controller.train_steps(1, 3)
    assert [(report["step"], report["already_committed"]) for report in again] == [(1, True), (2, True), (3, True)]
    assert world.trainer.trained == []
    await world.kill()


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("prompts", [4, 8, 9])
async def test_the_data_of_every_epoch_is_trained_once_and_its_end_is_saved(make_world, prompts, epochs):
    world = make_world(
        data={"num_prompts": prompts, "num_epochs": epochs},
        algorithm={"max_steps": 50},
        async_rl={"on_dropped_prompt": "shrink", "min_step_batch_fraction": 0.25},
        checkpointing={"save_period": 100},
    )
    controller = await world.start()
    reports = await controller.train_steps(1, 50)
    assert reports[-1]["end_of_data"] is True
    last = reports[-1]["step"]
    trained = [group for report in reports for group in report.get("group_ids", ())]
    assert sorted(trained) == sorted(world.passed_by(prompts * epochs))
    assert [e["step"] for e in world.trace.of("checkpoint_published")] == [last]
    await world.kill()
    controller = await world.start()
    assert (await controller.train_steps(last + 1, 50))[-1] == {"step": last, "end_of_data": True}
    assert not world.audit().problems
    await world.kill()


async def test_fewer_prompts_than_a_step_are_refused_before_anything_starts(configure):
    with pytest.raises(ValueError, match=r"data.num_prompts is 3, less than algorithm.num_prompts_per_step 4"):
        configure(data={"num_prompts": 3})
