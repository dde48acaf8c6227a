"""Groups that are given up: evicted, aborted in flight, or failed under a sampler that leaves no shortfall."""

import asyncio
from dataclasses import replace

import pytest

from gpu_workers.controller.barrier import Cut
from storage.errors import BrokenInvariant, DataFailure, InfrastructureFailure

UNSTAMPED = ("weight_fifo", "ready_first", "windowed", "team_samplers:ShortestFirst")


def _discarded(world, reason):
    return [event["group_id"] for event in world.trace.of("group_discarded") if event["reason"] == reason]


async def _with_stragglers(make_world, options):
    """windowed, only the trainer's own version: step 1 can be trained, four groups of version 0 have not ended.

    Two of them run and have one sibling sealed, two wait for room. What is started later is held.
    """
    world = make_world(async_rl=options("windowed", 0, buffer_capacity=6), algorithm={"max_steps": 6})
    world.boot()
    first = world.passed_by(6)
    world.generator.held = lambda group_id, index: group_id not in first or (group_id in first[:2] and index == 1)
    controller = await world.restore(world.plan())
    await world.settle(lambda: len(controller.parts.buffer) == 4 and controller.describe()["sealed_siblings"] == 2)
    stragglers = {group.group_id for group in controller.parts.ledger.admitted()}
    assert stragglers == set(first[:2]) | set(world.passed_by(8)[6:])
    return world, controller, stragglers


async def test_scenario_66_a_stale_group_is_aborted_outside_the_commit_window_and_after_it_lost_its_owner(
    make_world, options
):
    world, controller, stragglers = await _with_stragglers(make_world, options)
    parts, aborts = controller.parts, []

    async def abort(group_id):
        aborts.append((group_id, parts.state.in_commit_window, group_id in parts.ledger, parts.state.trainer_version))

    world.generator.abort = abort
    world.trainer.finish_gate = asyncio.Event()
    training = asyncio.create_task(controller.train_steps(1, 2))
    await world.settle(lambda: world.trainer.waiting_at == "finish")
    assert (parts.state.in_commit_window, aborts) == (True, [])
    assert stragglers <= {group.group_id for group in parts.ledger.groups()}
    world.trainer.finish_gate.set()
    await world.settle(lambda: len(aborts) == 4)
    assert sorted(aborts) == sorted((group_id, False, False, 1) for group_id in stragglers)
    await world.settle(lambda: stragglers <= set(world.generator.closed))
    world.check()
    world.generator.release()
    await training
    assert not stragglers & {group for groups in world.history().values() for group in groups}
    world.check()
    await world.kill()


async def test_a_broken_promise_would_be_noticed_if_stale_groups_were_given_up_inside_the_window(make_world, options):
    world, controller, _ = await _with_stragglers(make_world, options)
    parts, stale = controller.parts, controller._train_pump._stale_groups
    parts.state.trainer_version, parts.state.in_commit_window = 1, True
    with pytest.raises(BrokenInvariant, match="inside an optimizer-commit window"):
        await stale.give_up()
    await world.kill()


async def test_an_aborted_group_leaves_no_row_frees_its_place_and_is_recorded(make_world, options):
    world, controller, stragglers = await _with_stragglers(make_world, options)
    parts = controller.parts
    await controller.train_steps(1, 1)
    await world.settle(lambda: stragglers <= {order.group_id for order in world.generator.orders})
    training = asyncio.create_task(controller.train_steps(2, 2))
    await world.settle(lambda: len(world.generator.aborted) == 4)
    assert set(world.generator.aborted) == stragglers == set(_discarded(world, "stale"))
    assert {d.prompt.group_id: d.reason for d in parts.state.dropped} == dict.fromkeys(stragglers, "stale")
    abandoned = [e["rollout_id"] for e in world.trace.of("attempt_abandoned") if e["reason"] == "stale"]
    sealed = {f"{group_id}_g0" for group_id in world.passed_by(2)}
    assert sorted(abandoned) == sorted({f"{group_id}_g{i}" for group_id in stragglers for i in range(2)} - sealed)
    await world.settle(lambda: stragglers <= set(world.generator.closed))
    await world.settle(lambda: controller.describe()["running_groups"] == 6)
    assert not stragglers & {group.group_id for group in parts.ledger.groups()}
    assert not stragglers & {key.partition("_g")[0] for key in parts.rows.capture(Cut("test"))}
    world.check()
    world.generator.release()
    await training
    await world.kill()


async def test_a_result_that_arrives_while_its_group_is_aborted_is_ignored(make_world, options):
    world, controller, stragglers = await _with_stragglers(make_world, options)
    await controller.train_steps(1, 1)

    async def abort(group_id):
        world.generator.release()  # the straggler's result is there at the very moment of its abort
        await asyncio.sleep(0.01)
        world.check()

    world.generator.abort = abort
    (report,) = await world.train(2, 2)
    assert not stragglers & set(report["group_ids"])
    assert set(_discarded(world, "stale")) == stragglers
    await world.kill()


async def test_an_abort_that_the_generators_fail_to_answer_costs_nothing(make_world, options):
    world, controller, stragglers = await _with_stragglers(make_world, options)
    await controller.train_steps(1, 1)

    async def abort(group_id):
        world.generator.release()
        raise InfrastructureFailure(f"the engine of {group_id} is gone")

    world.generator.abort = abort
    (report,) = await world.train(2, 2)
    assert len(report["group_ids"]) == 4
    assert set(_discarded(world, "stale")) == stragglers
    await world.kill()


async def test_what_was_aborted_does_not_come_back_after_a_restart(make_world, options):
    world, controller, stragglers = await _with_stragglers(make_world, options)
    await controller.train_steps(1, 1)
    training = asyncio.create_task(controller.train_steps(2, 2))
    await world.settle(lambda: len(world.generator.aborted) == 4)
    await world.snapshot(1)
    training.cancel()
    await asyncio.wait([training])
    await world.kill()
    controller = await world.start()
    assert {d.prompt.group_id for d in controller.parts.state.dropped if d.reason == "stale"} == stragglers
    await world.train(2, 3)
    assert not stragglers & {order.group_id for order in world.generator.orders}
    assert not stragglers & {group for groups in world.history().values() for group in groups}
    await world.kill()


async def test_a_batch_is_admitted_when_there_is_room_and_never_from_weights_that_have_left_the_window(
    make_world, options
):
    """Its age counts from there. Between commit and refit the generators hold the version before."""
    world = make_world(async_rl=options("windowed", 0, buffer_capacity=4), data={"num_prompts": 80})
    controller = await world.start()
    await world.train(1, 3)
    await world.settle(lambda: len(controller.parts.buffer) == 4)
    admitted = [event["start_version"] for event in world.trace.of("group_admitted")]
    assert admitted == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert controller.parts.state.dropped == []
    await world.kill()


async def test_evicted_groups_lose_index_rows_and_gain_their_credit_in_one_mutation(make_world, options):
    world = make_world(async_rl=options("windowed", 0, buffer_capacity=12), algorithm={"max_steps": 6})
    controller = await world.start()
    parts = controller.parts
    await world.settle(lambda: len(parts.buffer) == 12)
    await controller.train_steps(1, 1)
    leftover = {group.group_id for group in parts.buffer.ready() if group.start_version == 0}
    assert len(leftover) == 8
    training = asyncio.create_task(controller.train_steps(2, 2))
    await world.snapshots_while(training)  # each is whole: no cut sees a group between buffer and credit
    assert set(_discarded(world, "evicted")) >= leftover
    credited = {d.prompt.group_id: d.reason for d in parts.state.dropped}
    assert {credited[group_id] for group_id in leftover} == {"evicted"}
    assert not leftover & {row.partition("_g")[0] for row in parts.rows.capture(Cut("test"))}
    world.check()
    await world.kill()


async def test_stale_groups_count_as_capacity_until_the_trainer_gives_them_up(make_world, options):
    world = make_world(async_rl=options("windowed", 0, buffer_capacity=11), algorithm={"max_steps": 6})
    controller = await world.start()
    parts = controller.parts
    await world.settle(lambda: len(parts.buffer) == 11)
    await controller.train_steps(1, 1)
    await world.settle(lambda: len(parts.buffer) == 11)
    # The eighth of version 0 was finalized when it had left the window already: it was never published.
    assert sorted(group.start_version for group in parts.buffer.ready()) == [0] * 7 + [1] * 4
    for _ in range(100):
        await asyncio.sleep(0)
        assert len(parts.buffer) + controller.describe()["running_groups"] == 11
    await world.train(2, 2)
    await world.kill()


async def test_a_straggler_that_ends_outside_the_window_while_the_trainer_waits_is_evicted(make_world, options):
    world = make_world(async_rl=options("weight_fifo", 1), algorithm={"max_steps": 6})
    world.boot()
    late = world.passed_by(1)[0]
    world.generator.held = lambda group_id, index: group_id == late or world.generator.version >= 1
    controller = await world.restore(world.plan())
    await world.settle(lambda: len(controller.parts.buffer) == 7)
    await controller.train_steps(1, 1)
    parts = controller.parts
    async with parts.barrier.mutation("test") as mutation:  # as if it had been restored under a smaller window
        parts.ledger.load(
            mutation, [replace(g, start_version=-1) if g.group_id == late else g for g in parts.ledger.groups()]
        )
    training = asyncio.create_task(controller.train_steps(2, 2))
    await asyncio.sleep(0.01)
    assert _discarded(world, "evicted") == []
    world.generator.release()
    (report,) = await training
    await world.settle(lambda: late not in parts.ledger)
    assert late not in report["group_ids"]
    await controller.train_steps(3, 3)
    assert _discarded(world, "evicted") == [late]
    world.check()
    await world.kill()


async def test_what_the_sampler_gives_up_is_not_counted_as_skipped(make_world, options, data_failure):
    world = make_world(
        async_rl=options("windowed", 0, buffer_capacity=12, max_skipped_prompts=1, max_data_failures=0),
        algorithm={"max_steps": 6},
        data={"num_prompts": 80},
    )
    controller = await world.start()
    await world.settle(lambda: len(controller.parts.buffer) == 12)
    await controller.train_steps(1, 2)
    assert len(controller.parts.state.dropped) >= 8
    bad = {"left": 2}
    make = world.generator.generate

    async def failing(order):
        if bad["left"]:
            bad["left"] -= 1
            world.generator.failures[f"{order.group_id}_g0"] = [data_failure]
        async for result in make(order):
            yield result

    world.generator.generate = failing
    with pytest.raises(DataFailure, match="max_skipped_prompts 1 prompts were given up already"):
        await controller.train_steps(3, 6)
    assert len([d for d in controller.parts.state.dropped if d.reason not in ("evicted", "stale")]) == 1
    await world.kill()


@pytest.mark.parametrize("policy", ["shrink", "replace"])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("name", UNSTAMPED)
async def test_failed_groups_do_not_wedge_gate_and_step_of_a_sampler_without_stamps(
    make_world, options, data_failure, name, lag, policy
):
    """More groups fail than the lookahead holds: the gate alone would never open again."""
    room = {"buffer_capacity": 4 * (lag + 1)} if name == "windowed" else {}
    chosen = options(name, lag, on_dropped_prompt=policy, max_data_failures=0, max_skipped_prompts=99, **room)
    world = make_world(async_rl=chosen, algorithm={"max_steps": 5}, data={"num_prompts": 80})
    world.boot()
    failing = world.passed_by(40)[1::3]
    for group_id in failing:
        world.generator.failures[f"{group_id}_g0"] = [data_failure]
    controller = await world.restore(world.plan())
    async with asyncio.timeout(20):
        reports = await world.train(1, 5)
    assert [len(report["group_ids"]) for report in reports] == [4] * 5, "no stamp, no shortfall"
    assert controller.parts.state.shortfall == {}
    skipped = {d.prompt.group_id for d in controller.parts.state.dropped if d.reason not in ("evicted", "stale")}
    assert len(skipped) >= 4
    assert skipped <= set(failing)
    await world.kill()


@pytest.mark.parametrize("name", UNSTAMPED)
async def test_a_dropped_group_of_a_sampler_without_stamps_is_replaced_by_the_next_prompt(
    make_world, options, data_failure, name
):
    room = {"buffer_capacity": 4} if name == "windowed" else {}
    world = make_world(async_rl=options(name, 0, max_data_failures=0, **room))
    world.boot()
    failing = world.passed_by(1)[0]
    world.generator.failures[f"{failing}_g0"] = [data_failure]
    controller = await world.restore(world.plan())
    await world.settle(lambda: len(controller.parts.buffer) == 4)
    dropped = controller.parts.state.dropped[0].prompt.group_id
    replacement = next(
        e for e in world.trace.of("group_reserved") if e["batch"] == 0 and e["group_id"] not in world.passed_by(4)
    )
    assert dropped == failing
    assert replacement["group_id"] in world.passed_by(12)
    assert replacement["group_id"] in {group.group_id for group in controller.parts.buffer.ready()}
    (report,) = await world.train(1, 1)
    assert replacement["group_id"] in report["group_ids"]
    await world.kill()


async def test_a_group_that_takes_anothers_place_is_as_old_as_its_own_start(make_world, options, data_failure):
    world = make_world(async_rl=options("ready_first", 1, max_data_failures=0), algorithm={"max_steps": 6})
    world.boot()
    failing = world.passed_by(1)[0]
    world.generator.failures[f"{failing}_g0"] = [data_failure]
    world.generator.held = lambda group_id, index: group_id == failing
    controller = await world.restore(world.plan())
    await world.settle(lambda: len(controller.parts.buffer) == 7)
    await controller.train_steps(1, 1)
    world.generator.release()
    await world.settle(lambda: len(controller.parts.state.dropped) == 1)
    places = {e["group_id"]: e["start_version"] for e in world.trace.of("group_admitted")}
    assert places[failing] == 0
    await world.settle(lambda: any(group.order == 0 for group in controller.parts.buffer.ready()))
    replacement = controller.parts.buffer.ready()[0]
    assert (replacement.start_version, places[replacement.group_id]) == (1, 1)
    await world.kill()


@pytest.mark.parametrize("name", UNSTAMPED)
async def test_scenario_63_the_pool_is_never_filled_without_stamps(make_world, options, name):
    world = make_world(async_rl=options(name, 1, spare_prompts=4), data={"num_prompts": 16}, algorithm={"max_steps": 9})
    controller = await world.start()
    training = asyncio.create_task(controller.train_steps(1, 9))
    bundles = await world.snapshots_while(training)
    assert {len(bundle.state.spares) for bundle in bundles} == {0}
    assert {bundle.state.progress.stamps for bundle in bundles} <= {False, None}
    assert (await training)[-1]["end_of_data"]
    world.check()
    await world.kill()


async def test_scenario_63_a_partial_pool_is_not_dispatched(make_world):
    world = make_world(async_rl={"spare_prompts": 2}, data={"num_prompts": 10}, algorithm={"max_steps": 9})
    controller = await world.start()
    reports = await world.train(1, 3)
    assert [len(report.get("group_ids", ())) for report in reports] == [4, 4, 0]
    assert reports[-1] == {"step": 2, "end_of_data": True}
    spares = {prompt.group_id for prompt in controller.parts.state.spares}
    assert len(spares) == 2
    assert not spares & {order.group_id for order in world.generator.orders}
    await world.kill()


@pytest.mark.parametrize("name", UNSTAMPED)
@pytest.mark.parametrize("num_prompts", [8, 10])
async def test_without_stamps_the_last_step_takes_what_is_left_and_the_run_ends_well(
    make_world, options, data_failure, name, num_prompts
):
    chosen = options(name, 2, on_dropped_prompt="shrink", max_data_failures=0)
    world = make_world(async_rl=chosen, data={"num_prompts": num_prompts}, algorithm={"max_steps": 9})
    world.boot()
    world.generator.failures[f"{world.passed_by(3)[2]}_g1"] = [data_failure]
    await world.restore(world.plan())
    async with asyncio.timeout(20):
        reports = await world.controller.train_steps(1, 9)
    sizes = [len(report["group_ids"]) for report in reports if "group_ids" in report]
    assert sizes == ([4, 3] if num_prompts == 8 else [4, 4, 1])
    assert reports[-1]["end_of_data"]
    world.check()
    await world.kill()
