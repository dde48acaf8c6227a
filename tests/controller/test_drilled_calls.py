"""What a controller saves of running calls is restored whole by a drill, and found again by the audit."""

import asyncio

from tasks.restore_drill import Drill
from tests.controller.test_prefix import FIRST_STEP, SECTIONS, running_with


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


async def test_the_audit_finds_the_saved_tokens_of_each_call_again_in_its_result(make_world):
    world = make_world(**SECTIONS)
    await running_with(world, 2)
    saved = {call.rollout_id for call in (await world.snapshot(1)).state.partial_calls}
    await world.kill()
    controller = await world.start()
    await world.settle(lambda: controller.describe()["buffered_groups"] == len(FIRST_STEP))
    await world.snapshot(1, force=True)
    await world.kill()
    audit = world.audit()
    assert (audit.problems, audit.calls_compared) == ([], len(saved))
