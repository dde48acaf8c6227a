"""Dispatch against a cut: what is saved of prompts on their way, and how it is launched again."""

import asyncio

import pytest

from storage.errors import DatasetChanged
from storage.records import AttemptStatus, GroupPhase, GroupStatus, RowKind

LOCKSTEP = {"async_rl": {"max_lookahead_versions": 0, "spare_prompts": 0}}


def _hold_everything(world):
    world.generator.held = lambda group_id, index: True


async def _with_reserved_batch(make_world):
    """Lookahead 0: batch 0 runs (held), batch 1 is reserved and waits for admission."""
    world = make_world(**LOCKSTEP)
    world.boot()
    _hold_everything(world)
    await world.restore(world.plan())
    await world.settle(lambda: len(world.generator.orders) == 4 and len(world.controller.parts.ledger) == 8)
    return world


async def test_scenario_01_a_cut_before_admission_saves_the_prompt_as_reserved_without_stamp_and_rows(make_world):
    world = await _with_reserved_batch(make_world)
    bundle = await world.snapshot(1)
    reserved = [g for g in bundle.state.ledger if g.phase is GroupPhase.RESERVED]
    assert len(reserved) == 4
    assert {(g.target_step, g.start_version, g.status) for g in reserved} == {(None, None, GroupStatus.GENERATING)}
    assert {s.status for g in reserved for s in g.siblings} == {AttemptStatus.RESERVED}
    assert bundle.rows == {}
    await world.kill()


async def test_scenario_02_a_cut_while_rollouts_run_saves_their_stamp(make_world):
    world = await _with_reserved_batch(make_world)
    bundle = await world.snapshot(1)
    running = [g for g in bundle.state.ledger if g.phase is GroupPhase.ADMITTED]
    assert [(g.target_step, g.start_version) for g in running] == [(0, 0)] * 4
    assert {s.status for g in running for s in g.siblings} == {AttemptStatus.DISPATCHED}
    await world.kill()


async def test_scenario_03_a_publication_that_contends_with_a_save_completes_after_it(make_world):
    world = make_world(**LOCKSTEP)
    world.boot()
    world.generator.held = lambda group_id, index: index == 1
    await world.restore(world.plan())
    await world.settle(lambda: world.controller.describe()["sealed_siblings"] == 4)
    async with world.controller.parts.barrier.mutation("hold the cut back"):
        attempt = asyncio.create_task(world.controller.attempt_snapshot(1))
        await asyncio.sleep(0)
        world.generator.release()
        await world.settle(lambda: len(world.generator.generated) == 8)
        assert len(world.controller.parts.buffer) == 0
    outcome = await attempt
    saved = world.bundles.read(outcome.sequence).state
    assert saved.buffer == ()
    assert outcome.facts["barrier_wait_ms"] > 0
    await world.settle(lambda: len(world.controller.parts.buffer) == 4)
    world.check()
    await world.kill()


async def test_scenario_03_a_step_commit_that_contends_with_a_save_completes_after_it(make_world):
    world = make_world()
    controller = await world.start()
    world.trainer.microbatch_gate = asyncio.Event()
    step = asyncio.create_task(controller.train_steps(1, 1))
    await world.settle(lambda: world.trainer.waiting_at == "microbatch")
    writing = world.store.hold("write", "/state/")
    attempt = asyncio.create_task(controller.attempt_snapshot(1))
    await world.settle(writing.reached.is_set)
    world.trainer.microbatch_gate.set()
    await world.settle(lambda: controller.parts.state.train_steps == 1)
    assert not step.done(), "the trainer checkpoint waits for the save lock"
    writing.release()
    outcome = await attempt
    await step
    saved = world.bundles.manifest(outcome.sequence)  # its files were freed when the checkpoint replaced it
    assert (saved.anchor.kind, saved.step, saved.counts["buffered_groups"] >= 4) == ("bootstrap", 0, True)
    assert len(world.trainer.trained) == 1
    await world.kill()


async def test_scenario_04_a_group_is_saved_once_at_every_moment_of_its_publication(make_world):
    world = make_world(algorithm={"max_steps": 2})
    controller = await world.start()
    training = asyncio.create_task(controller.train_steps(1, 2))
    bundles = await world.snapshots_while(training)
    assert any(bundle.state.ledger for bundle in bundles)
    assert any(bundle.state.buffer for bundle in bundles)
    await world.kill()


async def test_scenario_05_restored_stamped_work_needs_no_new_admission_and_keeps_shortfall_and_flag(
    make_world, data_failure
):
    world = make_world(async_rl={"on_dropped_prompt": "shrink", "max_data_failures": 0})
    world.boot()
    first = world.passed_by(1)[0]
    world.generator.failures[f"{first}_g0"] = [data_failure]
    world.generator.held = lambda group_id, index: group_id != first
    controller = await world.restore(world.plan())
    await world.settle(lambda: controller.parts.state.shortfall == {0: 1} and controller.parts.sampler.cursor == 1)
    saved = (await world.snapshot(1)).state
    await world.kill()

    world.boot()
    _hold_everything(world)
    controller = await world.restore(world.plan())
    await world.settle(lambda: len(world.generator.orders) == 7)
    assert controller.parts.state.shortfall == saved.progress.shortfall == {0: 1}
    assert controller.parts.state.stamps is True
    assert controller.parts.sampler.cursor == saved.progress.sampler_cursor
    assert world.trace.of("group_admitted") == []
    stamps = {g.group_id: g.target_step for g in controller.parts.ledger.groups()}
    assert stamps.items() >= {g.group_id: g.target_step for g in saved.ledger}.items()
    await world.kill()


async def test_scenario_07_the_reserved_prompts_of_one_batch_take_one_admission(make_world):
    world = await _with_reserved_batch(make_world)
    saved = (await world.snapshot(1)).state
    await world.kill()
    controller = await world.start()
    await controller.train_steps(1, 1)
    await world.settle(lambda: controller.parts.sampler.cursor == 1)
    admitted = world.trace.of("group_admitted")
    assert [e["group_id"] for e in admitted] == [g.group_id for g in saved.ledger if g.phase is GroupPhase.RESERVED]
    assert {e["target_step"] for e in admitted} == {1}
    world.check()
    await world.kill()


async def test_scenario_08_admitted_groups_are_launched_before_reserved_ones_wait_for_admission(make_world):
    world = await _with_reserved_batch(make_world)
    saved = (await world.snapshot(1)).state
    await world.kill()
    await world.start()
    reports = await world.train(1, 3)
    order = [order.group_id for order in world.generator.orders]
    assert order[:8] == [g.group_id for g in saved.ledger]
    assert [g for report in reports for g in report["group_ids"]] == world.passed_by(12)
    await world.kill()


async def test_scenario_09_groups_above_capacity_load_and_drain(make_world):
    world = make_world(async_rl={"max_lookahead_versions": 2, "spare_prompts": 0})
    world.boot()
    late = world.passed_by(6)[4:]  # two groups of step 2 are the last to finish
    world.generator.held = lambda group_id, index: group_id in late
    controller = await world.restore(world.plan())
    await controller.train_steps(1, 1)
    await world.settle(lambda: len(controller.parts.buffer) == 10)
    await world.snapshot(1)
    await world.kill()

    world.change("async_rl", max_lookahead_versions=0)
    controller = await world.start()
    assert len(controller.parts.buffer) == 10 > world.config.buffer_capacity
    reports = await world.train(2, 6)
    assert [g for report in reports for g in report["group_ids"]] == world.passed_by(24)[4:]
    await world.kill()


async def test_scenario_10_a_cut_sees_no_prompt_between_two_owners(make_world, data_failure):
    """Refill of the spare pool, a spare that takes a dropped group's place, and the pool's end-of-data drain."""
    world = make_world(
        algorithm={"max_steps": 8},
        data={"num_prompts": 30},
        async_rl={"max_data_failures": 0, "spare_prompts": 6},
    )
    world.boot()
    for group_id in world.passed_by(9)[::4]:
        world.generator.failures[f"{group_id}_g1"] = [data_failure]
    controller = await world.restore(world.plan())
    training = asyncio.create_task(controller.train_steps(1, 8))
    bundles = await world.snapshots_while(training)
    assert {0, 6} <= {len(bundle.state.spares) for bundle in bundles}
    assert len(controller.parts.state.dropped) == 3
    world.check()
    await world.kill()


async def test_scenario_11_rehydration_refuses_a_prompt_whose_hash_changed(make_world):
    world = await _with_reserved_batch(make_world)
    group = (await world.snapshot(1)).state.ledger[5]
    await world.kill()
    swapped = group.prompt.prompt_id
    world.dataset = type(world.dataset)(40, changed=frozenset({swapped}))
    with pytest.raises(DatasetChanged, match=f"prompt {swapped} has content hash") as refused:
        await world.start()
    assert group.prompt.content_hash[:12] in str(refused.value)
    assert world.controller.state == "empty"
    assert world.generator.orders == []


async def test_scenario_12_unfinished_batches_are_not_skipped_by_resuming_at_the_cursor(make_world):
    world = await _with_reserved_batch(make_world)
    position = (await world.snapshot(1)).state.progress.source
    await world.kill()
    controller = await world.start()
    assert controller.parts.source.position == position
    reports = await controller.train_steps(1, 3)
    assert [g for report in reports for g in report["group_ids"]] == world.passed_by(12)
    assert all(handle.kind is RowKind.TRAINING_ROW for handle in controller.parts.rows.rows([]))
    await world.kill()
