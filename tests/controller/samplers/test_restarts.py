"""Restarts under each sampler: what is finished survives, what is unfinished is owned, what was given up stays gone."""

from dataclasses import replace

import pytest

from gpu_workers.controller.barrier import Cut
from gpu_workers.controller.samplers.saved_dispatch import SavedDispatch
from storage.errors import RestoreRefused
from storage.run_config import AsyncRlConfig

STEP = 4
SITUATIONS = ("all ready", "stale only", "mixed with in-flight", "one evicted")


def _make(make_world, options, name, lag, **others):
    room = {"buffer_capacity": STEP * (lag + 2)} if name in ("windowed", "freshest") else {}
    return make_world(async_rl=options(name, lag, **room, **others), algorithm={"max_steps": 9})


def _room(world):
    return world.config.async_rl.buffer_capacity or STEP * (world.controller.parts.sampler.required_capacity(1))


async def _full(world, *, held=frozenset()):
    """Everything that may be dispatched is finished, but for the held groups."""
    world.boot()
    world.generator.held = lambda group_id, index: group_id in held
    controller = await world.restore(world.plan())
    await world.settle(lambda: len(controller.parts.buffer) == _room(world) - len(held))
    return controller


def _hold_all_new(world):
    known = {order.group_id for order in world.generator.orders}
    world.generator.held = lambda group_id, index: group_id not in known


async def _age_one(world, lag):
    """One finished group is older than any that a run could have: as the sampler counts, its time has passed."""
    parts = world.controller.parts
    async with parts.barrier.mutation("test") as mutation:
        oldest, *others = parts.buffer.capture(Cut("test"))
        stamped = oldest.target_step is not None
        if stamped:
            parts.state.shortfall[oldest.target_step] = 1
        aged = replace(oldest, start_version=-1 - lag, target_step=-1 if stamped else None)
        parts.buffer.load(mutation, [aged, *others])
    return oldest.group_id


async def _arrange(world, situation, lag):
    """The situation, and the group that was evicted in it, if any."""
    held = frozenset(world.passed_by(STEP)[1::2]) if situation == "mixed with in-flight" else frozenset()
    controller = await _full(world, held=held)
    if situation not in ("stale only", "one evicted"):
        return None
    aged = None
    if situation == "one evicted":
        aged = await _age_one(world, lag)
    else:
        _hold_all_new(world)
    finished = {group.group_id for group in controller.parts.buffer.ready()}
    await controller.train_steps(1, 1)
    # What finishes when it has left the window already is not even published.
    gone = finished & {dropped.prompt.group_id for dropped in controller.parts.state.dropped}
    assert gone == ({aged} & gone)
    if situation == "stale only":
        assert all(
            group.start_version < controller.parts.state.trainer_version for group in controller.parts.buffer.ready()
        )
    return aged if aged in gone else None


def _selection(controller):
    parts = controller.parts
    version, ready = parts.state.trainer_version, parts.buffer.ready()
    evicted = parts.sampler.evict(ready, version=version)
    ready = [group for group in ready if group not in evicted]
    return parts.sampler.select(ready, parts.ledger.admitted(), version=version, least=STEP, most=STEP)


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("situation", SITUATIONS)
async def test_scenario_15_a_restart_keeps_what_a_sampler_has_in_hand(
    make_world, options, sampler_name, situation, lag
):
    world = _make(make_world, options, sampler_name, lag)
    evicted = await _arrange(world, situation, lag)
    assert (evicted is not None) == (
        situation == "one evicted" and sampler_name not in ("ready_first", "team_samplers:ShortestFirst")
    )
    saved = await world.snapshot(1)
    cursor = world.controller.parts.sampler.cursor
    await world.kill()

    world.boot()
    world.generator.held = lambda group_id, index: True
    controller = await world.restore(world.plan())
    assert tuple(controller.parts.buffer.ready()) == saved.state.buffer
    stamps = {g.group_id: (g.phase, g.target_step, g.start_version) for g in saved.state.ledger}
    assert {g.group_id: (g.phase, g.target_step, g.start_version) for g in controller.parts.ledger.groups()} == stamps
    assert controller.parts.sampler.cursor == cursor == saved.state.progress.sampler_cursor
    before = len(world.store.calls)
    await world.snapshot(1)
    assert not [path for call, path in world.store.calls[before:] if call == "write" and "/parts/" in path]

    step, expected = saved.state.progress.train_steps + 1, _selection(controller)
    if not expected:
        world.generator.release()
    (report,) = await world.train(step, step)
    if expected:
        assert report["group_ids"] == [group.group_id for group in expected]
    world.generator.release()
    await world.train(step + 1, step + 2)
    if evicted is not None:
        assert evicted in {dropped.prompt.group_id for dropped in controller.parts.state.dropped}
        assert evicted not in {order.group_id for order in world.generator.orders}
        assert evicted not in {group for groups in world.history().values() for group in groups}
    await world.kill()


async def test_scenario_16_an_empty_buffer_and_a_batch_with_a_hole_round_trip(make_world, data_failure):
    world = make_world(async_rl={"on_dropped_prompt": "shrink", "max_data_failures": 0})
    world.boot()
    hole = world.passed_by(8)[2]
    world.generator.held = lambda group_id, index: True
    await world.restore(world.plan())
    empty = await world.snapshot(1)
    assert (empty.state.buffer, empty.rows) == ((), {})
    await world.kill()

    world.boot()
    world.generator.failures[f"{hole}_g0"] = [data_failure]
    controller = await world.restore(world.plan())
    assert len(controller.parts.buffer) == 0
    await world.settle(lambda: len(controller.parts.buffer) == 7)
    saved = await world.snapshot(1)
    await world.kill()

    controller = await world.start()
    assert tuple(controller.parts.buffer.ready()) == saved.state.buffer
    reports = await world.train(1, 2)
    assert [len(r["group_ids"]) for r in reports] == [3, 4]
    assert hole not in {order.group_id for order in world.generator.orders}
    await world.kill()


async def test_scenario_16_unusual_stamps_round_trip(make_world):
    """Stamps far ahead, and in another order than dispatch."""
    world = make_world(async_rl={"spare_prompts": 0})
    controller = await _full(world)
    parts, far = controller.parts, 2**40
    async with parts.barrier.mutation("test") as mutation:
        groups = parts.buffer.capture(Cut("test"))
        parts.buffer.load(mutation, [replace(g, target_step=far - g.order) for g in groups])
        parts.sampler.restore(SavedDispatch(sampler="in_order", cursor=far, stamps=True))
    sequence = (await controller.attempt_snapshot(1)).sequence
    saved = world.bundles.read(sequence).state
    await world.kill()
    world.boot()
    await world.controller.restore(world.plan())
    parts = world.controller.parts
    assert tuple(parts.buffer.ready()) == saved.buffer
    assert [group.target_step for group in saved.buffer] == [far - group.order for group in groups]
    assert parts.sampler.cursor == far
    await world.kill()


async def _trained_and_killed(make_world, options, name, lag=2, **sections):
    """Step 1 is durable; then finished groups and half-finished ones are saved in a snapshot."""
    world = _make(make_world, options, name, lag, spare_prompts=0, **sections)
    world.boot()
    known = set(world.passed_by(STEP * 3))
    world.generator.held = lambda group_id, index: index == 1 and group_id not in known
    controller = await world.restore(world.plan())
    await controller.train_steps(1, 1)
    await world.settle(
        lambda: len(controller.parts.buffer) == STEP * 2 and controller.describe()["sealed_siblings"] > 0
    )
    saved = (await world.snapshot(1)).state
    await world.kill()
    return world, saved


def _switch(world, async_rl):
    """The same run under another sampler; whatever is not said has its default."""
    brief = {"retry_backoff_s": 0.001, "retry_backoff_max_s": 0.002}
    world.change("async_rl", **{**AsyncRlConfig().model_dump(), **brief, **async_rl})


UNSTAMPED = ("weight_fifo", "ready_first", "windowed")
OTHERS = ("in_order", "team_samplers:ShortestFirst", "team_samplers:ReversedSteps")


@pytest.mark.parametrize("saved_by", [*UNSTAMPED, *OTHERS])
async def test_scenario_17_a_sampler_that_cannot_continue_anothers_dispatch_refuses_and_names_both(
    make_world, options, saved_by
):
    world, _ = await _trained_and_killed(make_world, options, saved_by)
    key = "async_rl.custom_sampler" if ":" in saved_by else "async_rl.sampler"
    for name in (*UNSTAMPED, *OTHERS):
        if name == saved_by or {name, saved_by} <= set(UNSTAMPED):
            continue
        _switch(world, options(name, 2))
        message = f"made with sampler '{saved_by}', this run uses '{name}', .*set .*{key} to '{saved_by}'"
        with pytest.raises(RestoreRefused, match=message):
            await world.start()
        assert world.controller.describe()["buffered_groups"] == 0
        assert world.generator.loads == [], "refused before the weights were loaded"
    _switch(world, options(saved_by, 2))
    await world.start()
    assert len(world.controller.parts.buffer) == STEP * 2
    await world.kill()


@pytest.mark.parametrize("saved_by", UNSTAMPED)
@pytest.mark.parametrize("name", UNSTAMPED)
async def test_scenario_17_samplers_without_stamps_continue_each_others_dispatch(make_world, options, saved_by, name):
    world, saved = await _trained_and_killed(make_world, options, saved_by)
    _switch(world, options(name, 2, **({"buffer_capacity": 16} if name == "windowed" else {})))
    world.boot()
    world.generator.held = lambda group_id, index: True
    controller = await world.restore(world.plan())
    assert tuple(controller.parts.buffer.ready()) == saved.buffer
    in_hand = len(saved.buffer) + sum(g.phase == "admitted" for g in saved.ledger)
    as_gated = saved.progress.trainer_version + -(-in_hand // STEP) - 1
    recounted = saved_by == "windowed" and name != "windowed"
    assert controller.parts.sampler.cursor == (as_gated if recounted else saved.progress.sampler_cursor)
    world.generator.release()
    reports = await world.train(2, 6)
    assert {g.group_id for g in saved.buffer} <= {group for report in reports for group in report["group_ids"]}
    await world.kill()


@pytest.mark.parametrize("name", UNSTAMPED)
async def test_scenario_17_a_smaller_window_or_capacity_restores_everything_and_credits_what_it_gives_up(
    make_world, options, name
):
    world, saved = await _trained_and_killed(make_world, options, name)
    _switch(world, options(name, 0, buffer_capacity=STEP))
    controller = await world.start()
    assert len(controller.parts.buffer) == len(saved.buffer) > STEP
    reports = await world.train(2, 3)
    trained = {group for report in reports for group in report["group_ids"]}
    evicted = {e["group_id"] for e in world.trace.of("group_discarded") if e["reason"] == "evicted"}
    buffered = {group.group_id for group in saved.buffer}
    assert buffered <= trained | evicted
    assert evicted >= (set() if name == "ready_first" else buffered), "they were started at version 0"
    assert evicted <= {dropped.prompt.group_id for dropped in controller.parts.state.dropped}
    await world.kill()


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [("algorithm", "num_generations_per_prompt", 3), ("algorithm", "num_prompts_per_step", 2)],
)
async def test_scenario_17_another_group_or_step_size_is_refused_by_name_and_nothing_is_dropped(
    make_world, section, key, value
):
    world = make_world()
    controller = await world.start()
    await controller.train_steps(1, 1)
    await world.settle(lambda: len(controller.parts.buffer) == 8)
    await world.snapshot(1)
    await world.kill()
    before, now = world.config.model_dump()[section][key], value
    world.change(section, **{key: value})
    with pytest.raises(RestoreRefused, match=f"{section}.{key}: saved {before}, now {now}"):
        await world.start()
    assert world.controller.describe()["buffered_groups"] == 0
    world.change(section, **{key: before})
    controller = await world.start()
    assert len(controller.parts.buffer) == 8
    await world.kill()


async def test_reported_d_a_sampler_that_cannot_restore_buffers_refuses_loudly_and_can_generate_them_again(
    make_world, options
):
    world, saved = await _trained_and_killed(make_world, options, "team_samplers:Forgetful")
    with pytest.raises(RestoreRefused, match="can't restore the 8 finished groups .*load_replay_buffer to false"):
        await world.start()
    world.change("checkpointing", load_replay_buffer=False)
    controller = await world.start()
    owed = {group.group_id for group in controller.parts.ledger.groups()}
    assert owed == {group.group_id for group in (*saved.buffer, *saved.ledger)}
    await world.train(2, 9)
    assert owed <= {group for groups in world.history().values() for group in groups}
    await world.kill()


@pytest.mark.parametrize("name", ["in_order", "team_samplers:ReversedSteps"])
async def test_reported_d_ready_groups_of_a_stamping_sampler_are_restored_and_trained_in_their_steps(
    make_world, options, name
):
    world, saved = await _trained_and_killed(make_world, options, name)
    await world.start()
    reports = await world.train(2, 3)
    for version, report in enumerate(reports, start=1):
        assert set(report["group_ids"]) == {g.group_id for g in saved.buffer if g.target_step == version}
    await world.kill()
