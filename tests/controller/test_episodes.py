"""Multi-turn episodes through the controller: staged turn by turn, saved while they run, resumed where they were."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from gpu_workers.controller.restorer import RestorePlan
from gpu_workers.environments.ports import EpisodeId, EpisodeTask, Exported, Phase
from storage.errors import (
    BrokenInvariant,
    DatasetChanged,
    EnvironmentRefusal,
    InfrastructureFailure,
    RestoreRefused,
    StoreUnavailable,
)
from storage.records import RecoveryLevel, SealedSibling, rollout_id
from tests.controller.playing import Player, Tally, all_wait, applied, begun, stand_at, tally_task


@pytest.fixture
def players(make_world: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Worlds whose rollouts are episodes of `Tally`."""
    found = "gpu_workers.environments.environment_task.find_environment"
    monkeypatch.setattr(found, lambda name: Tally())
    applied.clear()

    def make(level: str = "turn", **sections: Any) -> Any:
        task = tally_task()
        world = make_world(dataset=task, **{"rollout_recovery": {"target_level": level}, **sections})
        new_fake = world.new_generator
        world.new_generator = lambda: Player(new_fake(), world.config, task)
        return world

    return make


async def whole(world: Any, steps: int = 3) -> dict[int, list[str]]:
    """Digests of the rows of each step of an uninterrupted run."""
    await world.start()
    await world.train(1, steps)
    return trained_rows(world)


def trained_rows(world: Any) -> dict[int, list[str]]:
    return {step: event["rollouts_sha256"] for step, event in world.committed().items()}


async def test_scenario_68_an_episode_killed_after_some_turns_goes_on_and_nothing_is_sampled_or_applied_twice(players):
    expected = await whole(players())
    applied.clear()
    world = players()
    await begun(world)
    bundle = await world.snapshot(1)
    assert {episode.turn for episode in bundle.state.episodes} == {2}
    sampled = set(world.generator.calls.sampled)
    await world.kill()
    await world.start()
    await world.train(1, 3)
    again = [call for call in world.generator.calls.sampled if call in sampled]
    assert again == []
    assert set(applied.values()) == {1}
    assert trained_rows(world) == expected
    resumed = world.trace.of("attempt_resumed")
    assert len(resumed) == len(bundle.state.episodes)
    assert {(event["attempt"], event["environment_attempt"], event["turns"]) for event in resumed} == {(0, 1, 2)}
    assert not world.audit().problems


async def test_a_sealed_episode_tells_how_long_it_was_sampled_and_how_long_its_environment_took(players):
    world = players()
    await world.start()
    await world.train(1, 1)
    sealed = world.trace.of("attempt_sealed")
    assert sealed
    assert all(event["generation_s"] > 0 and event["environment_s"] > 0 for event in sealed)


async def test_a_run_killed_at_every_turn_in_a_row_ends_like_one_that_was_never_killed(players):
    expected = await whole(players())
    world = players()
    await begun(world, 1)
    await world.snapshot(1)
    for turn in (2, 3):
        await world.kill()
        world.boot()
        stand_at(world, turn)
        await world.restore(world.plan())
        await world.settle(lambda turn=turn: all_wait(world, turn))
        bundle = await world.snapshot(1)
        assert {episode.attempt for episode in bundle.state.episodes} == {turn - 1}
    await world.kill()
    await world.start()
    await world.train(1, 3)
    assert trained_rows(world) == expected
    assert {s.attempt for g in world.generator.orders for s in g.siblings} == {0}


@pytest.mark.parametrize("level", ["prompt_group", "sibling"])
async def test_below_level_turn_running_episodes_are_not_saved_and_run_again(players, level):
    expected = await whole(players(level))
    world = players(level)
    await begun(world)
    bundle = await world.snapshot(1)
    assert bundle.state.episodes == ()
    assert not [key for key in bundle.rows if key.endswith("/t1")]
    await world.kill()
    await world.start()
    await world.train(1, 3)
    assert trained_rows(world) == expected
    assert world.trace.of("attempt_resumed") == []


async def test_scenario_69_a_submission_refused_during_a_snapshot_is_sent_again_under_the_same_attempt(players):
    world = players()
    world.boot()
    world.generator.on_the_way = asyncio.Event()
    await world.restore(RestorePlan())
    await world.settle(lambda: len(world.trace.of("attempt_dispatched")) > 0)
    control, original = world.generator.environments[0], world.generator.environments[0].commit

    async def commit(*arguments: Any) -> Exported:
        world.generator.on_the_way.set()
        await world.settle(lambda: len(world.trace.of("attempt_refused")) > 0)
        return await original(*arguments)

    control.commit = commit
    await world.snapshot(1, force=True)
    world.generator.on_the_way = None
    await world.train(1, 1)
    assert {event["attempt"] for event in world.trace.of("attempt_refused")} == {0}
    assert {event["attempt"] for event in world.trace.of("attempt_sealed")} == {0}
    assert world.trace.of("attempt_abandoned") == []


async def test_scenario_70_when_one_instance_fails_to_restore_the_next_attempt_is_fenced_everywhere(players):
    expected = await whole(players())
    world = players()
    await begun(world)
    await world.snapshot(1)
    await world.kill()
    world.boot()
    first, second = world.generator.environments
    original = second.restore

    async def fails(*_: Any) -> Any:
        raise InfrastructureFailure("generator-1 is gone")

    second.restore = fails
    plan = world.plan()
    with pytest.raises(InfrastructureFailure, match="generator-1 is gone"):
        await world.controller.restore(plan)
    assert [len(table) for table in world.generator.tables] == [0, 0]
    assert (await first.status()).phase is Phase.IDLE
    rollout = "e0-p0_g0"
    held = next(e for e in world.bundles.read(plan.target).state.episodes if e.instance == first.instance)
    with pytest.raises(EnvironmentRefusal, match="stale_attempt"):
        await world.generator.tables[0].open(
            EpisodeId(held.rollout_id, 1), EpisodeTask("tally", "{}", held.seed, int(rollout[-1]), 9.0)
        )
    second.restore = original
    await world.restore(plan)
    await world.train(1, 3)
    assert {event["environment_attempt"] for event in world.trace.of("attempt_resumed")} == {2}
    assert trained_rows(world) == expected


async def test_scenario_71_a_later_failure_discards_what_was_restored(players):
    world = players()
    await begun(world)
    await world.snapshot(1)
    await world.kill()
    world.boot()
    load = world.controller.parts.source.load

    def swapped(ref: Any) -> Any:
        raise DatasetChanged("prompt 3 has another hash")

    world.controller.parts.source.load = swapped
    with pytest.raises(DatasetChanged):
        await world.controller.restore(world.plan())
    assert [len(table) for table in world.generator.tables] == [0, 0]
    world.controller.parts.source.load = load
    await world.restore(world.plan())
    assert sum(len(table) for table in world.generator.tables) > 0


async def test_scenario_72_an_environment_that_is_not_ready_fails_the_attempt_alone(players):
    world = players()
    await begun(world)
    control = world.generator.environments[1]
    original = control.prepare

    async def late(*_: Any) -> Any:
        raise EnvironmentRefusal("deadline_exceeded", "an episode reached no turn boundary")

    control.prepare = late
    with pytest.raises(EnvironmentRefusal, match="deadline_exceeded"):
        await world.controller.attempt_snapshot(1)
    assert [(await one.status()).phase for one in world.generator.environments] == [Phase.IDLE, Phase.IDLE]
    assert world.controller.parts.state.failure is None
    control.prepare = original
    await world.snapshot(2)
    world.generator.calls.release()
    await world.train(1, 1)


async def test_an_attempt_that_failed_after_the_environment_was_open_again_is_retried_under_its_number(players):
    world = players()
    await begun(world)
    world.store.fail("write", "/state/", StoreUnavailable("the disk is gone"))
    with pytest.raises(StoreUnavailable):
        await world.controller.attempt_snapshot(1)
    bundle = await world.snapshot(1)
    assert bundle.state.episodes
    assert world.controller.parts.state.failure is None


async def test_an_instance_that_says_nothing_fails_the_attempt_and_can_be_asked_again(players):
    world = players(environment={"deadline_s": 1.0})
    await begun(world)
    control = world.generator.environments[0]
    original = control.commit

    async def silent(*_: Any) -> Any:
        await asyncio.Event().wait()

    control.commit = silent
    with pytest.raises(InfrastructureFailure, match=r"did not answer within environment.deadline_s"):
        await world.controller.attempt_snapshot(1)
    control.commit = original
    assert (await world.snapshot(1)).state.episodes


async def test_a_closed_environment_is_not_asked_without_pause(players):
    world = players()
    world.boot()
    for table in world.generator.tables:
        table.hold()
    await world.restore(RestorePlan())
    await world.settle(lambda: len(world.trace.of("attempt_refused")) > 8)
    asked, began = len(world.generator.orders), asyncio.get_running_loop().time()
    await asyncio.sleep(0.3)
    rounds = 1 + (asyncio.get_running_loop().time() - began) / 0.05
    assert asked < len(world.generator.orders) <= asked + rounds * len(world.controller.parts.ledger)
    for table in world.generator.tables:
        table.release()
    await world.train(1, 1)


async def test_scenarios_72_and_76_a_malformed_reply_or_a_changed_topology_ends_the_run(players):
    world = players()
    await begun(world)
    control = world.generator.environments[0]

    async def foreign(checkpoint: str, _deadline: float) -> Exported:
        return Exported("somebody-else", checkpoint, (), ())

    control.commit = foreign
    with pytest.raises(BrokenInvariant, match="somebody-else.*topology has changed"):
        await world.controller.attempt_snapshot(1)
    assert isinstance(world.controller.parts.state.failure, BrokenInvariant)
    assert [(await one.status()).phase for one in world.generator.environments] == [Phase.IDLE, Phase.IDLE]


async def test_scenario_76_an_episode_that_nobody_owes_ends_the_run(players):
    world = players()
    await begun(world)
    await world.generator.tables[0].open(EpisodeId("e7-p3_g0", 0), EpisodeTask("tally", "{}", 1, 0, 60.0))
    with pytest.raises(BrokenInvariant, match="e7-p3_g0-a0, which no group owes"):
        await world.controller.attempt_snapshot(1)


async def test_scenario_74_a_resume_that_fails_after_the_commit_is_only_a_warning(players):
    world = players()
    await begun(world)
    control = world.generator.environments[0]
    original = control.resume

    async def fails(*_: Any) -> Any:
        await original(*_)
        raise InfrastructureFailure("the reply was lost")

    control.resume = fails
    bundle = await world.snapshot(1)
    assert bundle.state.episodes
    (warning,) = world.trace.of("environment_resume_failed")
    assert (warning["instance"], warning["committed"]) == ("generator-0", True)
    control.resume = original
    world.generator.calls.release()
    await world.train(1, 1)


async def test_scenario_75_an_episode_sealed_between_commit_and_cut_belongs_to_the_ledger(players):
    world = players()
    await begun(world, 3)
    control = world.generator.environments[0]
    original, ledger = control.commit, world.controller.parts.ledger
    sealed: list[str] = []

    async def commit(*arguments: Any) -> Exported:
        exported = await original(*arguments)
        episode = exported.episodes[0]
        group_id, index = episode.rollout_id.rsplit("_g", 1)
        async with world.controller.parts.barrier.mutation("seal") as mutation:
            turns = ledger.staged(episode.rollout_id)
            result = SealedSibling(tuple(t.key for t in turns), tuple(t.digest for t in turns), 0.5, False, 3)
            ledger.seal(mutation, group_id, int(index), result)
        sealed.append(episode.rollout_id)
        return exported

    control.commit = commit
    bundle = await world.snapshot(1)
    assert sealed[0] not in {episode.rollout_id for episode in bundle.state.episodes}
    assert sealed[0] in {
        rollout_id(g.group_id, s.generation_index) for g in bundle.state.ledger for s in g.siblings if s.sealed
    }


async def test_scenario_77_deadlines_stand_still_while_the_environment_is_closed(players):
    world = players(async_rl={"rollout_timeout_s": 1.5})
    await begun(world)
    control = world.generator.environments[0]
    original = control.commit

    async def slow(*arguments: Any) -> Exported:
        await asyncio.sleep(2.0)  # longer than any deadline
        return await original(*arguments)

    control.commit = slow
    await world.snapshot(1)
    world.generator.calls.release()
    await world.train(1, 1)
    assert world.trace.of("attempt_abandoned") == []
    assert world.trace.of("environment_parked")[0]["seconds"] > 1.5


async def test_scenario_78_a_train_step_that_begins_to_commit_discards_the_attempt(players):
    world = players()
    await begun(world)
    control, state = world.generator.environments[0], world.controller.parts.state
    original = control.commit

    async def commit(*arguments: Any) -> Exported:
        state.in_commit_window = True
        return await original(*arguments)

    control.commit = commit
    outcome = await world.controller.attempt_snapshot(1, force=True)
    state.in_commit_window = False
    assert (outcome.outcome, outcome.reason) == ("skipped", "trainer_state_changed")
    assert not world.generator.tables[0].is_closed


async def test_a_failed_attempt_of_an_episode_is_run_again_from_its_start_and_its_turns_are_cleared(players):
    world = players()
    await begun(world)
    rollout = world.generator.calls.sampled[0][0]
    table = next(t for t in world.generator.tables if EpisodeId(rollout, 0) in t._episodes)
    table.retire([EpisodeId(rollout, 0)])  # it is lost there
    world.generator.calls.release()
    await world.train(1, 1)
    (abandoned,) = world.trace.of("attempt_abandoned")
    assert (abandoned["rollout_id"], abandoned["reason"]) == (rollout, "infrastructure")
    assert [turn for name, turn in world.generator.calls.sampled if name == rollout].count(0) == 2


async def test_a_snapshot_with_episodes_is_refused_by_a_run_without_their_environment(players, make_world):
    world = players()
    await begun(world)
    await world.snapshot(1)
    await world.kill()
    world.boot()
    world.controller = None
    player, world.new_generator = world.generator, lambda: _without_environments(world.generator)
    world.boot()
    with pytest.raises(RestoreRefused, match="running episodes of tally.*restore with the data.task"):
        await world.controller.restore(world.plan())
    assert player is not world.generator


def _without_environments(player: Any) -> Any:
    player.fake.environments = ()
    return player.fake


async def test_the_environment_is_left_alone_when_no_group_is_to_be_restored_at_its_turns(players):
    world = players("sibling")
    await begun(world)
    await world.snapshot(1)
    assert world.trace.of("environment_parked") == []
    assert {group.level for group in world.controller.parts.ledger.groups()} == {RecoveryLevel.SIBLING}
