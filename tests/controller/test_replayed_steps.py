"""Snapshots between trainer checkpoints: recorded batches are trained again, and nothing of them is generated again."""

import asyncio
import random

import pytest

from gpu_workers.controller.ports import Failure
from storage.errors import InfrastructureFailure

DATA = Failure(infrastructure=False, message="the answer can't be scored")


def _hashes(world):
    return {step: (e["group_ids"], e["rollouts_sha256"], e["weights_sha256"]) for step, e in world.committed().items()}


async def _killed_at(make_world, steps, **sections):
    """`steps` steps are trained, a snapshot holds what was in hand then, the run is dead."""
    usual = {"algorithm": {"max_steps": 9}, "data": {"num_prompts": 80}, "checkpointing": {"save_period": 5}}
    world = make_world(**{**usual, **sections})
    controller = await world.start()
    await world.train(1, steps)
    await world.settle(lambda: len(controller.parts.buffer) == 8 and len(controller.parts.ledger) == 4)
    bundle = await world.snapshot(1)
    await world.kill()
    return world, bundle


async def _uninterrupted(make_world, steps, **sections):
    whole = make_world(**{"algorithm": {"max_steps": 9}, "checkpointing": {"save_period": 5}, **sections})
    controller = await whole.start()
    await controller.train_steps(1, steps)
    await whole.kill()
    return whole


async def test_a_snapshot_between_checkpoints_holds_the_batches_trained_since_the_durable_one(make_world):
    world, bundle = await _killed_at(make_world, 7)
    manifest, state = bundle.manifest, bundle.state
    assert (manifest.anchor.kind, manifest.anchor.step, manifest.step) == ("checkpoint", 5, 7)
    assert (state.model_step, state.progress.train_steps) == (5, 7)
    recorded = [(t.step, t.position, t.group.group_id) for t in state.trained]
    assert recorded == [(step, place, group) for step in (6, 7) for place, group in enumerate(world.history()[step])]
    assert world.trace.of("snapshot_attempt")[0]["recorded_steps"] == 2
    assert world.plan().target == manifest.sequence


async def test_a_snapshot_before_the_first_checkpoint_stands_on_the_initial_model(make_world):
    world, bundle = await _killed_at(make_world, 3)
    assert (bundle.manifest.anchor.kind, bundle.state.model_step, bundle.manifest.step) == ("bootstrap", 0, 3)
    controller = await world.start()
    assert (controller.parts.state.train_steps, world.trainer.weights) == (0, "initial")
    assert [r["replayed"] for r in await world.train(1, 4)] == [True, True, True, False]
    await world.kill()


async def test_recorded_batches_are_trained_again_without_generating_anything(make_world):
    world, bundle = await _killed_at(make_world, 7)
    before, weights = _hashes(world), world.trainer.weights
    controller = await world.start()
    facts = world.trace.of("checkpoint_restored")[0]
    assert (facts["step"], facts["model_step"], facts["steps_to_replay"]) == (7, 5, 2)
    assert (controller.parts.state.train_steps, controller.describe()["steps_to_replay"]) == (5, 2)
    assert world.trainer.weights == before[5][2]
    reports = await world.train(6, 7)
    assert [report["replayed"] for report in reports] == [True, True]
    assert (_hashes(world), world.trainer.weights) == (before, weights)
    assert world.generator.loads == [5, 6, 7]
    assert await controller.train_steps(6, 7) == reports, "asked for again, they are read again"
    assert len(world.trainer.trained) == 2
    assert not controller.describe()["steps_to_replay"]
    await world.train(8, 9)
    done = {f"{t.group.group_id}_g{i}" for t in bundle.state.trained for i in range(2)}
    assert not set(world.generator.generated) & done
    audit = world.audit()
    assert (audit.problems, audit.steps_rolled_back, audit.pairs_trained) == ([], 2, 9 * 4 * 2)
    await world.kill()


async def test_nothing_is_dispatched_before_the_generators_hold_the_weights_of_the_cut(make_world):
    world = make_world(algorithm={"max_steps": 9}, data={"num_prompts": 80}, checkpointing={"save_period": 5})
    world.boot()
    late = set(world.passed_by(80)) - set(world.passed_by(32))
    world.generator.held = lambda group_id, index: index == 1 and group_id in late
    controller = await world.restore(world.plan())
    await world.train(1, 7)
    await world.settle(lambda: controller.describe()["sealed_siblings"] > 0)
    bundle = await world.snapshot(1)
    await world.kill()
    controller = await world.start()
    for step in (6, 7):
        for _ in range(50):
            await asyncio.sleep(0)
        assert (world.generator.orders, world.generator.version) == ([], step - 1)
        await world.train(step, step)
    unfinished = {g.group_id for g in bundle.state.ledger if g.target_step is not None}
    await world.settle(lambda: unfinished == {order.group_id for order in world.generator.orders} & unfinished)
    assert len(unfinished) >= 4
    sealed = [e for e in world.trace.of("weight_sync") if e["version"] == 7]
    assert world.trace.events.index(sealed[0]) < world.trace.events.index(world.trace.of("attempt_dispatched")[0])
    await world.kill()


async def test_during_a_replay_no_snapshot_is_taken_since_it_would_be_the_restored_one_again(make_world):
    world, bundle = await _killed_at(make_world, 7)
    controller = await world.start()
    changes = world.store.changes()
    for step in (6, 7):
        outcome = await controller.attempt_snapshot(step, force=True)
        assert (outcome.outcome, outcome.reason) == ("skipped", "replaying_recorded_steps")
        assert (world.store.changes(), world.plan().target) == (changes, bundle.manifest.sequence)
        await world.train(step, step)
    again = await world.snapshot(8, force=True)
    assert (again.state.model_step, again.state.progress.train_steps) == (5, 7)
    assert again.state.trained == bundle.state.trained
    assert {e.path for e in bundle.manifest.files if e.role == "part"} <= {e.path for e in again.manifest.files}
    await world.kill()


async def test_m_a_prompt_that_crashes_the_run_right_after_each_replay_is_given_up_too(make_world):
    """What is saved during a replay would look like progress, and the attempt that crashes would never be counted."""
    world = make_world(
        algorithm={"max_steps": 9},
        checkpointing={"save_period": 9},
        async_rl={"max_lookahead_versions": 0, "max_interrupted_attempts": 2, "spare_prompts": 0},
    )
    world.boot()
    late, crasher = set(world.passed_by(40)[8:]), world.passed_by(9)[8]
    world.generator.held = lambda group_id, index: group_id in late
    await world.restore(world.plan())
    await world.train(1, 2)
    await world.settle(lambda: _ran(world, crasher))
    await world.snapshot(1, force=True)
    await world.kill()
    for life in range(9):
        world.boot()
        world.generator.held = lambda group_id, index: group_id == crasher
        await world.restore(world.plan())
        for step in (1, 2):
            await world.controller.attempt_snapshot(step, force=True)
            await world.train(step, step)
        await world.settle(lambda: _ran(world, crasher) or bool(world.controller.parts.state.dropped))
        if world.controller.parts.state.dropped:
            break
        if life % 2:
            await world.settle(lambda: any(e["outcome"] == "completed" for e in world.trace.of("snapshot_attempt")))
        await world.kill()
    assert [dropped.prompt.group_id for dropped in world.controller.parts.state.dropped] == [crasher]
    await world.kill()


def _ran(world, group_id):
    return any(e["rollout_id"].startswith(f"{group_id}_") for e in world.trace.of("attempt_dispatched"))


async def test_a_replay_that_is_killed_again_and_again_loses_nothing(make_world):
    whole = await _uninterrupted(make_world, 9, async_rl={"max_lookahead_versions": 0})
    world = make_world(
        algorithm={"max_steps": 9}, checkpointing={"save_period": 5}, async_rl={"max_lookahead_versions": 0}
    )
    controller = await world.start()
    await controller.train_steps(1, 8)
    await world.settle(lambda: controller.parts.state.train_steps == 8)
    await world.snapshot(1, force=True)
    await world.kill()
    for replayed in (1, 0, 2):
        await world.start()
        if replayed:
            await world.train(6, 5 + replayed)
        await world.kill()
        assert world.audit().problems == []
    controller = await world.start()
    await world.train(6, 9)
    assert (_hashes(world), world.trainer.weights) == (_hashes(whole), whole.trainer.weights)
    audit = world.audit()
    assert (audit.problems, audit.steps_rolled_back) == ([], 3 + 1 + 0 + 2)
    await world.kill()


async def test_a_trainer_checkpoint_in_the_middle_of_a_replay_keeps_the_batches_that_are_still_to_come(make_world):
    world, bundle = await _killed_at(make_world, 9, algorithm={"max_steps": 12}, checkpointing={"save_period": 10})
    hashes = _hashes(world)
    world.change("checkpointing", save_period=4, keep=1)
    controller = await world.start()
    await world.train(1, 5)
    checkpoint = world.bundles.read(world.plan().anchor)
    assert (checkpoint.manifest.step, checkpoint.state.model_step, checkpoint.state.progress.train_steps) == (4, 4, 9)
    assert checkpoint.state.buffer == bundle.state.buffer
    assert {t.step for t in checkpoint.state.trained} == {5, 6, 7, 8, 9}
    assert len(controller.parts.state.recorded) == 5
    await world.kill()
    controller = await world.start()
    assert (controller.parts.state.train_steps, world.trainer.weights) == (4, hashes[4][2])
    reports = await world.train(5, 9)
    assert all(report["replayed"] for report in reports)
    assert _hashes(world) == hashes
    assert world.generator.generated == []
    await world.train(10, 12)
    assert world.audit().problems == []
    await world.kill()


async def test_a_checkpoint_without_the_data_plane_keeps_the_rows_of_recorded_steps_only(make_world):
    saving = {"save_period": 10, "save_data_plane": False}
    world, bundle = await _killed_at(make_world, 6, algorithm={"max_steps": 12}, checkpointing=saving)
    hashes = _hashes(world)
    world.change("checkpointing", save_period=3, restore_mode="latest")
    await world.start()
    await world.train(1, 3)
    world.change("checkpointing", save_period=3, restore_mode="trainer_checkpoint")
    await world.kill()
    saved = world.bundles.read(world.plan().target)
    assert saved.state.buffer == ()
    assert {t.step for t in saved.state.trained} == {4, 5, 6}
    assert set(saved.rows) == {row for t in saved.state.trained for row in t.group.row_ids}
    owed = {g.group_id for g in saved.state.ledger}
    assert owed >= {g.group_id for g in bundle.state.buffer}
    await world.start()
    await world.train(4, 8)
    assert {step: _hashes(world)[step] for step in hashes} == hashes
    assert world.audit().problems == []
    await world.kill()


async def test_recorded_batches_are_trained_again_also_when_the_buffer_is_not_loaded(make_world):
    world, bundle = await _killed_at(make_world, 7)
    hashes = _hashes(world)
    world.change("checkpointing", load_replay_buffer=False)
    controller = await world.start()
    assert len(controller.parts.buffer) == 0
    await world.train(6, 7)
    assert _hashes(world) == hashes
    await world.train(8, 9)
    again = {f"{g.group_id}_g{i}" for g in bundle.state.buffer for i in range(2)}
    assert again <= set(world.generator.generated)
    assert world.audit().problems == []
    await world.kill()


async def test_rows_of_trained_batches_stay_until_a_checkpoint_of_their_step_is_durable(make_world):
    world = make_world(algorithm={"max_steps": 5}, checkpointing={"save_period": 3})
    controller = await world.start()
    kept = []
    for step in range(1, 6):
        await world.train(step, step)
        kept.append(len(controller.parts.state.recorded))
    assert kept == [1, 2, 0, 1, 0]
    await world.kill()


@pytest.mark.parametrize("place", ["before_microbatch", "before_finish"])
async def test_a_failure_in_a_replayed_step_is_like_one_in_any_step(make_world, place):
    world, _ = await _killed_at(make_world, 7)
    hashes = _hashes(world)
    controller = await world.start()
    errors = [InfrastructureFailure("a rank died")]

    def strike():
        if errors:
            raise errors.pop()

    setattr(world.trainer, place, strike)
    with pytest.raises(Exception, match="a rank died"):
        await controller.train_steps(6, 6)
    if place == "before_finish":  # inside the commit window: the store decides
        assert controller.state == "failed"
        await world.kill()
        controller = await world.start()
    world.check()
    await world.train(6, 7)
    assert _hashes(world) == hashes
    await world.kill()


async def test_a_run_that_is_to_end_before_its_recorded_steps_ends_with_a_checkpoint_and_goes_on_later(make_world):
    world, _ = await _killed_at(make_world, 4, algorithm={"max_steps": 9}, checkpointing={"save_period": 9})
    hashes = _hashes(world)
    world.change("algorithm", max_steps=2)
    await world.start()
    await world.train(1, 2)
    assert [e["step"] for e in world.trace.of("checkpoint_published")] == [2]
    await world.kill()
    world.change("algorithm", max_steps=9)
    await world.start()
    await world.train(3, 9)
    assert {step: _hashes(world)[step] for step in hashes} == hashes
    assert world.audit().problems == []
    await world.kill()


async def test_mode_trainer_checkpoint_goes_back_to_the_checkpoint_and_generates_anew(make_world):
    world, _ = await _killed_at(make_world, 7)
    world.change("checkpointing", restore_mode="trainer_checkpoint")
    controller = await world.start()
    assert (controller.parts.state.train_steps, len(controller.parts.state.recorded)) == (5, 0)
    assert not any(report["replayed"] for report in await world.train(6, 9))
    audit = world.audit()
    assert (audit.problems, audit.steps_rolled_back) == ([], 2)
    await world.kill()


async def test_the_audit_finds_a_recorded_batch_that_was_replaced(make_world):
    world, _ = await _killed_at(make_world, 7)
    await world.start()
    await world.train(6, 9)
    event = next(e for e in world.trace.of("train_step") if e["step"] == 7)
    event["rollouts_sha256"] = "0" * 64
    assert world.audit().problems == ["1 recorded batches replaced by others: 7"]
    await world.kill()


@pytest.mark.parametrize("save_period", [3, 5, 10])
@pytest.mark.parametrize("seed", range(3))
async def test_killed_at_any_moment_a_run_ends_with_the_weights_of_one_that_was_not(make_world, save_period, seed):
    """Lookahead 0. Kills fall between and inside steps, replays and saves, with snapshots all the time."""
    chance = random.Random(100 * save_period + seed)
    sections = {
        "algorithm": {"num_prompts_per_step": 2, "max_steps": 14},
        "data": {"num_prompts": 28},
        "checkpointing": {"save_period": save_period},
        "async_rl": {"max_lookahead_versions": 0},
    }
    whole = await _uninterrupted(make_world, 14, **sections)
    world = make_world(**sections)
    replayed = 0
    for _ in range(5):
        controller = await world.start()
        recorded = {row for row in controller.parts.state.recorded.rows(up_to=99)}
        first = controller.parts.state.train_steps + 1
        work = asyncio.create_task(controller.train_steps(first, min(first + chance.randrange(1, 7), 14)))
        for number in range(chance.randrange(4, 16)):
            await controller.attempt_snapshot(number, force=True)
            for _ in range(chance.randrange(60)):
                await asyncio.sleep(0)
        await world.kill()
        await asyncio.gather(work, return_exceptions=True)
        replayed += sum(event["replayed"] for event in world.trace.of("train_step"))
        assert not recorded & set(world.generator.generated), "a recorded batch was generated again"
        assert world.audit().problems == []
    controller = await world.start()
    await world.train(controller.parts.state.train_steps + 1, 14)
    replayed += sum(event["replayed"] for event in world.trace.of("train_step"))
    assert (_hashes(world), world.trainer.weights) == (_hashes(whole), whole.trainer.weights)
    audit = world.audit()
    assert (audit.problems, audit.pairs_trained) == ([], 14 * 2 * 2)
    assert audit.steps_rolled_back >= replayed
    await world.kill()
