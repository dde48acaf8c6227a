"""Every combination of restore mode, kept or discarded buffer and changed keys restores whole or is refused by name."""

import pytest

from storage.errors import RestoreRefused

# What may be changed between two lives: (section, its new values, what a refusal names; "" restores).
CHANGES = {
    "nothing": ({}, ""),
    "a wider window": ({"async_rl": {"max_lookahead_versions": 3}}, ""),
    "no lookahead": ({"async_rl": {"max_lookahead_versions": 0}}, ""),
    "more capacity": ({"async_rl": {"buffer_capacity": 40}}, ""),
    "more generators": ({"generation": {"num_engines": 3}}, ""),
    "one group in flight": ({"generation": {"max_inflight_groups": 1}}, ""),
    "another recovery level": ({"rollout_recovery": {"target_level": "prompt_group"}}, ""),
    "shrinking steps": ({"async_rl": {"on_dropped_prompt": "shrink"}}, ""),
    "another learning rate": ({"algorithm": {"learning_rate": 0.01}}, ""),
    "a sampler without stamps": (
        {"async_rl": {"sampler": "weight_fifo", "max_lookahead_versions": 1}},
        "in_order.*weight_fifo",
    ),
    "another group size": ({"algorithm": {"num_generations_per_prompt": 3}}, "algorithm.num_generations_per_prompt"),
    "another step size": ({"algorithm": {"num_prompts_per_step": 2}}, "algorithm.num_prompts_per_step"),
    "another order of prompts": ({"data": {"seed": 99}}, "data.seed"),
}


@pytest.mark.parametrize("mode", ["latest", "trainer_checkpoint"])
@pytest.mark.parametrize("kept", [True, False], ids=["buffer kept", "buffer discarded"])
@pytest.mark.parametrize("change", CHANGES)
async def test_a_changed_run_is_restored_whole_or_refused_by_the_name_of_the_key(make_world, mode, kept, change):
    sections, refusal = CHANGES[change]
    world = make_world(async_rl={"spare_prompts": 0})
    world.boot()
    held = world.passed_by(20)[6:]
    world.generator.held = lambda group_id, index: group_id in held and index == 1
    controller = await world.restore(world.plan())
    await world.train(1, 1)
    await world.settle(lambda: len(controller.parts.buffer) == 2 and controller.describe()["sealed_siblings"] == 6)
    await world.snapshot(1)
    await world.kill()
    files = set(world.store.list(world.config.name))

    world.change("checkpointing", restore_mode=mode, load_replay_buffer=kept)
    for section, values in sections.items():
        world.change(section, **values)
    world.boot()
    plan = world.plan()
    if refusal:
        with pytest.raises(RestoreRefused, match=refusal):
            await world.controller.restore(plan)
        assert world.controller.state == "empty"
        assert files <= set(world.store.list(world.config.name))
        return
    saved = world.bundles.read(plan.target).state
    controller = await world.restore(plan)
    assert world.bundles.manifest(plan.target).kind == (
        "rollout_snapshot" if mode == "latest" else "trainer_checkpoint"
    )
    buffered = [group.group_id for group in controller.parts.buffer.ready()]
    assert buffered == ([group.group_id for group in saved.buffer] if kept else [])
    owed = {group.group_id for group in (*saved.ledger, *(() if kept else saved.buffer))}
    assert {order.group_id for order in world.generator.orders} <= owed
    await world.train(2, 3)
    trained = [group_id for step in (1, 2, 3) for group_id in world.history()[step]]
    assert trained == world.passed_by(12)
    assert not world.audit().problems
    await world.kill()


@pytest.mark.parametrize(
    ("section", "values", "refusal"),
    [
        ("generation", {"max_inflight_groups": 2}, ""),
        ("rollout_checkpointing", {"interval_s": 60.0}, ""),
        ("algorithm", {"learning_rate": 0.01}, "initial model of another configuration: algorithm.learning_rate"),
        ("generation", {"temperature": 0.5}, "generation.temperature: saved 1.0, now 0.5"),
    ],
)
async def test_scenario_42_the_bootstrap_identity_ignores_operational_keys_and_names_what_changed(
    make_world, section, values, refusal
):
    world = make_world()
    await world.start()
    await world.snapshot(1, force=True)
    await world.kill()
    world.change(section, **values)
    if refusal:
        with pytest.raises(RestoreRefused, match=refusal):
            await world.start()
        return
    await world.start()
    await world.train(1, 3)
    assert not world.audit().problems
    await world.kill()
