"""The in_order sampler: stamps, selection and cursor, and what a restart makes of them."""

import pytest

from gpu_workers.controller.barrier import Mutation
from gpu_workers.controller.sampler import InOrderSampler, build_sampler
from storage.errors import RestoreRefused
from storage.records import BufferedGroup, PromptRef

LIVE = Mutation("test")


def _group(order: int, target_step: int | None) -> BufferedGroup:
    prompt = PromptRef(order, 0, "ab" * 32)
    return BufferedGroup(prompt, order, target_step, 0, (f"{prompt.group_id}_g0",), (1.0,), 3, ((0, 3),))


def test_a_stamp_is_given_out_once_and_only_within_the_lookahead():
    sampler = InOrderSampler(max_lookahead_versions=1)
    stamps = []
    for version in range(4):
        while sampler.may_admit(version):
            stamps.append(sampler.admit(LIVE))
        assert sampler.cursor == version + 1
    assert stamps == [0, 1, 2, 3, 4]


def test_only_groups_stamped_with_the_version_are_selected_in_dispatch_order():
    sampler = InOrderSampler(max_lookahead_versions=1)
    ready = [_group(order, target_step) for order, target_step in ((0, 2), (1, 3), (2, 2), (3, None), (4, 2))]
    assert [g.order for g in sampler.select(ready, version=2, most=2)] == [0, 2]
    assert [g.order for g in sampler.select(ready, version=3, most=4)] == [1]


def test_what_is_evicted_could_never_be_selected():
    sampler = InOrderSampler(max_lookahead_versions=1)
    ready = [_group(order, target_step) for order, target_step in ((0, 1), (1, 2), (2, 3), (3, None))]
    evicted = sampler.evict(ready, version=2)
    assert [g.order for g in evicted] == [0, 3]
    for version in (2, 3, 4):
        assert not {g.order for g in sampler.select(ready, version=version, most=9)} & {0, 3}


def test_the_buffer_holds_what_the_sampler_needs(configure):
    for lookahead in (0, 1, 2):
        config = configure(async_rl={"max_lookahead_versions": lookahead})
        assert build_sampler(config).required_capacity(4) == config.buffer_capacity == 4 * (lookahead + 1)


def test_scenario_17_another_sampler_or_a_cursor_that_does_not_cover_a_stamp_is_refused_by_name():
    sampler = InOrderSampler(max_lookahead_versions=1)
    with pytest.raises(RestoreRefused, match="made with sampler 'weight_fifo', this run uses 'in_order'"):
        sampler.restore(name="weight_fifo", cursor=5, stamps=[5])
    with pytest.raises(RestoreRefused, match="cursor 4 does not cover target step 5"):
        sampler.restore(name="in_order", cursor=4, stamps=[3, 5])
    assert sampler.cursor == -1
    sampler.restore(name="in_order", cursor=6, stamps=[3, 5])
    assert sampler.cursor == 6


@pytest.mark.parametrize("lookahead", [0, 1, 2])
@pytest.mark.parametrize("unfinished", ["none", "some", "all"])
async def test_scenario_15_ready_groups_survive_a_restart_and_unfinished_ones_are_owned(
    make_world, lookahead, unfinished
):
    world = make_world(async_rl={"max_lookahead_versions": lookahead}, algorithm={"max_steps": 4})
    world.boot()
    first = world.passed_by(4)
    held = {"none": set(), "some": set(first[1::2]), "all": set(first)}[unfinished]
    world.generator.held = lambda group_id, index: group_id in held
    controller = await world.restore(world.plan())
    await world.settle(lambda: len(controller.parts.buffer) == 4 * (lookahead + 1) - len(held))
    saved = await world.snapshot(1)
    await world.kill()

    world.boot()
    world.generator.held = lambda group_id, index: True
    controller = await world.restore(world.plan())
    assert tuple(controller.parts.buffer.ready()) == saved.state.buffer
    stamps = {g.group_id: g.target_step for g in saved.state.ledger}
    assert {g.group_id: g.target_step for g in controller.parts.ledger.groups()} == stamps
    before = len(world.store.calls)
    await world.snapshot(1)
    written = [path for operation, path in world.store.calls[before:] if operation == "write" and "/parts/" in path]
    assert written == []
    world.generator.release()
    reports = await world.train(1, 2)
    assert reports[0]["group_ids"] == first
    await world.kill()


async def test_scenario_16_an_empty_buffer_and_a_batch_with_a_hole_round_trip(make_world, data_failure):
    world = make_world(async_rl={"on_dropped_prompt": "shrink", "max_data_failures": 0})
    controller = await world.start()
    await world.settle(lambda: len(controller.parts.buffer) == 8)
    await world.kill()  # nothing was saved

    world.boot()
    hole = world.passed_by(8)[2]
    world.generator.failures[f"{hole}_g0"] = [data_failure]
    empty = await world.controller.restore(world.plan())
    assert empty is None
    world.lives.append((0, world.trace))
    controller = world.controller
    await world.settle(lambda: len(controller.parts.buffer) == 7)
    saved = await world.snapshot(1)
    await world.kill()
    controller = await world.start()
    assert tuple(controller.parts.buffer.ready()) == saved.state.buffer
    reports = await world.train(1, 2)
    assert [len(r["group_ids"]) for r in reports] == [3, 4]
    assert hole not in world.generator.generated
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
