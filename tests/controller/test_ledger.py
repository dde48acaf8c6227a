"""The recovery ledger: one life cycle with one owner, and what of it survives a restart."""

from dataclasses import replace

import pytest

from gpu_workers.controller.barrier import Cut, Mutation
from gpu_workers.controller.recovery_ledger import RecoveryLedger, normalize_for_restart
from storage.errors import BrokenInvariant, FinalizationUnknown
from storage.records import AttemptStatus, GroupStatus, PromptRef, RecoveryLevel, SealedSibling

PROMPT = PromptRef(7, 0, "ab" * 32)
GROUP = PROMPT.group_id
LIVE = Mutation("test")


def _ledger(level: RecoveryLevel = RecoveryLevel.SIBLING) -> RecoveryLedger:
    ledger = RecoveryLedger()
    ledger.reserve(LIVE, PROMPT, level=level, batch=0, order=0, size=3)
    return ledger


def _sealed(index: int, reward: float = 1.0) -> SealedSibling:
    return SealedSibling((f"{GROUP}_g{index}/a0/t0",), ("cd" * 32,), reward, False, 5)


def _running() -> RecoveryLedger:
    ledger = _ledger()
    ledger.admit(LIVE, 0, target_step=4, start_version=3)
    ledger.dispatch(LIVE, GROUP)
    return ledger


def test_a_reserved_group_cannot_be_dispatched():
    with pytest.raises(BrokenInvariant, match=f"group {GROUP} is dispatched before it was admitted"):
        _ledger().dispatch(LIVE, GROUP)


def test_a_group_is_admitted_once():
    ledger = _running()
    with pytest.raises(BrokenInvariant, match="admitted twice"):
        ledger.admit(LIVE, 0, target_step=5, start_version=3)
    assert ledger.group(GROUP).target_step == 4


def test_sealing_again_with_an_equal_result_is_a_no_op_and_with_another_one_an_error():
    ledger = _running()
    assert ledger.seal(LIVE, GROUP, 1, _sealed(1)) is True
    assert ledger.seal(LIVE, GROUP, 1, _sealed(1)) is False
    with pytest.raises(BrokenInvariant, match=f"{GROUP}_g1 is sealed again with another result"):
        ledger.seal(LIVE, GROUP, 1, _sealed(1, reward=0.0))
    with pytest.raises(BrokenInvariant, match="can't be abandoned"):
        ledger.abandon(LIVE, GROUP, 1, infrastructure=True)


def test_the_last_sealed_sibling_makes_a_group_ready_to_finalize():
    ledger = _running()
    for index in range(3):
        assert ledger.group(GROUP).status is GroupStatus.GENERATING
        ledger.seal(LIVE, GROUP, index, _sealed(index))
    assert ledger.group(GROUP).status is GroupStatus.READY_TO_FINALIZE


def test_a_group_leaves_only_after_it_was_finalized_and_is_not_discarded_meanwhile():
    ledger = _running()
    with pytest.raises(BrokenInvariant, match="finalized while generating"):
        ledger.begin_finalize(LIVE, GROUP)
    for index in range(3):
        ledger.seal(LIVE, GROUP, index, _sealed(index))
    with pytest.raises(BrokenInvariant, match="released while ready_to_finalize, not while it is finalized"):
        ledger.release(LIVE, GROUP)
    ledger.begin_finalize(LIVE, GROUP)
    with pytest.raises(BrokenInvariant, match="discarded while it is finalizing"):
        ledger.discard(LIVE, GROUP)
    ledger.release(LIVE, GROUP)
    assert GROUP not in ledger


def test_what_nobody_knows_the_outcome_of_is_neither_discarded_nor_captured():
    ledger = _running()
    for index in range(3):
        ledger.seal(LIVE, GROUP, index, _sealed(index))
    with pytest.raises(BrokenInvariant, match="stopped while ready_to_finalize"):
        ledger.stop_finalizing(LIVE, GROUP)
    ledger.begin_finalize(LIVE, GROUP)
    ledger.mark_finalization_unknown(LIVE, GROUP)
    with pytest.raises(BrokenInvariant, match="discarded while it is finalization_unknown"):
        ledger.discard(LIVE, GROUP)
    with pytest.raises(FinalizationUnknown, match=f"{GROUP} is finalization_unknown: nothing can be saved"):
        ledger.capture(Cut("test"))


def test_state_does_not_change_outside_the_barrier():
    ledger, dead, other = _running(), Mutation("over"), replace(PROMPT, prompt_id=8)
    dead.expire()
    before = ledger.groups()
    verbs = [
        lambda: ledger.reserve(dead, other, level=RecoveryLevel.SIBLING, batch=1, order=1, size=2),
        lambda: ledger.admit(dead, 0, target_step=0, start_version=0),
        lambda: ledger.dispatch(dead, GROUP),
        lambda: ledger.seal(dead, GROUP, 0, _sealed(0)),
        lambda: ledger.abandon(dead, GROUP, 0, infrastructure=True),
        lambda: ledger.begin_finalize(dead, GROUP),
        lambda: ledger.stop_finalizing(dead, GROUP),
        lambda: ledger.mark_finalization_unknown(dead, GROUP),
        lambda: ledger.release(dead, GROUP),
        lambda: ledger.discard(dead, GROUP),
        lambda: ledger.load(dead, []),
    ]
    for verb in verbs:
        with pytest.raises(BrokenInvariant, match="after its barrier section ended"):
            verb()
    assert ledger.groups() == before


@pytest.mark.parametrize(
    ("level", "attempts", "kept"),
    [(RecoveryLevel.SIBLING, [1, 0, 0], [1]), (RecoveryLevel.PROMPT_GROUP, [1, 1, 0], [])],
)
def test_a_restart_keeps_what_the_level_says(level, attempts, kept):
    ledger = _ledger(level)
    ledger.admit(LIVE, 0, target_step=4, start_version=3)
    running, sealed, failed = ledger.dispatch(LIVE, GROUP)
    ledger.seal(LIVE, GROUP, sealed.generation_index, _sealed(1))
    never_started = replace(failed, status=AttemptStatus.RESERVED)
    group = replace(ledger.group(GROUP), siblings=(running, ledger.group(GROUP).siblings[1], never_started))
    restarted, unneeded = normalize_for_restart(group)
    assert [s.attempt for s in restarted.siblings] == attempts
    assert [s.generation_index for s in restarted.siblings if s.sealed is not None] == kept
    assert unneeded == (() if kept else (f"{GROUP}_g1/a0/t0",))
    assert (restarted.target_step, restarted.start_version) == (4, 3)


async def test_invariant_6_sealed_siblings_are_not_run_again_and_the_level_is_the_groups_own(make_world):
    world = make_world(rollout_recovery={"target_level": "sibling"})
    world.boot()
    world.generator.held = lambda group_id, index: index == 1
    controller = await world.restore(world.plan())
    await world.settle(lambda: controller.describe()["sealed_siblings"] == 8)
    await world.snapshot(1)
    await world.kill()

    controller = await world.start()
    await world.train(1, 1)
    await world.snapshot(1)
    restored = set(world.passed_by(4))
    again = [rollout for rollout in world.generator.generated if rollout.rsplit("_g")[0] in restored]
    assert sorted(again) == sorted(f"{group_id}_g1" for group_id in restored)
    attempts = {e["rollout_id"]: e["attempt"] for e in world.trace.of("attempt_dispatched")}
    assert {attempts[rollout] for rollout in again} == {1}
    await world.kill()


async def test_a_changed_recovery_level_does_not_reinterpret_groups_that_exist(make_world):
    world = make_world()
    world.boot()
    first = world.passed_by(4)
    world.generator.held = lambda group_id, index: index == 1 and group_id not in first
    controller = await world.restore(world.plan())
    await controller.train_steps(1, 1)
    await world.settle(lambda: controller.describe()["sealed_siblings"] >= 4)
    saved = (await world.snapshot(1)).state
    await world.kill()
    world.change("rollout_recovery", target_level="prompt_group")
    world.boot()
    world.generator.held = lambda group_id, index: True
    controller = await world.restore(world.plan())
    assert sum(s.sealed is not None for g in saved.ledger for s in g.siblings) >= 4
    for group in saved.ledger:
        kept = controller.parts.ledger.group(group.group_id)
        assert kept.level is RecoveryLevel.SIBLING
        assert [s.sealed for s in kept.siblings] == [s.sealed for s in group.siblings]
    await world.kill()


async def test_at_level_prompt_group_a_restart_runs_every_sibling_again_once(make_world):
    world = make_world(rollout_recovery={"target_level": "prompt_group"})
    world.boot()
    world.generator.held = lambda group_id, index: index == 1
    controller = await world.restore(world.plan())
    await world.settle(lambda: controller.describe()["sealed_siblings"] == 8)
    bundle = await world.snapshot(1)
    assert len(bundle.rows) == 8
    await world.kill()
    controller = await world.start()
    abandoned = world.trace.of("attempt_abandoned")
    assert len(abandoned) == 16
    assert {e["reason"] for e in abandoned} == {"restart"}
    await world.train(1, 2)
    assert len(set(world.generator.generated)) == len(world.generator.generated)
    await world.kill()


async def test_agents_and_tasks_have_levels_of_their_own_which_each_group_keeps(make_world):
    levels = {"target_level": "sibling", "per_task": {"sort8": "turn"}, "per_agent": {"agent-1": "prompt_group"}}
    world = make_world(rollout_recovery=levels)
    world.boot()
    world.generator.held = lambda group_id, index: index == 1
    controller = await world.restore(world.plan())
    await world.settle(lambda: controller.describe()["sealed_siblings"] == 8)
    saved = (await world.snapshot(1)).state
    wanted = {0: RecoveryLevel.TURN, 1: RecoveryLevel.PROMPT_GROUP}  # an agent's precedes its task's
    assert {group.prompt.prompt_id % 2 for group in saved.ledger} == {0, 1}
    assert all(group.level is wanted[group.prompt.prompt_id % 2] for group in saved.ledger)
    await world.kill()
    await world.start()
    rerun: dict[str, set[int]] = {}
    for event in world.trace.of("attempt_abandoned"):
        group_id, _, index = event["rollout_id"].rpartition("_g")
        rerun.setdefault(group_id, set()).add(int(index))
    begun = [group for group in saved.ledger if any(sibling.sealed for sibling in group.siblings)]
    assert {group.level for group in begun} == set(wanted.values())
    for group in begun:  # what was sealed is run again only at the level that the group was reserved with
        assert rerun[group.group_id] == ({1} if group.level is RecoveryLevel.TURN else {0, 1})
    await world.kill()
