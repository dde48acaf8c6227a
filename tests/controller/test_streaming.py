"""Streamed steps: fed in chunks while groups finish, committed once, and undone as a whole until then."""

import asyncio

import pytest
from pydantic import ValidationError

from gpu_workers.controller.checkpoint_schedule import Trigger
from gpu_workers.controller.row_assembly import digest_of_rows
from storage.errors import BatchIncomplete, BrokenInvariant, InfrastructureFailure

UNSTAMPED = ("weight_fifo", "ready_first", "windowed")


async def _half_fed(make_world, *, chunk=2, held=(2, 3), **async_rl):
    """Step 1 has claimed and accumulated what was finished; the groups `held` of its four run on."""
    world = make_world(async_rl={"min_groups_for_streaming_train": chunk, **async_rl})
    world.boot()
    late = {world.passed_by(4)[place] for place in held}
    world.generator.held = lambda group_id, index: group_id in late
    controller = await world.restore(world.plan())
    step = asyncio.create_task(controller.train_steps(1, 1))
    await world.settle(lambda: len(world.trainer.pending) == 2 * (4 - len(held)))
    return world, controller, step


async def test_a_streamed_step_begins_with_its_first_chunk_and_takes_up_what_finishes_meanwhile(make_world):
    world, controller, step = await _half_fed(make_world)
    order = world.passed_by(4)
    assert [group.group_id for group in controller.parts.buffer.claimed()] == order[:2]
    assert (step.done(), world.trainer.trained, controller.parts.state.train_steps) == (False, [], 0)
    world.check()
    world.generator.release()
    (report,) = await step
    assert (report["group_ids"], report["chunks"]) == (order, [2, 2])
    assert len(world.trainer.trained) == 1
    assert report["rollouts_sha256"] == digest_of_rows(world.trainer.trained[0])
    (event,) = world.trace.of("train_step")
    assert (event["group_ids"], event["chunks"]) == (order, [2, 2])
    world.check()
    await world.kill()


async def test_the_order_of_training_is_that_of_the_chunks_and_is_recorded(make_world):
    world, controller, step = await _half_fed(make_world, held=(0, 1))
    world.generator.release()
    (report,) = await step
    order = world.passed_by(4)
    assert report["group_ids"] == [*order[2:], *order[:2]]
    assert report["prompt_ids"] == [int(group_id.partition("-p")[2]) for group_id in report["group_ids"]]
    rows = [row for group_id in report["group_ids"] for row in (f"{group_id}_g0", f"{group_id}_g1")]
    sealed = {e["rollout_id"] for e in world.trace.of("attempt_sealed")}
    assert set(rows) <= sealed
    assert report["rollouts_sha256"] == digest_of_rows(world.trainer.trained[0])
    await world.kill()


async def test_a_streamed_step_trains_the_rows_that_a_whole_batch_would(make_world):
    trained = []
    for chunk in (None, 1, 3):
        world = make_world(async_rl={"min_groups_for_streaming_train": chunk, "max_lookahead_versions": 0})
        await world.start()
        reports = await world.train(1, 3)
        assert [len(report["group_ids"]) for report in reports] == [4] * 3
        trained.append([sorted(rows) for rows in world.trainer.trained])
        await world.kill()
    assert trained[0] == trained[1] == trained[2]


async def test_only_the_last_chunk_may_be_smaller_than_the_configured_one(make_world):
    world, controller, step = await _half_fed(make_world, chunk=3, held=(3,))
    world.generator.release()
    assert (await step)[0]["chunks"] == [3, 1]
    world.generator.held = lambda group_id, index: False
    reports = await controller.train_steps(2, 3)
    assert all(chunk >= 3 for report in reports for chunk in report["chunks"][:-1])
    await world.kill()


async def test_scenario_37_a_streamed_step_is_saved_as_finished_groups_is_counted_and_goes_on(make_world):
    world, controller, step = await _half_fed(make_world)
    claimed = {group.group_id for group in controller.parts.buffer.claimed()}
    bundle = await world.snapshot(1)
    saved = {group.group_id: group for group in bundle.state.buffer}
    assert claimed <= saved.keys()
    assert {saved[group_id].claimed_by for group_id in claimed} == {None}
    assert {row for group_id in claimed for row in saved[group_id].row_ids} <= bundle.rows.keys()
    assert world.trace.of("snapshot_attempt")[0]["rolled_back_train_group_count"] == 2
    assert len(world.trainer.pending) == 4, "the live step has lost nothing"
    world.generator.release()
    assert set((await step)[0]["group_ids"]) == set(world.passed_by(4))
    await world.kill()


async def test_scenario_37_after_a_kill_in_its_middle_claimed_groups_are_trained_and_not_generated_again(make_world):
    world, controller, step = await _half_fed(make_world)
    claimed = {group.group_id for group in controller.parts.buffer.claimed()}
    await world.snapshot(1)
    step.cancel()
    await world.kill()
    await world.start()
    (report,) = await world.train(1, 1)
    assert set(report["group_ids"]) == set(world.passed_by(4))
    assert not claimed & {order.group_id for order in world.generator.orders}
    assert len(world.trainer.trained) == 1
    await world.train(2, 3)
    assert not world.audit().problems
    await world.kill()


async def test_a_streamed_step_that_is_trained_again_after_a_restart_keeps_its_order(make_world):
    world = make_world(
        async_rl={"min_groups_for_streaming_train": 2}, checkpointing={"save_period": 9}, algorithm={"max_steps": 9}
    )
    world.boot()
    order = world.passed_by(4)
    world.generator.held = lambda group_id, index: group_id in order[:2]
    controller = await world.restore(world.plan())
    step = asyncio.create_task(controller.train_steps(1, 1))
    await world.settle(lambda: len(world.trainer.pending) == 4)
    world.generator.release()
    (first,) = await step
    assert (first["group_ids"], first["chunks"]) == ([*order[2:], *order[:2]], [2, 2])
    await world.snapshot(1)
    await world.kill()
    await world.start()
    (again,) = await world.train(1, 1)
    assert again["replayed"]
    for key in ("group_ids", "rollouts_sha256", "weights_sha256", "batch_age"):
        assert again[key] == first[key]
    await world.train(2, 3)
    assert not world.audit().problems
    await world.kill()


async def test_scenario_45_a_trainer_checkpoint_is_refused_while_a_streamed_step_waits_for_its_next_chunk(make_world):
    world, controller, step = await _half_fed(make_world)
    before = world.store.changes()
    with pytest.raises(BrokenInvariant, match="while a train step holds claimed groups"):
        await controller._checkpoints.save(0, Trigger.REQUEST)
    assert world.store.changes() == before
    step.cancel()
    await world.kill()


async def test_scenario_65_a_drop_that_arrives_while_a_streamed_step_waits_for_its_next_chunk_closes_it(
    make_world, data_failure
):
    world, controller, step = await _half_fed(make_world, chunk=2, held=(2, 3), on_dropped_prompt="shrink")
    order = world.passed_by(4)
    world.generator.failures[f"{order[3]}_g0"] = [data_failure, data_failure]
    world.generator.release()
    (report,) = await step
    assert (report["group_ids"], report["chunks"]) == (order[:3], [2, 1])
    world.check()
    await world.kill()


async def test_scenario_65_a_drop_of_the_last_group_that_a_streamed_step_waits_for_commits_what_it_has(
    make_world, data_failure
):
    world, controller, step = await _half_fed(make_world, chunk=3, held=(3,), on_dropped_prompt="shrink")
    order = world.passed_by(4)
    world.generator.failures[f"{order[3]}_g0"] = [data_failure, data_failure]
    assert not step.done()
    world.generator.release()
    (report,) = await step
    assert (report["group_ids"], report["chunks"]) == (order[:3], [3])
    assert len(world.trainer.trained) == 1
    world.check()
    await world.kill()


async def test_a_group_that_takes_a_dropped_ones_place_fills_the_streamed_step(make_world, data_failure):
    world, controller, step = await _half_fed(make_world, held=(3,), chunk=3, spare_prompts=2)
    world.generator.failures[f"{world.passed_by(4)[3]}_g0"] = [data_failure, data_failure]
    world.generator.release()
    (report,) = await step
    assert len(report["group_ids"]) == 4
    world.check()
    await world.kill()


async def test_scenario_67_a_failure_before_the_window_releases_every_chunk_and_the_retry_trains_the_whole_step(
    make_world,
):
    world, controller, step = await _half_fed(make_world)
    errors = [InfrastructureFailure("trainer rank 0 lost its connection")]

    def strike():
        if errors:
            raise errors.pop()

    world.trainer.before_microbatch = strike
    world.generator.release()
    with pytest.raises(InfrastructureFailure):
        await step
    assert controller.parts.buffer.claimed() == []
    assert world.trainer.trained == []
    world.check()
    (report,) = await world.train(1, 1)
    assert set(report["group_ids"]) == set(world.passed_by(4))
    assert [len(rows) for rows in world.trainer.trained] == [8]
    assert await controller.train_steps(1, 1) == [report]
    assert len(world.trace.of("train_step")) == 1
    await world.kill()


async def test_a_streamed_step_that_is_cancelled_while_it_waits_gives_its_chunks_back(make_world):
    world, controller, step = await _half_fed(make_world)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    assert controller.parts.buffer.claimed() == []
    world.check()
    world.generator.release()
    await world.train(1, 2)
    assert [len(rows) for rows in world.trainer.trained] == [8, 8]
    await world.kill()


async def test_the_end_of_the_run_wakes_a_streamed_step_that_waits(make_world):
    world, controller, step = await _half_fed(make_world)
    controller.parts.state.fail(InfrastructureFailure("the engines are gone"))
    with pytest.raises(InfrastructureFailure, match="engines are gone"):
        await step
    assert controller.parts.buffer.claimed() == []
    await world.kill()


@pytest.mark.parametrize("chunk", [1, 3])
async def test_every_snapshot_of_streamed_steps_is_whole(make_world, chunk):
    world = make_world(async_rl={"min_groups_for_streaming_train": chunk}, algorithm={"max_steps": 6})
    controller = await world.start()
    training = asyncio.create_task(controller.train_steps(1, 6))
    bundles = await world.snapshots_while(training)
    assert len(bundles) > 5
    assert not world.audit().problems
    await world.kill()


@pytest.mark.parametrize("policy", ["shrink", "replace"])
@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("name", UNSTAMPED)
async def test_dropped_groups_do_not_wedge_a_streamed_step_of_a_sampler_without_stamps(
    make_world, data_failure, name, lag, chunk, policy
):
    """More fail than the lookahead holds, while others of the step are claimed already."""
    room = {"buffer_capacity": 4 * (lag + 1)} if name == "windowed" else {}
    chosen = {"sampler": name, "max_staleness_versions": lag, "min_groups_for_streaming_train": chunk, **room}
    failures = {"on_dropped_prompt": policy, "max_data_failures": 0, "max_skipped_prompts": 99}
    world = make_world(async_rl={**chosen, **failures}, algorithm={"max_steps": 5}, data={"num_prompts": 80})
    world.boot()
    for group_id in world.passed_by(40)[1::3]:
        world.generator.failures[f"{group_id}_g0"] = [data_failure]
    await world.restore(world.plan())
    async with asyncio.timeout(20):
        reports = await world.train(1, 5)
    assert [len(report["group_ids"]) for report in reports] == [4] * 5, "no stamp, no shortfall"
    assert all(size >= chunk for report in reports for size in report["chunks"][:-1])
    await world.kill()


async def _settle_at(world, *, running, ready):
    controller = world.controller
    await world.settle(
        lambda: (controller.describe()["running_groups"], len(controller.parts.buffer)) == (running, ready)
    )


async def test_what_a_streamed_step_waits_for_is_launched_even_beyond_the_capacity(make_world):
    """After `windowed` with more room: of version 0 two groups are ready and six unfinished, of version 1 so many are
    ready that there is no room; `weight_fifo` takes version 0 first, and has claimed half of its step.
    """
    windowed = {"sampler": "windowed", "max_staleness_versions": 1}
    world = make_world(async_rl={**windowed, "buffer_capacity": 6}, data={"num_prompts": 80})
    order = world.passed_by(12)
    unfinished = {*order[:2], *order[8:]}
    for capacity, running in ((6, 4), (16, 6)):
        world.change("async_rl", buffer_capacity=capacity)
        world.boot()
        world.generator.held = lambda group_id, index: group_id in unfinished
        controller = await world.restore(world.plan())
        await world.train(1, 1)
        await _settle_at(world, running=running, ready=capacity - running)
        await world.snapshot(1)
        await world.kill()
    ready = controller.parts.buffer.ready()
    assert [group.group_id for group in ready if group.start_version == 0] == order[6:8]
    assert len(ready) == 10
    world.change("async_rl", sampler="weight_fifo", buffer_capacity=8, min_groups_for_streaming_train=2)
    await world.start()
    async with asyncio.timeout(10):
        (report,) = await world.train(2, 2)
    assert (report["group_ids"], report["chunks"]) == ([*order[6:8], *order[:2]], [2, 2])
    await world.kill()


@pytest.mark.parametrize("name", ["in_order", *UNSTAMPED])
async def test_the_last_streamed_step_takes_what_is_left_of_the_data(make_world, name):
    lag = {} if name == "in_order" else {"max_staleness_versions": 2}
    world = make_world(
        async_rl={"sampler": name, "min_groups_for_streaming_train": 3, "on_dropped_prompt": "shrink", **lag},
        data={"num_prompts": 9},
        algorithm={"max_steps": 9},
    )
    controller = await world.start()
    async with asyncio.timeout(20):
        reports = await controller.train_steps(1, 9)
    assert [len(report.get("group_ids", ())) for report in reports] == [4, 4, 1, 0]
    assert reports[-1] == {"step": 3, "end_of_data": True}
    world.check()
    await world.kill()


async def test_a_streamed_step_that_can_never_be_whole_says_what_it_has_and_gives_it_back(make_world):
    world = make_world(
        async_rl={"min_groups_for_streaming_train": 2, "spare_prompts": 0},
        data={"num_prompts": 4},
        algorithm={"max_steps": 2},
    )
    world.boot()
    lost = world.passed_by(4)[3]
    world.generator.held = lambda group_id, index: group_id == lost
    controller = await world.restore(world.plan())
    step = asyncio.create_task(controller.train_steps(1, 1))
    await world.settle(lambda: len(world.trainer.pending) >= 4)
    parts = controller.parts
    async with parts.barrier.mutation("as if it had never been promised") as mutation:
        parts.ledger.discard(mutation, lost)
    parts.state.changed.notify()
    with pytest.raises(BatchIncomplete, match=r"train step 1 has [23] of 4 groups, and neither the prompt source"):
        await step
    assert parts.buffer.claimed() == []
    await world.kill()


def test_a_chunk_that_can_never_be_filled_or_a_choice_that_needs_the_whole_step_is_refused_by_name(configure):
    configure(async_rl={"min_groups_for_streaming_train": 4})
    with pytest.raises(ValidationError, match="streaming_train is 5, more than .*num_prompts_per_step 4"):
        configure(async_rl={"min_groups_for_streaming_train": 5})
    newest = {"sampler": "windowed", "freshest_first": True, "min_groups_for_streaming_train": 2}
    with pytest.raises(ValidationError, match=r"async_rl.freshest_first chooses .*leave one of them out"):
        configure(async_rl=newest)
