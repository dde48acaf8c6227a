"""Rollout snapshots and trainer checkpoints: when they are taken, what they stand on, and how they fail."""

import asyncio

import pytest

from gpu_workers.controller.bundle_publisher import BundlePublisher
from gpu_workers.controller.checkpoint_schedule import Trigger
from storage.errors import BrokenInvariant, Fenced, StoreOutcomeUnknown, StoreUnavailable


def _down(what="the store does not answer"):
    return StoreUnavailable(what)


async def _bundles(world):
    slots = world.bundles._log.read()
    return [slot for slot in slots if slot.kind in ("rollout_snapshot", "trainer_checkpoint")]


async def test_scenario_32_a_snapshot_before_the_first_step_has_no_model_payload(make_world):
    world = make_world()
    controller = await world.start()
    await world.settle(lambda: len(controller.parts.buffer) == 8)
    manifest = (await world.snapshot(1)).manifest
    assert (manifest.anchor.kind, manifest.anchor.step, manifest.anchor.sequence) == ("bootstrap", 0, None)
    assert manifest.anchor.identity == manifest.identity
    assert {entry.role for entry in manifest.files} == {"part", "state"}
    assert world.store.list("run/checkpoints") == []
    await world.kill()
    controller = await world.start()
    assert world.trainer.weights == "initial"
    assert len(controller.parts.buffer) == 8
    await world.kill()


async def test_scenario_33_unchanged_state_is_not_saved_twice_unless_forced(make_world):
    world = make_world()
    controller = await world.start()
    await world.settle(lambda: len(controller.parts.buffer) == 8 and len(controller.parts.ledger) == 4)
    assert (await controller.attempt_snapshot(1)).outcome == "completed"
    skipped = await controller.attempt_snapshot(2)
    assert (skipped.outcome, skipped.reason) == ("skipped", "no_data_plane_mutations")
    assert (await controller.attempt_snapshot(3, force=True)).outcome == "completed"
    await controller.train_steps(1, 1)
    assert (await controller.attempt_snapshot(4)).outcome == "completed"
    await world.kill()


async def test_a_snapshot_number_is_attempted_once_also_by_two_callers_at_once(make_world):
    world = make_world()
    controller = await world.start()
    await world.settle(lambda: len(controller.parts.buffer) == 8)
    writing = world.store.hold("write", "/parts/")
    first = asyncio.create_task(controller.attempt_snapshot(1, force=True))
    await world.settle(writing.reached.is_set)
    second = asyncio.create_task(controller.attempt_snapshot(1, force=True))
    writing.release()
    assert await first == await second == await controller.attempt_snapshot(1, force=True)
    assert len(await _bundles(world)) == 1
    assert len(world.trace.of("snapshot_attempt")) == 1
    await world.kill()


async def test_scenario_34_a_failed_save_leaves_the_previous_one_and_its_number_can_be_tried_again(make_world):
    world = make_world()
    controller = await world.start()
    await controller.train_steps(1, 1)
    previous = await world.snapshot(1)
    await controller.train_steps(2, 2)
    for attempt, place in ((2, "/parts/"), (3, "/state/ledger"), (4, "/manifests/")):
        operation = "create_exclusive" if "manifests" in place else "write"
        world.store.fail(operation, place, _down())
        with pytest.raises(StoreUnavailable):
            await controller.attempt_snapshot(attempt, force=True)
        assert (world.plan().target, world.plan().anchor) > (previous.manifest.sequence, 0)
        assert (await world.snapshot(attempt, force=True)).state.progress.train_steps == 2
        async with asyncio.timeout(5), controller.parts.barrier.mutation("the barrier is free"):
            pass
    assert controller.state == "running"
    await world.kill()


async def test_scenario_36_without_a_durable_anchor_an_attempt_is_skipped_reported_once_and_succeeds_later(make_world):
    """Without rollout snapshots of its own a run keeps no trained batches: one on request needs the exact step."""
    world = make_world(
        checkpointing={"save_period": 2}, algorithm={"max_steps": 4}, rollout_checkpointing={"enabled": False}
    )
    controller = await world.start()
    await world.train(1, 1)
    for number in (1, 2, 3):
        outcome = await controller.attempt_snapshot(number)
        assert (outcome.outcome, outcome.reason) == ("skipped", "missing_trainer_anchor")
    assert [e["reason"] for e in world.trace.of("snapshot_attempt")] == ["missing_trainer_anchor"]
    await controller.train_steps(2, 2)
    bundle = await world.snapshot(4)
    assert (bundle.manifest.anchor.step, bundle.state.progress.train_steps) == (2, 2)
    await controller.train_steps(3, 3)
    assert (await controller.attempt_snapshot(5)).reason == "missing_trainer_anchor"
    assert [e["step"] for e in world.trace.of("snapshot_attempt")] == [1, 2, 3]
    await world.kill()


async def test_scenario_37_an_open_step_is_saved_as_replayable_and_goes_on(make_world):
    world = make_world()
    controller = await world.start()
    world.trainer.microbatch_gate = asyncio.Event()
    step = asyncio.create_task(controller.train_steps(1, 1))
    await world.settle(lambda: world.trainer.waiting_at == "microbatch" and len(controller.parts.buffer) == 8)
    claimed = {g.group_id for g in controller.parts.buffer.claimed()}
    bundle = await world.snapshot(1)
    replayable = [g.group_id for g in bundle.state.buffer if g.target_step == 0]
    assert set(replayable) == claimed
    assert {g.claimed_by for g in bundle.state.buffer} == {None}
    assert world.trace.of("snapshot_attempt")[0]["rolled_back_train_group_count"] == 4
    world.trainer.microbatch_gate.set()
    assert (await step)[0]["group_ids"] == replayable
    await world.kill()


async def test_scenario_38_in_the_commit_window_an_attempt_is_skipped(make_world):
    world = make_world()
    controller = await world.start()
    world.trainer.finish_gate = asyncio.Event()
    step = asyncio.create_task(controller.train_steps(1, 1))
    await world.settle(lambda: world.trainer.waiting_at == "finish")
    outcome = await controller.attempt_snapshot(1, force=True)
    assert (outcome.outcome, outcome.reason) == ("skipped", "optimizer_commit_in_progress")
    world.trainer.finish_gate.set()
    await step
    assert (await controller.attempt_snapshot(2, force=True)).outcome == "completed"
    await world.kill()


async def test_scenario_38_a_trainer_that_moves_while_the_cut_is_awaited_discards_the_attempt(make_world):
    world = make_world()
    controller = await world.start()
    parts = controller.parts
    world.trainer.microbatch_gate = asyncio.Event()
    step = asyncio.create_task(controller.train_steps(1, 1))
    await world.settle(lambda: world.trainer.waiting_at == "microbatch")
    async with parts.barrier.cut("someone else's"):
        attempt = asyncio.create_task(controller.attempt_snapshot(1, force=True))
        await asyncio.sleep(0)
        world.trainer.microbatch_gate.set()
        await world.settle(lambda: parts.state.in_commit_window)
    outcome = await attempt
    assert (outcome.outcome, outcome.reason) == ("skipped", "trainer_state_changed")
    await step
    assert [m.kind for m in await _bundles(world)] == ["trainer_checkpoint"]
    await world.kill()


async def test_scenario_40_a_save_cut_short_anywhere_leaves_a_store_that_restores_the_previous_state(make_world):
    world = make_world()
    world.boot()
    held = world.passed_by(20)[8:]
    world.generator.held = lambda group_id, index: group_id in held
    controller = await world.restore(world.plan())
    await controller.train_steps(1, 1)
    saved = (await world.snapshot(1)).manifest.sequence
    world.generator.release()
    await world.settle(lambda: len(controller.parts.buffer) == 8)
    failed = 0
    while world.plan().target == saved:
        world.store.fail("change", "", _down(), passing=failed)
        try:
            await controller.attempt_snapshot(2, force=True)
        except StoreUnavailable:
            failed += 1
            assert world.plan().target == saved
    assert failed >= 8, "one for each table and the manifest"
    assert (await world.controller.attempt_snapshot(2)).sequence == world.plan().target
    await world.kill()


async def test_scenario_43_consecutive_failures_end_the_run_and_a_success_resets_the_count(make_world):
    world = make_world()
    controller = await world.start()
    await world.settle(lambda: len(controller.parts.buffer) == 8)
    for number, works in enumerate((False, False, True, False, False, False), start=1):
        if not works:
            world.store.fail("write", "/state/", _down(f"attempt {number} fails"))
            with pytest.raises(StoreUnavailable):
                await controller.attempt_snapshot(number, force=True)
        else:
            await controller.attempt_snapshot(number, force=True)
        assert controller.state == ("failed" if number == 6 else "running")
    with pytest.raises(StoreUnavailable, match="attempt 6 fails"):
        await controller.train_steps(1, 1)
    await world.kill()


async def test_scenario_45_and_47_a_trainer_checkpoint_is_saved_once_for_each_trigger_and_never_with_claims(make_world):
    world = make_world(checkpointing={"save_period": 2}, algorithm={"max_steps": 5})
    controller = await world.start()
    await controller.train_steps(1, 5)
    await controller.train_steps(1, 5)
    assert [e["step"] for e in world.trace.of("checkpoint_published")] == [2, 4, 5]
    world.trainer.microbatch_gate = asyncio.Event()
    step = asyncio.create_task(controller.train_steps(6, 6))
    await world.settle(lambda: world.trainer.waiting_at == "microbatch")
    with pytest.raises(BrokenInvariant, match="while a train step holds claimed groups"):
        await controller._checkpoints.save(6, Trigger.REQUEST)
    world.trainer.microbatch_gate.set()
    with pytest.raises(BrokenInvariant):
        await step
    await world.kill()


async def test_scenario_46_a_trainer_save_and_a_snapshot_never_interleave(make_world):
    world = make_world()
    controller = await world.start()
    world.trainer.save_gate = asyncio.Event()
    step = asyncio.create_task(controller.train_steps(1, 1))
    await world.settle(lambda: world.trainer.waiting_at == "save")
    before = world.store.changes()
    attempt = asyncio.create_task(controller.attempt_snapshot(1))
    await world.settle(lambda: len(controller.parts.buffer) == 8)
    assert world.store.changes() == before
    world.trainer.save_gate.set()
    await step
    assert (await attempt).outcome == "completed"
    kinds = [(m.kind, m.step) for m in await _bundles(world)]
    assert kinds == [("trainer_checkpoint", 1), ("rollout_snapshot", 1)]
    await world.kill()


async def test_a_cancelled_save_holds_the_save_lock_until_its_thread_has_ended(make_world):
    world = make_world()
    controller = await world.start()
    await world.settle(lambda: len(controller.parts.buffer) == 8)
    writing = world.store.hold("write", "/parts/")
    attempt = asyncio.create_task(controller.attempt_snapshot(1))
    await world.settle(writing.reached.is_set)
    attempt.cancel()
    step = asyncio.create_task(controller.train_steps(1, 1))
    await world.settle(lambda: controller.parts.state.train_steps == 1)
    assert (attempt.done(), await _bundles(world)) == (False, [])
    writing.release()
    with pytest.raises(asyncio.CancelledError):
        await attempt
    await step
    assert [(m.kind, m.step) for m in await _bundles(world)] == [("rollout_snapshot", 0), ("trainer_checkpoint", 1)]
    await world.kill()


async def test_a_trainer_checkpoint_of_unknown_outcome_is_written_again_beside_it(make_world):
    world = make_world()
    controller = await world.start()
    world.store.fail("create_exclusive", "/manifests/", StoreOutcomeUnknown("timed out"), late=True)
    world.store.fail("read", "/manifests/", _down())
    with pytest.raises(StoreOutcomeUnknown):
        await controller.train_steps(1, 1)
    unknown = (await _bundles(world))[-1]
    files = {entry.path: world.store.read(entry.path) for entry in unknown.files}
    assert (await controller.train_steps(1, 1))[0]["rollouts_sha256"]
    assert {path: world.store.read(path) for path in files} == files
    again = (await _bundles(world))[-1]
    assert (unknown.step, again.step) == (1, 1)
    assert not {e.path for e in again.files if e.role == "weights"} & files.keys()
    assert len(world.trainer.trained) == 1
    await world.kill()


async def test_a_fenced_controller_publishes_nothing_more_and_says_who_won(make_world):
    world = make_world()
    old = await world.start()
    await world.settle(lambda: len(old.parts.buffer) == 8)
    bundles = world.bundles
    world.boot()
    with pytest.raises(Fenced, match="incarnation-2"):
        await old.train_steps(1, 1)
    assert old.state == "failed"
    with pytest.raises(Fenced):
        await old.attempt_snapshot(1)
    assert [slot.kind for slot in bundles._log.read()] == ["claim", "claim"]
    await old.close("fenced")


async def test_a_write_that_outlives_its_killed_controller_is_published_before_the_next_claim_or_never(make_world):
    world = make_world()
    old = await world.start()
    await world.settle(lambda: len(old.parts.buffer) == 8)
    writing = world.store.hold("write", "/state/")
    attempt = asyncio.create_task(old.attempt_snapshot(1))
    await world.settle(writing.reached.is_set)
    await world.kill()
    controller = await world.start()
    writing.release()
    with pytest.raises(Fenced):
        await attempt
    assert "incarnation-1" not in {bundle.writer for bundle in await _bundles(world)}
    await world.train(1, 3)
    assert sorted(g for groups in world.history().values() for g in groups)
    assert controller.parts.state.train_steps == 3
    await world.kill()


async def test_cuts_of_one_controller_have_rising_times_even_if_its_clock_is_set_back(make_world):
    world = make_world()
    controller = await world.start()
    times = iter((1000.0, 400.0, 400.0, 2000.0))
    publisher = BundlePublisher(controller.parts, world.bundles, identity="i", wall_clock=lambda: next(times))
    cuts = [(await publisher.capture(model_step=0)).cut_time for _ in range(4)]
    assert (cuts[0], cuts[3]) == (1000.0, 2000.0)
    assert 1000.0 < cuts[1] < cuts[2] < 1000.001
    await world.kill()
