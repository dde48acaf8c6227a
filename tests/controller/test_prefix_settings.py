"""Recovery level `prefix` under other settings of checkpoints, and after the level was lowered."""

from collections.abc import Callable
from typing import Any

import pytest

FIRST_STEP = ("e0-p0_", "e0-p1_", "e0-p2_", "e0-p3_")


@pytest.fixture
def worlds(make_world: Callable[..., Any]) -> Callable[..., Any]:
    """Worlds at level prefix with lookahead 1 and prompts in the order of their numbers."""
    sections: dict[str, Any] = {
        "rollout_recovery": {"target_level": "prefix"},
        "async_rl": {"max_lookahead_versions": 1},
        "data": {"num_prompts": 40, "shuffle": False},
    }
    return lambda **others: make_world(**{**sections, **others})


async def running_after_a_step(world: Any) -> Any:
    """A run that has trained a step and whose calls of the next ones are in their middle, in a snapshot."""
    world.boot()
    world.generator.held = lambda group_id, index: not f"{group_id}_".startswith(FIRST_STEP)
    world.generator.had = lambda rollout: 1
    await world.restore(world.plan())
    await world.train(1, 1)
    await world.settle(lambda: len(world.generator.calls) >= 8 + 4)
    world.generator.had = lambda rollout: 2
    bundle = await world.snapshot(1)
    assert {call.num_tokens for call in bundle.state.partial_calls} == {2}
    return bundle


async def test_groups_keep_level_prefix_when_the_configuration_asks_for_less_by_now(worlds):
    world = worlds()
    before = await running_after_a_step(world)
    await world.kill()
    world.change("rollout_recovery", target_level="sibling")
    world.boot()
    world.generator.held = lambda group_id, index: True
    world.generator.had = lambda rollout: 3
    await world.restore(world.plan())
    await world.settle(lambda: len(world.generator.calls) >= 4)
    after = await world.snapshot(2)
    begun = {call.rollout_id for call in before.state.partial_calls}
    assert {call.rollout_id for call in after.state.partial_calls} <= begun
    assert {call.num_tokens for call in after.state.partial_calls} >= {3}
    world.generator.release()
    await world.train(2, 3)
    assert not world.audit().problems


@pytest.mark.parametrize(
    "saving",
    [
        {"load_replay_buffer": False},
        {"save_data_plane": False},
        {"save_data_plane": False, "restore_mode": "trainer_checkpoint"},
        {"restore_mode": "trainer_checkpoint"},
        {"save_period": 3},
        {"save_period": 2, "async_save": True, "load_replay_buffer": False},
    ],
)
async def test_however_checkpoints_are_saved_and_loaded_calls_go_on_and_the_books_are_right(worlds, saving):
    world = worlds(checkpointing=saving, algorithm={"max_steps": 4})
    await running_after_a_step(world)
    await world.kill()
    await world.start()
    await world.train(world.controller.parts.state.train_steps + 1, 3)
    await world.kill()
    await world.start()
    await world.train(world.controller.parts.state.train_steps + 1, 4)
    assert not world.audit().problems
