"""What a controller saves of running calls is restored whole by a drill, snapshot after snapshot."""

import asyncio

from tasks.restore_drill import Drill
from tests.controller.test_prefix import SECTIONS, running_with


async def test_a_drill_restores_every_snapshot_of_growing_calls(make_world):
    world = make_world(**SECTIONS)
    await running_with(world, 1)
    drill = Drill(lambda data: world.dataset)
    for number, tokens in enumerate((1, 2, 3), start=1):
        world.generator.had = lambda rollout, tokens=tokens: tokens
        bundle = await world.snapshot(number, force=True)
        found = await asyncio.to_thread(drill.restore, bundle, None)
        assert (found.tried, found.problem) == (True, "")
        calls = bundle.state.partial_calls
        assert {(len(call.chunks), call.num_tokens) for call in calls} == {(number, tokens)}
    await world.kill()
