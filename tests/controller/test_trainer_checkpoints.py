"""Trainer checkpoints: what triggers one, and how it is written in the background."""

import asyncio

import pytest

from gpu_workers.controller.checkpoint_schedule import CheckpointSchedule, Trigger
from storage.errors import BrokenInvariant, StoreUnavailable

BACKGROUND = {"save_period": 2, "async_save": True}
DEFERRED = {**BACKGROUND, "defer_async_checkpoint_finalize": True}


def _down(what="the store does not answer"):
    return StoreUnavailable(what)


def _published(world):
    return [(e["step"], e["trigger"]) for e in world.trace.of("checkpoint_published")]


def _fail_once(error):
    errors = [error]

    def strike():
        if errors:
            raise errors.pop()

    return strike


# What triggers one.


async def test_scenario_47_the_period_and_the_last_step_save_once_each(make_world):
    world = make_world(checkpointing={"save_period": 2}, algorithm={"max_steps": 5})
    await world.start()
    await world.train(1, 5)
    await world.train(1, 5)
    assert _published(world) == [(2, "period"), (4, "period"), (5, "last_step")]
    await world.kill()


async def test_scenario_47_a_last_step_that_the_period_falls_on_is_saved_once(make_world):
    world = make_world(checkpointing={"save_period": 2}, algorithm={"max_steps": 4})
    await world.start()
    await world.train(1, 4)
    assert _published(world) == [(2, "period"), (4, "last_step")]
    await world.kill()


async def test_scenario_47_the_end_of_the_data_saves_once(make_world):
    world = make_world(checkpointing={"save_period": 9}, data={"num_prompts": 12}, async_rl={"spare_prompts": 0})
    world.change("algorithm", max_steps=99)
    controller = await world.start()
    assert (await controller.train_steps(1, 99))[-1]["end_of_data"]
    assert (await controller.train_steps(4, 99))[-1]["end_of_data"]
    assert _published(world) == [(3, "end_of_data")]
    await world.kill()


async def test_scenario_47_a_request_is_served_at_the_next_step_boundary(make_world):
    world = make_world(checkpointing={"save_period": 9}, algorithm={"max_steps": 9})
    controller = await world.start()
    assert (await controller.checkpoint())["reason"] == "durable_already", "the initial model needs no checkpoint"
    world.trainer.microbatch_gate = asyncio.Event()
    steps = asyncio.create_task(controller.train_steps(1, 3))
    await world.settle(lambda: world.trainer.waiting_at == "microbatch")
    request = asyncio.create_task(controller.checkpoint())
    world.trainer.microbatch_gate.set()
    outcome = await request
    assert (outcome["outcome"], outcome["step"]) == ("completed", 1)
    assert world.bundles.manifest(outcome["sequence"]).step == 1
    await steps
    assert _published(world) == [(1, "request")]
    again, twice = await controller.checkpoint(), await controller.checkpoint()
    assert (again["outcome"], again["step"], twice["outcome"]) == ("completed", 3, "skipped")
    assert twice["sequence"] == again["sequence"] == world.plan().anchor
    await world.kill()


async def test_a_request_to_a_run_that_failed_is_refused_with_its_failure(make_world):
    world = make_world()
    controller = await world.start()
    controller.parts.state.fail(BrokenInvariant("the run is broken"))
    with pytest.raises(BrokenInvariant, match="the run is broken"):
        await controller.checkpoint()
    await world.kill()


class Clock:
    """Seconds that a test lets pass."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def _triggers(schedule, clock, steps, *, seconds, period_saves=True):
    """What is due after each step; each takes so many seconds."""
    saved, found = 0, {}
    for step in steps:
        clock.now += seconds
        trigger = schedule.due(step, saved_step=saved)
        if trigger is not None and (period_saves or trigger is not Trigger.PERIOD):
            schedule.served(trigger)
            saved, found[step] = step, trigger
    return found


def test_scenario_47_the_deadline_saves_once_at_the_last_boundary_from_which_another_step_might_miss_it(configure):
    clock = Clock()
    deadline = {"save_period": 99, "checkpoint_must_save_by": "01:40"}
    schedule = CheckpointSchedule(configure(checkpointing=deadline, algorithm={"max_steps": 90}), clock=clock)
    assert _triggers(schedule, clock, range(1, 30), seconds=15) == {6: Trigger.DEADLINE}


def test_a_first_step_that_takes_more_than_half_of_the_time_is_saved_at_once(configure):
    clock = Clock()
    deadline = {"save_period": 99, "checkpoint_must_save_by": "01:40"}
    schedule = CheckpointSchedule(configure(checkpointing=deadline, algorithm={"max_steps": 90}), clock=clock)
    clock.now += 5
    schedule.begin_step()
    assert _triggers(schedule, clock, range(1, 4), seconds=50) == {1: Trigger.DEADLINE}


def test_a_periodic_checkpoint_just_before_the_deadline_is_the_one(configure):
    clock = Clock()
    deadline = {"save_period": 3, "checkpoint_must_save_by": "00:00:01:40"}
    schedule = CheckpointSchedule(configure(checkpointing=deadline, algorithm={"max_steps": 90}), clock=clock)
    assert set(_triggers(schedule, clock, range(1, 8), seconds=15)) == {3, 6}
    assert Trigger.DEADLINE not in _triggers(schedule, clock, range(8, 30), seconds=15).values()


def test_a_period_that_was_missed_is_due_at_the_next_boundary(configure):
    schedule = CheckpointSchedule(configure(checkpointing={"save_period": 10}, algorithm={"max_steps": 90}))
    due = [step for step in range(5, 35) if schedule.due(step, saved_step=4)]
    assert due == list(range(10, 35))
    assert schedule.due(29, saved_step=23) is None
    assert schedule.due(30, saved_step=23) is Trigger.PERIOD


@pytest.mark.parametrize(
    ("text", "seconds"), [("40:00", 2400.0), ("3:40:00", 13200.0), ("00:03:40:00", 13200.0), ("1:00:00:00", 86400.0)]
)
def test_a_deadline_is_days_hours_minutes_and_seconds(configure, text, seconds):
    assert configure(checkpointing={"checkpoint_must_save_by": text}).checkpointing.must_save_by_s == seconds


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"checkpoint_must_save_by": 13200}, "13200 is no duration; give days:hours:minutes:seconds in quotes"),
        ({"checkpoint_must_save_by": "soon"}, "'soon' is no duration"),
        ({"defer_async_checkpoint_finalize": True}, "set async_save to true"),
        ({"keep_best": 2}, "metric_name names no metric"),
        ({"metric_name": "rewards_mean"}, "keep_best is 0"),
    ],
)
def test_a_setting_that_cannot_work_or_does_nothing_is_refused(configure, values, says):
    with pytest.raises(ValueError, match=says):
        configure(checkpointing=values)


# In the background.


async def _writing(make_world, saving=BACKGROUND, steps=9):
    """The checkpoint of step 2 is being written, and step 3 trained meanwhile."""
    world = make_world(checkpointing=saving, algorithm={"max_steps": steps}, data={"num_prompts": 80})
    controller = await world.start()
    world.trainer.save_gate = asyncio.Event()
    await world.train(1, 3)
    await world.settle(lambda: world.trainer.waiting_at == "save")
    return world, controller


async def test_scenario_44_a_checkpoint_is_published_only_after_all_writes_and_holds_the_state_it_was_begun_with(
    make_world,
):
    world, controller = await _writing(make_world)
    weights = next(e["weights_sha256"] for e in world.trace.of("train_step") if e["step"] == 2)
    assert _published(world) == []
    assert world.plan().anchor is None
    world.trainer.save_gate.set()
    await world.settle(lambda: _published(world) == [(2, "period")])
    bundle = world.bundles.read(world.plan().anchor)
    assert (bundle.manifest.step, bundle.state.progress.train_steps) == (2, 2)
    world.require_whole(bundle.state, set(bundle.rows))
    assert world.store.read(next(e.path for e in bundle.manifest.files if e.role == "weights")).decode() == weights
    world.check()
    assert [(t.step) for t in (await world.snapshot(1, force=True)).state.trained] == [3] * 4
    await world.kill()
    controller = await world.start()
    assert (controller.parts.state.train_steps, world.trainer.weights) == (2, weights)
    assert [r["replayed"] for r in await world.train(3, 4)] == [True, False]
    await world.kill()


async def test_scenario_44_a_background_failure_is_raised_by_the_next_save_which_can_then_be_tried_again(make_world):
    world, controller = await _writing(make_world)
    world.trainer.before_save = _fail_once(_down("an upload failed"))
    world.trainer.save_gate.set()
    await world.settle(lambda: not world.trainer.waiting_at)
    with pytest.raises(StoreUnavailable, match="an upload failed"):
        await controller.train_steps(4, 4)
    assert controller.parts.state.train_steps == 4
    assert controller.state == "running"
    assert [(e["step"], e["trigger"]) for e in world.trace.of("checkpoint_failed")] == [(2, "period")]
    await world.train(4, 5)
    await world.settle(lambda: _published(world) == [(4, "period")])
    await world.kill()


async def test_scenario_44_a_background_failure_is_raised_by_a_snapshot_attempt_which_can_then_be_tried_again(
    make_world,
):
    world, controller = await _writing(make_world)
    world.trainer.before_save = _fail_once(_down("an upload failed"))
    world.trainer.save_gate.set()
    await world.settle(lambda: not world.trainer.waiting_at)
    with pytest.raises(StoreUnavailable, match="an upload failed"):
        await controller.attempt_snapshot(1, force=True)
    bundle = await world.snapshot(1, force=True)
    assert (bundle.manifest.anchor.kind, bundle.state.model_step, bundle.manifest.step) == ("bootstrap", 0, 3)
    await world.kill()


async def test_scenario_44_a_background_failure_surfaces_when_the_run_is_closed(make_world):
    world, controller = await _writing(make_world)
    world.trainer.before_save = _fail_once(_down("an upload failed"))
    world.trainer.save_gate.set()
    with pytest.raises(StoreUnavailable, match="an upload failed"):
        await controller.settle_saves()
    await controller.settle_saves()
    await world.kill()


async def test_a_background_failure_does_not_cost_the_last_snapshot_of_a_process(make_world):
    world, controller = await _writing(make_world)
    world.trainer.before_save = _fail_once(_down("an upload failed"))
    world.trainer.save_gate.set()
    await world.settle(lambda: not world.trainer.waiting_at)
    outcome = await controller.publish_last(-1)
    assert (outcome.outcome, world.bundles.manifest(outcome.sequence).step) == ("completed", 3)
    assert [e["step"] for e in world.trace.of("checkpoint_failed")] == [2]
    await world.kill()


async def test_the_last_snapshot_of_a_process_does_not_wait_for_a_checkpoint_that_is_being_written(make_world):
    world, controller = await _writing(make_world)
    outcome = await controller.publish_last(-1)
    assert (outcome.outcome, world.trainer.waiting_at) == ("completed", "save")
    await world.kill()
    assert world.plan().target == outcome.sequence


async def test_a_failed_publication_is_raised_by_the_next_save(make_world):
    world, controller = await _writing(make_world)
    world.store.fail("create_exclusive", "/manifests/", _down("no manifest today"))
    world.trainer.save_gate.set()
    await world.settle(lambda: not world.store.troubles)
    with pytest.raises(StoreUnavailable, match="no manifest today"):
        await controller.settle_saves()
    assert world.plan().anchor is None
    await world.kill()


async def test_what_is_on_its_way_is_durable_when_the_run_is_closed(make_world):
    world, controller = await _writing(make_world)
    settled = asyncio.create_task(controller.settle_saves())
    await asyncio.sleep(0)
    world.trainer.save_gate.set()
    await settled
    assert world.bundles.manifest(world.plan().anchor).step == 2
    await world.kill()


async def test_the_last_step_waits_for_the_one_before_and_is_durable_when_it_returns(make_world):
    world, controller = await _writing(make_world, steps=4)
    last = asyncio.create_task(controller.train_steps(4, 4))
    await world.settle(lambda: controller.parts.state.train_steps == 4)
    world.trainer.save_gate.set()
    report = (await last)[0]
    assert _published(world) == [(2, "period"), (4, "last_step")]
    assert report["durable_step"] == 4
    await world.kill()


async def test_the_end_of_the_data_waits_for_the_checkpoint_that_is_on_its_way(make_world):
    world = make_world(checkpointing={**BACKGROUND, "save_period": 3}, data={"num_prompts": 12})
    world.change("async_rl", spare_prompts=0)
    world.change("algorithm", max_steps=99)
    controller = await world.start()
    world.trainer.save_gate = asyncio.Event()
    end = asyncio.create_task(controller.train_steps(1, 99))
    await world.settle(lambda: world.trainer.waiting_at == "save")
    for _ in range(200):
        await asyncio.sleep(0)
    assert not end.done()
    world.trainer.save_gate.set()
    assert (await end)[-1]["end_of_data"]
    assert _published(world) == [(3, "period")]
    await world.kill()


async def test_snapshots_go_on_while_a_checkpoint_is_written_and_stand_on_the_durable_one(make_world):
    world, controller = await _writing(make_world)
    await world.settle(lambda: len(controller.parts.buffer) == 8)
    bundle = await world.snapshot(1, force=True)
    assert (bundle.manifest.anchor.kind, bundle.manifest.step) == ("bootstrap", 3)
    assert {t.step for t in bundle.state.trained} == {1, 2, 3}
    world.trainer.save_gate.set()
    await world.settle(lambda: _published(world) == [(2, "period")])
    parts = set(world.store.list("run/parts"))
    again = await world.snapshot(2, force=True)
    assert (again.manifest.anchor.step, {t.step for t in again.state.trained}) == (2, {3})
    assert {e.path for e in again.manifest.files if e.role == "part"} <= parts, "no row is written again"
    await world.kill()


async def test_i_a_snapshot_cut_after_a_checkpoint_that_was_published_late_is_what_is_restored(make_world):
    """The checkpoint of step 2 is the newest bundle in the log; the snapshot before it holds step 3 as well."""
    world, _ = await _writing(make_world)
    weights = world.trainer.weights
    snapshot = await world.snapshot(1, force=True)
    world.trainer.save_gate.set()
    await world.settle(lambda: _published(world) == [(2, "period")])
    await world.kill()
    plan = world.plan()
    assert (plan.target, plan.anchor) == (snapshot.manifest.sequence, None)
    await world.start()
    assert all(report["replayed"] for report in await world.train(1, 3))
    assert world.trainer.weights == weights
    await world.train(4, 6)
    assert world.audit().problems == []
    await world.kill()


async def test_scenario_46_a_deferred_checkpoint_is_published_at_a_step_boundary(make_world):
    world = make_world(checkpointing={**DEFERRED, "save_period": 3}, algorithm={"max_steps": 9})
    controller = await world.start()
    world.trainer.save_gate = asyncio.Event()
    await world.train(1, 4)
    await world.settle(lambda: world.trainer.waiting_at == "save")
    world.trainer.save_gate.set()
    await world.settle(lambda: not world.trainer.waiting_at)
    for _ in range(100):
        await asyncio.sleep(0)
    assert _published(world) == [], "it is written, but there was no step boundary since"
    report = (await controller.train_steps(5, 5))[0]
    assert (_published(world), report["durable_step"]) == ([(3, "period")], 3)
    await world.kill()


async def test_scenario_46_a_snapshot_attempt_publishes_a_deferred_checkpoint_first_and_stands_on_it(make_world):
    world, controller = await _writing(make_world, saving=DEFERRED)
    world.trainer.save_gate.set()
    await world.settle(lambda: not world.trainer.waiting_at)
    attempts = [asyncio.create_task(controller.attempt_snapshot(n, force=True)) for n in (1, 2)]
    step = asyncio.create_task(controller.train_steps(4, 4))
    outcomes = await asyncio.gather(*attempts)
    await step
    kinds = [slot.kind for slot in world.bundles._log.read()[1:3]]
    assert kinds == ["trainer_checkpoint", "rollout_snapshot"]
    assert outcomes[0].outcome == "completed"
    assert world.bundles.manifest(outcomes[0].sequence).anchor.step == 2
    await world.kill()


@pytest.mark.parametrize("saving", [BACKGROUND, DEFERRED], ids=["at_once", "deferred"])
@pytest.mark.parametrize("stopped_at", range(6))
async def test_killed_at_any_moment_of_a_background_save_nothing_is_lost(make_world, saving, stopped_at):
    """Lookahead 0: the run ends with the weights of one that was never killed."""
    sections = {"async_rl": {"max_lookahead_versions": 0}, "algorithm": {"max_steps": 7}, "data": {"num_prompts": 40}}
    whole = make_world(**sections)
    await (await whole.start()).train_steps(1, 7)
    await whole.kill()
    world = make_world(checkpointing=saving, **sections)
    for life in range(3):
        controller = await world.start()
        world.trainer.save_gate = asyncio.Event()
        first = controller.parts.state.train_steps + 1
        await world.train(first, min(first + 2, 6))
        await controller.attempt_snapshot(1, force=True)
        world.trainer.save_gate.set()
        for _ in range(7 * stopped_at):
            await asyncio.sleep(0.0002)
        if life == 1:
            await controller.attempt_snapshot(2, force=True)
        await world.kill()
        assert world.audit().problems == []
    controller = await world.start()
    await world.train(controller.parts.state.train_steps + 1, 7)
    assert world.trainer.weights == whole.trainer.weights
    await world.kill()
