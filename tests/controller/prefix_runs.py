"""Runs at level `prefix` whose calls stop in their middle, as the tests of that level need them."""

from typing import Any

SECTIONS: dict[str, Any] = {
    "rollout_recovery": {"target_level": "prefix"},
    "async_rl": {"max_lookahead_versions": 0},
    "data": {"num_prompts": 40, "shuffle": False},
}


async def uninterrupted(world: Any, steps: int = 3) -> dict[int, str]:
    await world.start()
    await world.train(1, steps)
    return trained_rows(world)


def trained_rows(world: Any) -> dict[int, str]:
    return {step: event["rollouts_sha256"] for step, event in world.committed().items()}


async def running_with(world: Any, tokens: int) -> None:
    """A started run all of whose calls have so many tokens and do not get any further."""
    world.boot()
    world.generator.held = lambda group_id, index: True
    world.generator.had = lambda rollout: tokens
    await world.restore(world.plan())
    await world.settle(lambda: len(world.generator.orders) == 4 and len(world.generator.calls) >= 4)
