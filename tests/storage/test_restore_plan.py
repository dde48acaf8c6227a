"""The estimates of a restore are sums and rates that can be made by hand."""

from dataclasses import replace
from typing import Any

import pytest

from storage.history import History
from storage.records import AttemptStatus, Progress, RecoveryLevel, RolloutState, Sibling, TrainedGroup
from storage.restore_figures import RestoreFigures, side_by_side
from storage.restore_outcome import outcome_of
from storage.restore_plan import Rates, plan_of
from storage.snapshot_reader import RestoredBundle


def _event(t: float, event: str, process: str = "first", **fields: Any) -> dict[str, Any]:
    return {"t": t, "run_process": process, "event": event, **fields}


def _history(run: Any) -> History:
    """Two processes: 4 attempts of 10, 20, 30 and 40 tokens in 5 + 15 seconds, and two steps of 3 and 5 seconds."""
    events = [
        _event(100, "attempt_dispatched", rollout_id="e0-p1_g0", attempt=0),
        _event(104, "attempt_sealed", rollout_id="e0-p1_g0", attempt=0, num_tokens=10),
        _event(105, "attempt_sealed", rollout_id="e0-p1_g1", attempt=0, num_tokens=20),
        _event(106, "train_step", step=1, version=1, group_ids=["e0-p1"], seconds=10.0, waited_s=7.0),
        _event(200, "attempt_dispatched", "second", rollout_id="e0-p2_g0", attempt=0),
        _event(210, "attempt_sealed", "second", rollout_id="e0-p2_g0", attempt=0, num_tokens=30),
        _event(215, "attempt_sealed", "second", rollout_id="e0-p2_g1", attempt=0, num_tokens=40),
        _event(216, "train_step", "second", step=1, version=1, group_ids=["e0-p2"], seconds=5.0),
    ]
    return History(events, run.log.read())


def _bundle(run: Any, level: RecoveryLevel) -> RestoredBundle:
    """Two recorded groups of one step, a finished group, one sealed and one running sibling, and an episode with two
    finished turns beside a sibling that just began; cut at 211.
    """
    make = run.make
    finished, rows = make.buffered(1)
    sealed, own = make.ledger_group(2, level=level)
    playing, episodes, calls = make.episode_group(3)
    recorded = [make.buffered(4), make.buffered(5)]
    trained = tuple(TrainedGroup(1, place, group) for place, (group, _) in enumerate(recorded))
    rows = {**rows, **own, **calls, **recorded[0][1], **recorded[1][1]}
    state = RolloutState(
        Progress(train_steps=1), ledger=(sealed, playing), buffer=(finished,), trained=trained, episodes=episodes
    )
    manifest = run.writer.write(run.bundle(state, rows, cut_time=211.0))
    return run.read(manifest)


@pytest.fixture
def second(memory_store: Any, open_run: Any) -> Any:
    return open_run(memory_store, writer="second").claim()


def test_rates_are_those_of_all_processes_and_leave_out_what_a_step_waited_for(second: Any) -> None:
    rates = Rates.of(_history(second))
    assert rates.tokens_per_attempt == 100 / 4
    assert rates.tokens_per_s == 100 / (5 + 15)
    assert rates.step_s == (3 + 5) / 2


def test_a_run_without_any_finished_work_has_no_rates_and_its_estimates_stay_open(second: Any) -> None:
    nothing = History([], ())
    assert Rates.of(nothing) == Rates(None, None, None)
    plan = plan_of(_bundle(second, RecoveryLevel.SIBLING), nothing)
    assert (plan.tokens_to_generate, plan.generation_s, plan.replay_s) == (None, None, None)
    assert (plan.siblings_rerun, plan.lost_s) == (2, 0.0)


@pytest.mark.parametrize("level", [RecoveryLevel.PROMPT_GROUP, RecoveryLevel.SIBLING])
def test_what_is_kept_run_again_and_dropped_follows_from_the_level(second: Any, level: RecoveryLevel) -> None:
    plan = plan_of(_bundle(second, level), _history(second))
    keeps = level is RecoveryLevel.SIBLING
    assert (plan.groups_reused, plan.groups_unfinished, plan.siblings_reused) == (1, 2, int(keeps))
    assert (plan.siblings_resumed, plan.turns_kept, plan.turn_tokens) == (1, 2, 2)
    assert plan.siblings_rerun == 1 + 1 + (not keeps)
    assert plan.tokens_kept == 4 + 2 * keeps + 2
    assert (plan.attempts_dropped, plan.tokens_dropped) == ((2, 0) if keeps else (3, 2))
    to_generate = plan.siblings_rerun * 25 + (25 - 2)
    assert (plan.tokens_to_generate, plan.generation_s) == (to_generate, to_generate / 5)
    assert (plan.steps_to_replay, plan.replay_s) == (1, 4.0)
    assert (plan.steps_lost, plan.tokens_lost, plan.lost_s) == (0, 40, 216 - 211)


def test_a_sibling_in_the_middle_of_its_response_is_resumed_and_its_tokens_need_not_be_generated(second: Any) -> None:
    group, (call,), rows = second.make.prefix_group(6, cuts=(3, 7))
    state = RolloutState(Progress(), ledger=(group,), partial_calls=(call,))
    bundle = second.read(second.writer.write(second.bundle(state, rows, cut_time=211.0)))
    plan = plan_of(bundle, _history(second))
    assert (plan.siblings_reused, plan.siblings_resumed, plan.siblings_rerun) == (1, 1, 0)
    assert (plan.calls_continued, plan.tokens_continued) == (1, 7)
    assert (plan.turns_kept, plan.turn_tokens, plan.tokens_kept) == (0, 0, 2 + 7)
    assert (plan.tokens_to_generate, plan.generation_s) == (25 - 7, (25 - 7) / 5)
    assert plan.attempts_dropped == 0


def test_an_episode_in_the_middle_of_a_model_call_keeps_the_tokens_of_both(second: Any) -> None:
    group, episodes, rows = second.make.episode_group(7, turns=2)
    group = replace(group, level=RecoveryLevel.PREFIX)
    call, chunks = second.make.partial_call(group, 0, turn=2)
    state = RolloutState(Progress(), ledger=(group,), episodes=episodes, partial_calls=(call,))
    bundle = second.read(second.writer.write(second.bundle(state, rows | chunks, cut_time=211.0)))
    plan = plan_of(bundle, _history(second))
    assert (plan.siblings_resumed, plan.siblings_rerun, plan.calls_continued) == (1, 1, 1)
    assert (plan.turns_kept, plan.turn_tokens, plan.tokens_continued, plan.tokens_kept) == (2, 2, 5, 7)
    assert plan.tokens_to_generate == 25 + (25 - 7)


def _restored_with_calls(run: Any, *more: dict[str, Any]) -> RestoreFigures:
    """What a restore came to that continued two calls with 7 and 5 tokens, sealed with 20 and 30."""
    group, _, rows = run.make.prefix_group(6)
    calls = [run.make.partial_call(replace(group, siblings=(Sibling(0), Sibling(1))), i) for i in range(2)]
    running = replace(group, siblings=tuple(Sibling(i, status=AttemptStatus.DISPATCHED) for i in range(2)))
    state = RolloutState(Progress(), ledger=(running,), partial_calls=tuple(call for call, _ in calls))
    rows = {row_id: row for _, chunks in calls for row_id, row in chunks.items()}
    manifest = run.writer.write(run.bundle(state, rows, cut_time=211.0))
    restored = {"sequence": manifest.sequence, "anchor_sequence": None, "step": 0, "cut_time": 211.0}
    restored |= {"calls_continued": 2, "tokens_continued": 12, "tokens_kept": 12, "siblings_resumed": 2}
    events = [
        _event(300, "checkpoint_restored", "third", **restored),
        _event(301, "redispatched", "third", group_id="e0-p6", siblings=[0, 1]),
        *(
            _event(302 + n, "attempt_resumed", "third", rollout_id=f"e0-p6_g{n}", attempt=0, tokens=7 - 2 * n)
            for n in (0, 1)
        ),
        *more,
        _event(310, "attempt_sealed", "third", rollout_id="e0-p6_g0", attempt=0, num_tokens=20),
        _event(311, "attempt_sealed", "third", rollout_id="e0-p6_g1", attempt=0, num_tokens=30),
    ]
    history = History([*_history(run).events, *events], run.log.read())
    outcome = outcome_of(history, history.lives[-1])
    assert outcome is not None
    assert outcome.is_complete
    return outcome.figures


def test_what_a_restore_came_to_counts_the_tokens_that_its_calls_went_on_from(second: Any) -> None:
    found = _restored_with_calls(second)
    assert (found.calls_continued, found.tokens_continued, found.tokens_kept) == (2, 12, 12)
    assert (found.turn_tokens, found.tokens_to_generate) == (0, 20 + 30 - 12)


def test_tokens_that_a_generator_could_not_continue_were_not_kept(second: Any) -> None:
    lost = _event(305, "prefix_discarded", "third", rollout_id="e0-p6_g1", attempt=0, tokens=5, reason="prompt")
    found = _restored_with_calls(second, lost)
    assert (found.calls_continued, found.tokens_continued, found.tokens_kept) == (1, 7, 7)
    assert (found.turn_tokens, found.tokens_to_generate) == (0, 20 + 30 - 7)


def test_tokens_that_were_discarded_after_a_later_interruption_are_no_loss_of_the_restore(second: Any) -> None:
    rollout = {"rollout_id": "e0-p6_g1", "attempt": 0}
    died = _event(305, "attempt_interrupted", "third", **rollout, reason="infrastructure", tokens=15)
    lost = _event(306, "prefix_discarded", "third", **rollout, tokens=15, reason="weights")
    found = _restored_with_calls(second, died, lost)
    assert (found.calls_continued, found.tokens_continued) == (2, 12)


def test_without_the_replay_buffer_its_groups_are_run_again_too(second: Any) -> None:
    bundle = _bundle(second, RecoveryLevel.SIBLING)
    kept, discarded = (plan_of(bundle, _history(second), keeps_buffer=keeps) for keeps in (True, False))
    assert (discarded.groups_reused, discarded.groups_unfinished) == (0, kept.groups_unfinished + 1)
    assert discarded.siblings_rerun == kept.siblings_rerun + 2
    assert discarded.attempts_dropped == kept.attempts_dropped + 2
    assert (kept.tokens_kept - discarded.tokens_kept, discarded.tokens_dropped) == (4, 4)


def test_plan_and_actual_stand_side_by_side_and_what_is_not_known_is_empty(second: Any) -> None:
    plan = plan_of(_bundle(second, RecoveryLevel.SIBLING), History([], ()))
    lines = {what: (planned, actual) for what, planned, actual in side_by_side(plan, None)}
    assert lines["siblings, run from their start"] == ("2", "")
    assert lines["seconds, for these"] == ("", "")
    assert lines["seconds between the cut and the stop"] == ("0.0", "")
