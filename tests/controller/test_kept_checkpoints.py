"""Which trainer checkpoints retention keeps: the newest, the best, and never none."""

import asyncio

import pytest

from storage.errors import ConfigurationError, StoreUnavailable


def _fail():
    raise StoreUnavailable("an upload failed")


async def test_scenario_35_the_newest_and_the_best_checkpoints_are_kept(make_world):
    keeping = {"keep": 2, "keep_best": 1, "metric_name": "rewards_mean"}
    world = make_world(checkpointing=keeping, algorithm={"max_steps": 8})
    await world.start()
    rewards = {}
    for step in range(1, 9):
        report = (await world.train(step, step))[0]
        rewards[step] = report["rewards_mean"]
        best = max(rewards, key=lambda s: (rewards[s], s))
        assert _kept(world) == sorted({step, max(step - 1, 1), best})
    await world.kill()


def _kept(world):
    slots = world.bundles._log.read()
    retired = {sequence for slot in slots for sequence in slot.retires}
    live = [s for s in slots if s.kind == "trainer_checkpoint" and s.sequence not in retired]
    for manifest in live:
        assert all(world.store.exists(entry.path) for entry in manifest.files)
    return [manifest.step for manifest in live]


async def test_the_best_can_be_the_lowest(make_world):
    keeping = {"keep": 1, "keep_best": 1, "metric_name": "rewards_mean", "higher_is_better": False}
    world = make_world(checkpointing=keeping, algorithm={"max_steps": 6})
    await world.start()
    rewards = {report["step"]: report["rewards_mean"] for report in await world.train(1, 6)}
    assert _kept(world) == sorted({6, min(rewards, key=lambda step: (rewards[step], -step))})
    await world.kill()


async def test_a_metric_that_steps_do_not_report_ends_the_run_at_its_first_step(make_world):
    world = make_world(checkpointing={"keep_best": 1, "metric_name": "accuracy"})
    controller = await world.start()
    with pytest.raises(
        ConfigurationError, match="metric_name is 'accuracy', but train steps report .*batch_age, .*loss, .*r"
    ):
        await controller.train_steps(1, 1)
    assert controller.state == "failed"
    await world.kill()


async def test_j_retention_leaves_the_only_durable_checkpoint_while_a_newer_one_is_written(make_world):
    """Snapshots are published, and old ones retired, beside a checkpoint that is being written and one that fails."""
    world = make_world(
        checkpointing={"save_period": 2, "async_save": True, "keep": 1},
        algorithm={"max_steps": 9},
        data={"num_prompts": 80},
    )
    controller = await world.start()
    await world.train(1, 3)
    await world.settle(lambda: world.plan().anchor is not None)
    world.trainer.save_gate = asyncio.Event()
    await world.train(4, 5)
    for number in range(1, 5):
        await world.snapshot(number, force=True)
        assert _kept(world) == [2]
    world.trainer.before_save = _fail
    world.trainer.save_gate.set()
    with pytest.raises(StoreUnavailable):
        await controller.settle_saves()
    assert _kept(world) == [2]
    await world.kill()
    controller = await world.start()
    assert controller.parts.state.train_steps == 2
    await world.kill()
