"""What a restart does to lengths and rewards: found where it is, not found where it is not, the same each time."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from storage.history import History
from storage.records import RecoveryLevel
from storage.restart_bias import Comparison, bias_rows, restart_bias, t_quantile

LEVELS = ("prompt_group", "sibling", "turn", "prefix")
GROUPS = 60


def _published(
    t: float, process: str, group: str, tokens: int, rewards: list[float], start_version: int = 20
) -> dict[str, Any]:
    facts = {"group_id": group, "num_tokens": tokens, "rewards": rewards, "start_version": start_version}
    return {"t": t, "run_process": process, "event": "group_published", **facts}


class Stopped:
    """A run that was stopped once: `GROUPS` groups were finished before the cut and as many were unfinished."""

    def __init__(self, run: Any, level: str) -> None:
        recovery = {"target_level": RecoveryLevel(level)}
        self._run = run
        config = run.config.model_copy(
            update={"rollout_recovery": run.config.rollout_recovery.model_copy(update=recovery)}
        )
        state, rows = run.make.state()
        self.cut = run.writer.write(run.bundle(state, rows, cut_time=1000.0, config=config))

    def history(self, seed: int, *, longer: float = 0.0, better: float = 0.0) -> History:
        """Groups of four rollouts whose mean lengths are normal, deviation 10; what was interrupted is so much longer
        and better.
        """
        rng = np.random.default_rng(seed)
        events = []
        for number in range(2 * GROUPS):
            interrupted = number >= GROUPS
            tokens = int(4 * (rng.normal(100, 10) + longer * interrupted))
            rewards = [float(r) + better * interrupted for r in rng.uniform(0, 1, size=4)]
            process = self._run.log.writer
            if interrupted:
                event = {"t": 2000.0, "run_process": "second", "event": "redispatched", "group_id": f"e0-p{number}"}
                events += [_restored(self.cut.sequence)] * (not any(e["run_process"] == "second" for e in events))
                events.append({**event, "siblings": [0, 1, 2, 3]})
                process = "second"
            events.append(_published(2100.0 if interrupted else 900.0, process, f"e0-p{number}", tokens, rewards))
        return History(events, self._run.log.read())


def _restored(sequence: int) -> dict[str, Any]:
    return {"t": 1900.0, "run_process": "second", "event": "checkpoint_restored", "sequence": sequence, "step": 0}


@pytest.fixture
def stopped(memory_store: Any, open_run: Callable[..., Any]) -> Callable[[str], Stopped]:
    """Runs of a level. The second process publishes no bundle, so that its level is that of the one it restored."""
    return lambda level: Stopped(open_run(memory_store, writer=f"first-{level}").claim(), level)


def _by_measure(history: History) -> dict[str, Comparison]:
    return {one.measure: one for one in restart_bias(history)}


@pytest.mark.parametrize("level", LEVELS)
def test_a_known_effect_is_found_at_its_size(stopped: Callable[[str], Stopped], level: str) -> None:
    found = _by_measure(stopped(level).history(1, longer=12.0, better=0.3))
    for measure, effect in (("tokens", 12.0), ("reward", 0.3)):
        one = found[measure]
        assert one.level == level
        assert one.is_biased
        assert one.low is not None
        assert one.high is not None
        assert one.low <= effect <= one.high
        assert one.interrupted is not None
        assert one.interrupted.groups == GROUPS


def test_without_an_effect_nineteen_of_twenty_intervals_hold_zero(stopped: Callable[[str], Stopped]) -> None:
    run = stopped("sibling")
    biased = [one.is_biased for seed in range(200) for one in restart_bias(run.history(seed))]
    assert len(biased) == 400
    assert 0.02 < sum(biased) / len(biased) < 0.08


def test_the_numbers_are_those_of_numpy_and_the_same_each_time(stopped: Callable[[str], Stopped]) -> None:
    history = stopped("turn").history(7, longer=3.0)
    assert restart_bias(history) == restart_bias(history)
    one = _by_measure(history)["tokens"]
    published = [event for event in history.events if event["event"] == "group_published"]
    values = [
        np.array([e["num_tokens"] / 4 for e in published if e["run_process"] == p]) for p in ("second", "first-turn")
    ]
    assert one.interrupted is not None
    assert one.others is not None
    assert (one.interrupted.mean, one.others.mean) == tuple(float(v.mean()) for v in values)
    assert one.interrupted.median == pytest.approx(float(np.median(values[0])))
    spread = np.sqrt(sum(v.var(ddof=1) / GROUPS for v in values))
    assert one.high is not None
    assert one.difference is not None
    assert one.high - one.difference == pytest.approx(1.98 * spread, rel=0.01)


def test_groups_of_another_time_do_not_count_since_a_run_learns(stopped: Callable[[str], Stopped]) -> None:
    history = stopped("sibling").history(3)
    early = [_published(800.0, "first-sibling", f"e1-p{n}", 40, [0.0] * 4, start_version=14) for n in range(50)]
    later = History([*history.events, *early], history.manifests)
    assert restart_bias(later) == restart_bias(history)
    (tokens, reward) = restart_bias(later, near_versions=6)
    assert tokens.is_biased
    assert reward.is_biased


def test_a_group_is_of_the_level_that_it_was_reserved_with(stopped: Callable[[str], Stopped]) -> None:
    history = stopped("sibling").history(1)
    facts = {"t": 800.0, "run_process": "first-sibling", "event": "group_reserved", "level": "turn"}
    reserved = [{**facts, "group_id": f"e0-p{number}"} for number in range(GROUPS - 10, GROUPS + 20)]
    found = restart_bias(History([*reserved, *history.events], history.manifests))
    counts = {(one.level, one.interrupted.groups, one.others.groups) for one in found if one.interrupted and one.others}
    assert counts == {("turn", 20, 10), ("sibling", GROUPS - 20, GROUPS - 10)}


def test_a_run_that_was_never_stopped_has_one_side_only(stopped: Callable[[str], Stopped]) -> None:
    history = stopped("sibling").history(1)
    first = [event for event in history.events if event["run_process"] != "second"]
    (tokens, reward) = restart_bias(History(first, history.manifests))
    assert (tokens.interrupted, tokens.difference, tokens.is_biased) == (None, None, False)
    assert reward.others is not None
    assert restart_bias(History([], ())) == []


def test_a_line_is_flat_and_names_both_sides(stopped: Callable[[str], Stopped]) -> None:
    row, _ = bias_rows(restart_bias(stopped("turn").history(1, longer=12.0)))
    assert (row["level"], row["measure"], row["biased"]) == ("turn", "tokens", True)
    assert row["interrupted_groups"] == row["others_groups"] == GROUPS
    assert row["difference"] == pytest.approx(row["interrupted_mean"] - row["others_mean"])


# Two-sided 95 % quantiles of Student's t, from the tables of the NIST handbook.
T_TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 10: 2.228, 30: 2.042, 100: 1.984}


@pytest.mark.parametrize("freedom", T_TABLE)
def test_quantiles_are_those_of_the_tables(freedom: int) -> None:
    assert t_quantile(freedom) == pytest.approx(T_TABLE[freedom], rel=0.006)
