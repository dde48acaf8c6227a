"""A fork is a run like any other: it restores from what it was made of, and trains on."""

import pytest

from storage.errors import ConfigurationError
from storage.forking import fork
from storage.layout import RunLayout


async def _two_snapshots(make_world):
    """A dead run with save_period 2: one snapshot before step 3 and one after it, each with unfinished groups."""
    world = make_world(checkpointing={"save_period": 2}, algorithm={"max_steps": 8}, data={"num_prompts": 80})
    world.boot()
    half = set(world.passed_by(80)) - set(world.passed_by(16))
    world.generator.held = lambda group_id, index: index == 1 and group_id in half
    controller = await world.restore(world.plan())
    await world.train(1, 2)
    await world.settle(lambda: controller.describe()["sealed_siblings"] > 0)
    early = await world.snapshot(1, force=True)
    await controller.train_steps(3, 3)
    await world.settle(lambda: controller.describe()["sealed_siblings"] > 0)
    late = await world.snapshot(2, force=True)
    await world.kill()
    assert world.audit().problems == []
    return world, early, late


@pytest.mark.parametrize("which", ["early", "late"])
async def test_a_fork_restores_what_its_snapshot_held_and_trains_on(make_world, which):
    world, early, late = await _two_snapshots(make_world)
    source = {"early": early, "late": late}[which]
    before = {path: world.store.read(path) for path in world.store.list("run")}
    made = fork(world.store, RunLayout("run"), source.manifest.sequence, "second")
    world.config = world.config.model_copy(update={"name": "second"})
    assert world.plan() == type(world.plan())(made.target.sequence, made.anchor.sequence)
    world.boot()
    world.generator.held = lambda group_id, index: True
    controller = await world.restore(world.plan())
    assert tuple(controller.parts.buffer.ready()) == source.state.buffer
    assert controller.parts.source.position == source.state.progress.source
    facts = world.trace.of("checkpoint_restored")[0]
    assert facts["siblings_reused"] == source.manifest.counts["reusable_siblings"] > 0
    world.generator.release()
    reports = await world.train(3, 6)
    assert [len(report["group_ids"]) for report in reports] == [4] * 4
    await world.snapshot(1, force=True)
    await world.kill()
    world.lives = world.lives[-1:]
    audit = world.audit()
    assert audit.problems == []
    assert audit.owners["trained"] >= 24
    assert {path: world.store.read(path) for path in before} == before


async def test_a_fork_of_the_initial_model_and_one_of_a_trainer_checkpoint_train_on(make_world):
    world = make_world(algorithm={"max_steps": 6})
    controller = await world.start()
    await world.settle(lambda: len(controller.parts.buffer) > 0)
    initial = await world.snapshot(1, force=True)
    await world.train(1, 1)
    checkpoint = world.plan().anchor
    await world.kill()
    world.audit()
    for name, sequence, step in (("from-start", initial.manifest.sequence, 0), ("from-one", checkpoint, 1)):
        made = fork(world.store, RunLayout("run"), sequence, name)
        assert made.target.step == step
        world.config = world.config.model_copy(update={"name": name})
        lives = list(world.lives)
        await world.start()
        assert world.controller.parts.state.train_steps == step
        await world.train(step + 1, step + 2)
        await world.kill()
        world.lives = world.lives[-1:]
        assert world.audit().problems == []
        world.lives = lives


async def test_a_fork_that_was_made_before_anything_had_happened_is_accounted_for(make_world):
    world = make_world(algorithm={"max_steps": 6})
    world.boot()
    world.generator.held = lambda group_id, index: True
    await world.restore(world.plan())
    await world.settle(lambda: world.controller.describe()["running_groups"] > 0)
    bundle = await world.snapshot(1, force=True)
    assert bundle.state.ledger
    assert not bundle.state.buffer
    await world.kill()
    fork(world.store, RunLayout("run"), bundle.manifest.sequence, "second")
    for path in world.store.list(RunLayout("second").traces):
        world.store.delete(path)  # as of attempts that were not yet dispatched at the cut
    world.config = world.config.model_copy(update={"name": "second"})
    world.lives = []
    await world.start()
    await world.train(1, 3)
    await world.kill()
    assert world.audit().problems == []


async def test_a_name_that_is_taken_is_refused_and_nothing_is_written(make_world):
    world, early, _ = await _two_snapshots(make_world)
    fork(world.store, RunLayout("run"), early.manifest.sequence, "second")
    changes = len(world.store.changes())
    for taken in ("run", "second"):
        with pytest.raises(ConfigurationError, match=f"holds a run '{taken}' already: choose another name"):
            fork(world.store, RunLayout("run"), early.manifest.sequence, taken)
    assert len(world.store.changes()) == changes


async def test_a_fork_goes_on_within_the_responses_that_its_snapshot_held(make_world):
    world = make_world(rollout_recovery={"target_level": "prefix"}, algorithm={"max_steps": 6})
    world.boot()
    first = set(world.passed_by(4))
    world.generator.held = lambda group_id, index: group_id not in first
    world.generator.had = lambda rollout: 2
    await world.restore(world.plan())
    await world.train(1, 1)
    await world.settle(lambda: sum(not rollout.startswith(tuple(first)) for rollout in world.generator.calls) >= 4)
    source = await world.snapshot(1, force=True)
    assert source.state.partial_calls
    await world.kill()
    world.audit()
    fork(world.store, RunLayout("run"), source.manifest.sequence, "second")
    world.config = world.config.model_copy(update={"name": "second"})
    world.boot()
    world.generator.held = lambda group_id, index: True
    world.generator.had = lambda rollout: 3
    await world.restore(world.plan())
    (restored,) = world.trace.of("checkpoint_restored")
    assert restored["calls_continued"] == len(source.state.partial_calls)
    await world.settle(lambda: bool(world.generator.calls))
    own = await world.snapshot(1, force=True)
    assert {call.num_tokens for call in own.state.partial_calls} <= {2, 3}
    await world.kill()
    lives, world.lives = world.lives, world.lives[-1:]
    assert world.audit().problems == []
    world.lives = lives
    fork(world.store, RunLayout("second"), own.manifest.sequence, "third")
    world.config = world.config.model_copy(update={"name": "third"})
    await world.start()
    await world.train(2, 4)
    await world.kill()
    world.lives = world.lives[-1:]
    audit = world.audit()
    assert audit.problems == []
    assert audit.owners["trained"] >= 16
