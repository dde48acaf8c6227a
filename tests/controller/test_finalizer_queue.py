"""The finalizer as a part of its own: bounded workers, a queue, evictions, and work of which the outcome is unknown."""

import asyncio
import threading

import pytest

from gpu_workers.controller.barrier import Cut
from gpu_workers.controller.row_assembly import assemble_group
from storage.errors import FinalizationUnknown, InfrastructureFailure
from storage.records import GroupStatus, RowKind


class HeldAssembly:
    """Assembles rows as ever, but holds the groups in `held` until `release`; those in `failing` then fail."""

    def __init__(self, held=lambda group_id: True, failing=lambda group_id: False):
        self.held = held
        self.failing = failing
        self.entered = []
        self.at_once = 0
        self._inside = 0
        self._lock = threading.Lock()
        self._go = threading.Event()

    def release(self):
        self._go.set()

    def __call__(self, group, calls):
        with self._lock:
            self.entered.append(group.group_id)
            self._inside += 1
            self.at_once = max(self.at_once, self._inside)
        try:
            if self.held(group.group_id):
                assert self._go.wait(20), "a held group was never released"
            if self.failing(group.group_id):
                raise ConnectionError("the worker was lost")
            return assemble_group(group, calls)
        finally:
            with self._lock:
                self._inside -= 1


def _boot(make_world, assembly, **sections):
    world = make_world(**sections)
    world.assemble = assembly
    world.boot()
    return world


def _rows_of(parts, *group_ids):
    return [row for row in parts.rows.capture(Cut("test")) if row.partition("_g")[0] in group_ids]


def _sealed(parts):
    """Ids of the unfinished groups that lack no sibling any more."""
    return {g.group_id for g in parts.ledger.admitted() if g.status is not GroupStatus.GENERATING}


@pytest.mark.parametrize("workers", [1, 3])
async def test_no_more_groups_are_worked_on_than_there_are_workers_and_the_others_queue_in_their_order(
    make_world, workers
):
    assembly = HeldAssembly()
    world = _boot(make_world, assembly, async_rl={"finalizer_workers": workers})
    parts = world.controller.parts
    await world.restore(world.plan())
    await world.settle(lambda: len(_sealed(parts)) == 8 and len(assembly.entered) == workers)
    waiting = [g for g in parts.ledger.groups() if g.status is GroupStatus.READY_TO_FINALIZE]
    assert len(waiting) == 8 - workers
    async with asyncio.timeout(5), parts.barrier.cut("queueing holds nothing up"):
        pass
    world.check()
    assembly.release()
    await world.settle(lambda: len(parts.buffer) == 8)
    assert assembly.at_once == workers
    sealed = [e["group_id"] for e in world.trace.of("group_sealed")]
    assert sorted(sealed) == sorted(assembly.entered[:8])
    if workers == 1:
        assert sealed == assembly.entered[:8] == world.passed_by(12)[:4] + sealed[4:]
    await world.kill()


async def test_scenario_26_the_result_is_kept_and_saved_until_the_group_is_trained(make_world):
    world = make_world()
    controller = await world.start()
    await world.settle(lambda: len(controller.parts.buffer) == 8)
    live = {group.group_id: group for group in controller.parts.buffer.ready()}
    for group in live.values():
        assert (len(group.row_ids), len(group.rewards)) == (2, 2)
        assert group.oldest_version == group.newest_version == 0
        assert group.num_tokens == sum(tokens for _, tokens in group.version_tokens) > 0
    assert {group.group_id: group for group in (await world.snapshot(1)).state.buffer} == live
    await world.kill()
    controller = await world.start()
    assert {group.group_id: group for group in controller.parts.buffer.ready()} == live
    await world.train(1, 1)
    assert not _rows_of(controller.parts, *world.passed_by(4))
    await world.kill()


async def test_scenario_27_a_failed_call_after_submission_is_fatal_not_retried_and_nothing_can_be_saved(make_world):
    world = make_world()
    world.boot()
    lost = world.passed_by(2)[1]
    await world.kill()
    assembly = HeldAssembly(held=lambda group_id: group_id == lost, failing=lambda group_id: group_id == lost)
    world.assemble = assembly
    world.boot()
    controller = await world.restore(world.plan())
    parts = controller.parts
    step = asyncio.create_task(controller.train_steps(1, 1))
    await world.settle(lambda: lost in assembly.entered and len(parts.buffer) == 7)
    before = await world.snapshot(1)
    assembly.release()
    with pytest.raises(FinalizationUnknown, match=f"rows of group {lost} are unknown.*the worker was lost.*restart"):
        await step
    assert controller.state == "failed"
    assert parts.ledger.group(lost).status is GroupStatus.FINALIZATION_UNKNOWN
    assert assembly.entered.count(lost) == 1
    assert len(_rows_of(parts, lost)) == 2, "its staged calls are still there"
    changes = world.store.changes()
    with pytest.raises(FinalizationUnknown):
        await controller.attempt_snapshot(2, force=True)
    with pytest.raises(FinalizationUnknown, match="nothing can be saved"):
        parts.ledger.capture(Cut("whoever else might try"))
    await world.kill()
    assert world.store.changes() == changes

    world.assemble = assemble_group
    controller = await world.start()
    (report,) = await world.train(1, 1)
    assert lost in report["group_ids"]
    assert lost in {group.group_id for group in before.state.ledger}
    assert lost not in {order.group_id for order in world.generator.orders}, "finalized again from its staged calls"
    await world.train(2, 3)
    assert not world.audit().problems
    await world.kill()


async def test_scenario_27_a_cut_that_waits_while_a_publication_fails_half_way_saves_nothing(make_world):
    world = make_world()
    world.boot()
    parts, attempts = world.controller.parts, []
    put = parts.rows.put

    def fail_half_way(mutation, kind, batch):
        if kind is RowKind.TRAINING_ROW:
            attempts.append(asyncio.create_task(world.controller.attempt_snapshot(1, force=True)))
            raise InfrastructureFailure("the data plane does not answer")
        put(mutation, kind, batch)

    parts.rows.put = fail_half_way
    await world.restore(world.plan())
    await world.settle(lambda: bool(attempts))
    for attempt in attempts:
        with pytest.raises(FinalizationUnknown, match="the data plane does not answer"):
            await attempt
    assert [operation for operation, _ in world.store.changes()] == ["create_exclusive"]  # the claim
    await world.kill()


@pytest.mark.parametrize("policy", ["shrink", "replace"])
async def test_scenario_29_a_drop_that_fails_to_clean_up_keeps_its_owner(make_world, policy, data_failure):
    world = make_world(async_rl={"max_data_failures": 0, "on_dropped_prompt": policy})
    world.boot()
    parts, dropped = world.controller.parts, world.passed_by(1)[0]
    world.generator.failures[f"{dropped}_g1"] = [data_failure]
    world.generator.held = lambda group_id, index: group_id != dropped

    def fail(mutation, row_ids):
        raise InfrastructureFailure("the data plane does not answer")

    parts.rows.remove = fail
    await world.restore(world.plan())
    await world.settle(lambda: world.controller.state == "failed")
    with pytest.raises(InfrastructureFailure, match="the data plane does not answer"):
        await world.controller.train_steps(1, 1)
    assert dropped in parts.ledger
    assert _rows_of(parts, dropped) == [f"{dropped}_g0/a0/t0"]
    assert (parts.state.dropped, parts.state.shortfall) == ([], {})
    world.check()
    await world.kill()


async def _finalizing_and_queued_while_the_window_moves_on(make_world, assembly):
    """windowed, only the trainer's own version, one worker: of version 0 four groups are published, the fifth is being
    worked on, the sixth queues; the trainer is at version 1.
    """
    windowed = {"sampler": "windowed", "max_staleness_versions": 0, "buffer_capacity": 6, "finalizer_workers": 1}
    world = _boot(make_world, assembly, async_rl=windowed, algorithm={"max_steps": 6}, data={"num_prompts": 80})
    parts = world.controller.parts
    await world.restore(world.plan())
    await world.settle(lambda: len(parts.buffer) == 4 and len(assembly.entered) == 5)
    await world.settle(lambda: len(_sealed(parts)) == 2)
    worked_on = assembly.entered[4]
    (queued,) = _sealed(parts) - {worked_on}
    await world.controller.train_steps(1, 1)
    return world, worked_on, queued


async def test_scenarios_30_and_31_evicted_before_the_write_nothing_is_written_and_during_it_it_is_unwritten(
    make_world,
):
    assembly = HeldAssembly(held=lambda group_id: len(assembly.entered) >= 5)
    world, worked_on, queued = await _finalizing_and_queued_while_the_window_moves_on(make_world, assembly)
    parts = world.controller.parts
    step = asyncio.create_task(world.controller.train_steps(2, 2))
    await world.settle(lambda: queued not in parts.ledger)
    assert _rows_of(parts, queued) == []
    dropped = {d.prompt.group_id: d.reason for d in parts.state.dropped}
    assert (dropped[queued], dropped.get(worked_on)) == ("stale", None)
    assert parts.ledger.group(worked_on).status is GroupStatus.FINALIZING
    world.check()
    assembly.release()
    (report,) = await step
    assert len(report["group_ids"]) == 4
    assert queued not in assembly.entered
    await world.settle(lambda: worked_on not in parts.ledger)
    assert _rows_of(parts, worked_on, queued) == []
    dropped = {d.prompt.group_id: d.reason for d in parts.state.dropped}
    assert (dropped[queued], dropped[worked_on]) == ("stale", "evicted")
    published = {e["group_id"] for e in world.trace.of("group_published")}
    assert not {worked_on, queued} & published
    discarded = {e["group_id"]: e["reason"] for e in world.trace.of("group_discarded")}
    assert discarded == dropped
    assert assembly.at_once == 1, "the worker is free again"
    await world.train(3, 4)
    await world.kill()


async def test_scenario_31_groups_that_queued_at_a_kill_are_finalized_by_the_next_life(make_world):
    assembly = HeldAssembly()
    world = _boot(make_world, assembly, async_rl={"finalizer_workers": 1})
    parts = world.controller.parts
    await world.restore(world.plan())
    await world.settle(lambda: len(_sealed(parts)) == 8 and len(assembly.entered) == 1)
    saved = await world.snapshot(1)
    assert len([g for g in saved.state.ledger if g.status is GroupStatus.READY_TO_FINALIZE]) >= 7
    await world.kill()
    assembly.release()
    assert len(assembly.entered) == 1
    world.assemble = assemble_group
    await world.start()
    (report,) = await world.train(1, 1)
    assert not set(report["group_ids"]) & {order.group_id for order in world.generator.orders}
    await world.train(2, 3)
    assert not world.audit().problems
    await world.kill()
