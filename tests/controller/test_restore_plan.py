"""What a restore will cost is told before it is paid, and is what it then costs."""

from dataclasses import fields

import pytest

from storage.history import History
from storage.manifests import read_log
from storage.records import AttemptStatus
from storage.restore_figures import RestoreFigures
from storage.restore_outcome import outcome_of
from storage.restore_plan import plan_of
from storage.trace_analysis import stop_cost
from tests.controller.playing import Player, Tally, applied, begun, tally_task

# Only time tells.
ESTIMATES = {"replay_s", "tokens_to_generate", "generation_s"}


def _history(world):
    events = sorted((event for _, trace in world.lives for event in trace.events), key=lambda event: event["t"])
    return History(events, read_log(world.store, world.layout))


async def _stopped(make_world, level, **sections):
    """Killed after step 5: a checkpoint of step 3, a snapshot with step 4 recorded, finished groups, sealed siblings
    and running ones, and more work that no bundle holds.
    """
    world = make_world(
        **{"rollout_recovery": {"target_level": level}, "checkpointing": {"save_period": 3}, **sections},
        algorithm={"max_steps": 8},
        data={"num_prompts": 80},
    )
    world.boot()
    late = set(world.passed_by(80)) - set(world.passed_by(22))
    world.generator.held = lambda group_id, index: index == 1 and group_id in late
    controller = await world.restore(world.plan())
    await world.train(1, 4)
    await world.settle(lambda: controller.describe()["sealed_siblings"] > 2)
    await world.snapshot(1, force=True)
    world.generator.release()
    await world.train(5, 5)
    await world.kill()
    return world


async def _restored(world, train):
    """The plan of the next restore, and what it came to after these steps."""
    bundle = world.bundles.read(world.plan().target)
    keeps = world.config.checkpointing.load_replay_buffer
    plan = plan_of(bundle, _history(world), keeps_buffer=keeps)
    await world.start()
    await world.train(*train)
    await world.kill()
    world.audit()
    history = _history(world)
    outcome = outcome_of(history, history.lives[-1])
    return bundle, plan, outcome


def _countable(figures: RestoreFigures) -> dict[str, float]:
    return {f.name: getattr(figures, f.name) for f in fields(figures) if f.name not in ESTIMATES}


@pytest.mark.parametrize("level", ["prompt_group", "sibling"])
@pytest.mark.parametrize("kept", [True, False], ids=["buffer kept", "buffer discarded"])
async def test_a_restore_comes_to_what_its_plan_says(make_world, level, kept):
    world = await _stopped(make_world, level)
    world.change("checkpointing", load_replay_buffer=kept)
    bundle, plan, outcome = await _restored(world, (4, 7))
    assert _countable(plan) == _countable(outcome.figures)
    assert outcome.is_complete
    (cost,) = stop_cost(world.store, world.layout)
    assert (cost.steps_lost, cost.tokens_lost, cost.lost_s) == (plan.steps_lost, plan.tokens_lost, plan.lost_s)
    siblings = [sibling for group in bundle.state.ledger for sibling in group.siblings]
    sealed = [sibling.sealed for sibling in siblings if sibling.sealed]
    assert sealed
    reused = sealed if level == "sibling" else []
    again = [] if kept else [row for group in bundle.state.buffer for row in group.row_ids]
    assert plan.siblings_reused == len(reused)
    assert plan.siblings_rerun == len(siblings) - len(reused) + len(again)
    running = sum(sibling.status is AttemptStatus.DISPATCHED for sibling in siblings)
    assert plan.attempts_dropped == running + len(sealed) - len(reused) + len(again)
    buffered = sum(group.num_tokens for group in bundle.state.buffer)
    assert plan.tokens_kept == sum(result.num_tokens for result in reused) + buffered * kept
    assert (plan.steps_to_replay, plan.steps_lost, plan.turns_kept) == (1, 1, 0)


async def test_calls_in_their_middle_are_continued_as_the_plan_says(make_world):
    world = make_world(rollout_recovery={"target_level": "prefix"}, async_rl={"max_lookahead_versions": 0})
    world.boot()
    world.generator.held = lambda group_id, index: True
    world.generator.had = lambda rollout: 2
    await world.restore(world.plan())
    await world.settle(lambda: len(world.generator.orders) == 4 and len(world.generator.calls) >= 4)
    await world.snapshot(1)
    await world.kill()
    bundle, plan, outcome = await _restored(world, (1, 2))
    assert _countable(plan) == _countable(outcome.figures)
    calls = len(bundle.state.partial_calls)
    assert (plan.calls_continued, plan.tokens_continued, plan.tokens_kept) == (calls, 2 * calls, 2 * calls)
    assert plan.siblings_resumed == calls > 0
    assert outcome.figures.tokens_to_generate == _sampled(world) - plan.tokens_continued


@pytest.fixture
def players(make_world, monkeypatch):
    """Worlds whose rollouts are episodes of several turns."""
    monkeypatch.setattr("gpu_workers.environments.environment_task.find_environment", lambda name: Tally())
    applied.clear()

    def make(level):
        task = tally_task()
        world = make_world(dataset=task, rollout_recovery={"target_level": level})
        new_fake = world.new_generator
        world.new_generator = lambda: Player(new_fake(), world.config, task)
        return world

    return make


@pytest.mark.parametrize("level", ["sibling", "turn"])
async def test_finished_turns_are_kept_from_level_turn_on_as_the_plan_says(players, level):
    world = players(level)
    await begun(world)
    running = world.generator.calls.sampled[:]
    await world.snapshot(1)
    await world.kill()
    bundle, plan, outcome = await _restored(world, (1, 3))
    assert _countable(plan) == _countable(outcome.figures)
    assert outcome.is_complete
    siblings = sum(len(group.siblings) for group in bundle.state.ledger)
    dispatched = len({rollout for rollout, _ in running})
    assert len(running) == 2 * dispatched
    if level == "turn":
        assert (plan.siblings_resumed, plan.turns_kept) == (dispatched, 2 * dispatched)
        assert plan.siblings_rerun == siblings - dispatched
        lengths = [len(row.batch.column("token_ids")[row.index]) for row in bundle.rows.values()]
        assert plan.turn_tokens == plan.tokens_kept == sum(lengths) > 0
    else:
        assert (plan.siblings_resumed, plan.turns_kept, plan.tokens_kept) == (0, 0, 0)
        assert (plan.siblings_rerun, plan.attempts_dropped) == (siblings, dispatched)
    assert outcome.figures.tokens_to_generate == _sampled(world) - plan.turn_tokens


def _sampled(world) -> int:
    """Tokens of the rollouts that the newest process launched again."""
    owed = {f"{e['group_id']}_g{index}" for e in world.trace.of("redispatched") for index in e["siblings"]}
    return sum(e["num_tokens"] for e in world.trace.of("attempt_sealed") if e["rollout_id"] in owed)


async def test_a_fresh_start_and_a_run_that_was_never_stopped_have_no_outcome(make_world):
    world = make_world()
    await world.start()
    await world.train(1, 1)
    await world.kill()
    history = _history(world)
    assert outcome_of(history, history.lives[-1]) is None


async def test_until_everything_that_was_launched_again_is_sealed_the_outcome_is_not_complete(make_world):
    world = await _stopped(make_world, "sibling")
    world.boot()
    world.generator.held = lambda group_id, index: True
    controller = await world.restore(world.plan())
    await world.train(4, 4)
    await world.settle(lambda: controller.describe()["running_groups"] > 0)
    history = _history(world)
    assert not outcome_of(history, history.lives[-1]).is_complete
    world.generator.release()
    await world.train(5, 6)
    history = _history(world)
    assert outcome_of(history, history.lives[-1]).is_complete
    await world.kill()
