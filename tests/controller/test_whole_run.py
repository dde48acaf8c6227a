"""A whole run on fakes: trained to the end, killed and resumed, and compared with a run that never stopped."""

from collections import Counter


async def _hashes(world):
    reports = await world.controller.train_steps(1, world.config.algorithm.max_steps)
    return [(r["step"], r["rollouts_sha256"], r["weights_sha256"]) for r in reports if "rollouts_sha256" in r]


async def test_a_run_trains_every_step_once(make_world):
    world = make_world()
    controller = await world.start()
    reports = await controller.train_steps(1, 3)
    assert [r["step"] for r in reports] == [1, 2, 3]
    pairs = Counter(g for r in reports for g in r["group_ids"])
    assert len(pairs) == 12
    assert set(pairs.values()) == {1}
    await world.kill()


async def test_a_killed_run_ends_with_the_same_hashes_at_lookahead_zero(make_world):
    sections = {"async_rl": {"max_lookahead_versions": 0}, "algorithm": {"max_steps": 6}}
    whole = make_world(**sections)
    await whole.start()
    expected = await _hashes(whole)
    await whole.kill()

    world = make_world(**sections)
    controller = await world.start()
    generator = world.generator
    generator.held = lambda group_id, index: index == 1 and generator.version == 2
    await controller.train_steps(1, 2)
    await world.settle(lambda: controller.describe()["sealed_siblings"] >= 2)
    outcome = await controller.attempt_snapshot(1)
    assert outcome.outcome == "completed"
    await world.kill()

    controller = await world.start()
    assert world.trace.of("checkpoint_restored")[0]["siblings_reused"] >= 2
    reports = await controller.train_steps(3, 6)
    assert [(r["step"], r["rollouts_sha256"], r["weights_sha256"]) for r in reports] == expected[2:]
    await world.kill()
