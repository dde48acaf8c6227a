"""Every figure equals what the simulated runs know themselves, however the trace is cut into batches and files."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from storage.analytics.group_time import STAGES, group_time, stage_seconds
from storage.analytics.interruptions import interruptions
from storage.analytics.journeys import Journeys, follow
from storage.analytics.lives import lives_of
from storage.analytics.lost_progress import lost_progress
from storage.analytics.snapshot_costs import snapshot_attempts, snapshot_summary
from storage.analytics.steps import staleness, train_steps
from storage.analytics.stops import parked, stops
from storage.analytics.throughput import throughput_around_stops
from storage.filesystem import Store, open_store
from storage.history import History
from storage.layout import RunLayout
from storage.manifests import Manifest
from storage.trace_analysis import stop_costs
from storage.trace_compaction import compact_process
from storage.trace_reader import open_trace
from tests.storage.simulated_trace import SimulatedRun

SEEDS = range(12)


@contextmanager
def analysed(store: Store, *runs: SimulatedRun, batch_events: int = 61) -> Iterator[tuple[Any, pl.DataFrame, Journeys]]:
    """Trace, lives and journeys of runs that were written to the store."""
    logs: Mapping[str, Any] = {run.run: run.log for run in runs}
    with open_trace(store, [run.layout for run in runs], part_events=50) as trace, tempfile.TemporaryDirectory() as at:
        lives = lives_of(trace, logs)
        yield trace, lives, follow(trace, lives, Path(at), batch_events=batch_events)


@pytest.fixture(params=SEEDS)
def run(request: pytest.FixtureRequest) -> SimulatedRun:
    """A run with up to three stops."""
    return SimulatedRun("run", request.param, stops=request.param % 4)


def test_every_figure_of_a_run_is_the_one_it_knows_itself(memory_store: Store, run: SimulatedRun) -> None:
    run.write(memory_store)
    truth = run.truth
    with analysed(memory_store, run) as (trace, lives, journeys):
        steps = train_steps(trace, lives, journeys)
        costs = stops(trace, lives, journeys)
        groups = group_time(journeys).collect()
        (times,) = stage_seconds(journeys).to_dicts() or [{"groups": 0, "crossed": 0}]
        ages = staleness(journeys)
        closed = parked(trace)["parked_s"].sum()
    reached = _steps_that_count(run)
    assert dict(steps.select("step", "batch_age").rows()) == {step: truth.ages[step] for step in reached}
    assert steps["recorded_batch_age"].to_list() == steps["batch_age"].to_list()
    assert dict(ages.select("staleness", "num_tokens").rows()) == truth.staleness
    assert costs["stop"].to_list() == sorted(truth.thrown_away)
    for cost in costs.iter_rows(named=True):
        again, retrained = truth.redone[cost["stop"]], truth.retrained[cost["stop"]]
        assert cost["thrown_away_s"] == pytest.approx(truth.thrown_away[cost["stop"]])
        assert (cost["redone"], cost["redone_s"]) == (len(again), pytest.approx(sum(again)))
        assert (cost["retrained"], cost["retrained_s"]) == (len(retrained), pytest.approx(sum(retrained)))
    assert groups.height == len(truth.stages)
    for group in groups.iter_rows(named=True):
        expected = truth.stages[(group["group_id"], group["life"])]
        assert tuple(group[stage] for stage in STAGES) == pytest.approx(expected, abs=1e-6)
    assert (times["groups"], times["crossed"]) == (len(truth.stages), truth.crossed)
    assert closed == pytest.approx(truth.parked)


def test_the_command_line_and_the_report_say_the_same_of_what_was_thrown_away(run: SimulatedRun) -> None:
    events = [event for life in run.events for event in life]
    costs = stop_costs(History(events, run.log))
    assert [cost.thrown_away_s for cost in costs] == pytest.approx(
        [run.truth.thrown_away[n + 1] for n in range(len(costs))]
    )


def _steps_that_count(run: SimulatedRun) -> set[int]:
    """Steps of all lives, but those behind the one that a later life went on from."""
    count: set[int] = set()
    for events in run.events:
        restored = next((event["step"] for event in events if event["event"] == "checkpoint_restored"), 0)
        count = {step for step in count if step <= restored}
        count |= {event["step"] for event in events if event["event"] == "train_step"}
    return count


def test_the_simulated_runs_have_everything_that_is_to_be_found() -> None:
    runs = [SimulatedRun("run", seed, stops=seed % 4) for seed in SEEDS]
    names = {event["event"] for run in runs for events in run.events for event in events}
    assert {"attempt_resumed", "attempt_abandoned", "group_discarded", "checkpoint_restored"} <= names
    assert {"attempt_interrupted", "attempt_refused", "prefix_discarded"} <= names
    truths = [run.truth for run in runs]
    assert any(any(t.thrown_away.values()) for t in truths)
    assert any(any(t.redone.values()) for t in truths)
    assert any(any(t.retrained.values()) for t in truths)
    assert any(t.crossed for t in truths)
    assert any(event.get("replayed") for run in runs for events in run.events for event in events)


def test_batches_files_and_compaction_change_nothing(tmp_path: Path) -> None:
    run, store = SimulatedRun("run", 3, stops=3), open_store(str(tmp_path))
    run.write(store)
    found = []
    for batch_events, compacted in ((1, ""), (10_000, ""), (23, "controller-1"), (23, "controller-3")):
        if compacted:
            assert compact_process(store, run.layout, compacted, part_events=40) is not None
        with analysed(store, run, batch_events=batch_events) as (trace, lives, journeys):
            order = ("group_id", "life", "step_line")
            found.append((train_steps(trace, lives, journeys), journeys.groups.sort(order).collect()))
            found[-1] += (journeys.attempts.sort("rollout_id", "life", "attempt", "dispatched_at").collect(),)
    assert all(mine.equals(first) for other in found[1:] for mine, first in zip(other, found[0], strict=True))


def test_lives_are_in_the_order_of_their_claims_whatever_their_clocks_say(memory_store: Store) -> None:
    run = SimulatedRun("run", 7, stops=3)
    for event in run.events[2]:
        event["t"] -= 100_000.0
    run.write(memory_store)
    with analysed(memory_store, run) as (trace, lives, journeys):
        assert lives["run_process"].to_list() == ["life-0", "life-1", "life-2", "life-3"]
        steps = train_steps(trace, lives, journeys)
        assert steps["recorded_batch_age"].to_list() == steps["batch_age"].to_list()
        assert (stops(trace, lives, journeys)["down_s"] >= 0).all()


def test_throughput_around_a_stop_counts_what_was_sealed_and_trained_near_it(memory_store: Store) -> None:
    run = SimulatedRun("run", 1, stops=1)
    run.write(memory_store)
    with analysed(memory_store, run) as (trace, lives, _):
        found = throughput_around_stops(trace, lives, window_s=20.0, bins=10)
    stopped_at, started_at = run.events[0][-1]["t"], run.events[1][0]["t"]
    assert found["after_s"].to_list() == [2.0 * (n + 0.5) for n in range(-10, 10)]
    assert all(found.filter(half)["tokens_per_s"].sum() > 0 for half in (pl.col("after_s") < 0, pl.col("after_s") > 0))
    for after, tokens, groups in found.select("after_s", "tokens_per_s", "trained_groups_per_s").iter_rows():
        origin, events = (stopped_at, run.events[0]) if after < 0 else (started_at, run.events[1])
        lower, upper = origin + after - 1.0, origin + after + 1.0
        near = [e for e in events if lower <= e["t"] < upper or (e["t"] == stopped_at and after == -1.0)]
        sealed = [e["num_tokens"] for e in near if e["event"] == "attempt_sealed"]
        trained = [len(e["group_ids"]) for e in near if e["event"] == "train_step"]
        assert (tokens, groups) == pytest.approx((sum(sealed) / 2.0, sum(trained) / 2.0))


def test_snapshots_are_listed_over_time_and_summed_by_outcome(memory_store: Store) -> None:
    run = SimulatedRun("run", 2, stops=2)
    run.write(memory_store)
    own = [e for events in run.events for e in events if e["event"] == "snapshot_attempt"]
    with analysed(memory_store, run) as (trace, _, _):
        attempts, summary = snapshot_attempts(trace), snapshot_summary(trace)
    first = run.events[0][0]["t"]
    assert attempts["after_s"].to_list() == pytest.approx([event["t"] - first for event in own])
    (row,) = summary.rows(named=True)
    assert (row["outcome"], row["attempts"], row["cut_ms_median"], row["write_s_most"]) == (
        "completed",
        len(own),
        0.5,
        None,
    )


def test_calls_that_were_cut_off_are_counted_by_what_became_of_them(memory_store: Store) -> None:
    runs = [SimulatedRun(f"run-{seed}", seed, stops=2) for seed in (3, 5)]
    for run in runs:
        run.write(memory_store)
    with analysed(memory_store, *runs) as (trace, _, _):
        found = interruptions(trace)
    for run in runs:
        events = [event for life in run.events for event in life]
        own = found.filter(run=run.run)
        assert own["kind"].to_list() == ["attempt_interrupted", "attempt_resumed", "prefix_discarded"]
        for kind, times, tokens in own.select("kind", "times", "tokens").iter_rows():
            told = [event["tokens"] for event in events if event["event"] == kind]
            assert (times, tokens) == (len(told), sum(told))
        assert own["reason"].to_list() == ["infrastructure", None, "sampling"]


def test_only_calls_with_tokens_count_as_continued_and_what_tells_no_tokens_has_none(memory_store: Store) -> None:
    run = Told("run", [(1, 100.0, 104.0)])
    facts = {"run_process": "run-0", "rollout_id": "e0-p1_g0"}
    run.events[0] += [
        {"t": 101.0, "event": "attempt_resumed", **facts, "attempt": 0, "turns": 2, "tokens": 0},
        {"t": 102.0, "event": "call_unreadable", **facts, "reason": "no spans"},
    ]
    run.write(memory_store)  # type: ignore[misc]
    with analysed(memory_store, run) as (trace, _, _):  # type: ignore[arg-type]
        assert interruptions(trace).rows() == [("run", "call_unreadable", 1, None, "no spans")]


class Told:
    """A run of siblings that are sealed at told times; `lives` holds (sibling, dispatched, sealed or None)."""

    def __init__(self, run: str, *lives: list[tuple[int, float, float | None]], cut_time: float = 0.0) -> None:
        self.run, self.layout = run, RunLayout(run)
        self.log = [
            Manifest.model_construct(sequence=n, writer=f"{run}-{n}", created_at=0.0, cut_time=cut_time, step=0)
            for n in range(len(lives))
        ]
        self.events: list[list[dict[str, Any]]] = []
        for life, siblings in enumerate(lives):
            events = [{"t": t, "event": "attempt_dispatched", "attempt": life, **_named(i)} for i, t, _ in siblings]
            if life:
                events.append({"t": events[0]["t"] - 1, "event": "checkpoint_restored", "sequence": 0, "step": 0})
            sealed = [(i, t) for i, _, t in siblings if t is not None]
            events += [{"t": t, "event": "attempt_sealed", "attempt": life, **_named(i)} for i, t in sealed]
            events.sort(key=lambda event: event["t"])
            self.events.append([{**event, "run_process": f"{run}-{life}"} for event in events])

    write = SimulatedRun.write


def _named(prompt: int) -> dict[str, Any]:
    return {"rollout_id": f"e0-p{prompt}_g0", "prompt_id": prompt, "epoch": 0, "generation_index": 0, "num_tokens": 1}


def test_lost_progress_is_how_much_later_the_siblings_cut_off_by_a_stop_were_sealed(memory_store: Store) -> None:
    stopped = Told(
        "stopped",
        [(1, 100.0, 104.0), (2, 100.0, 106.0), (3, 105.0, None), (4, 106.0, None)],
        [(3, 130.0, 135.0), (4, 131.0, 140.0)],
        cut_time=107.0,
    )
    whole = Told("whole", [(1, 0.0, 3.0), (2, 0.0, 5.0), (3, 4.0, 9.0), (4, 5.0, 12.0)])
    slow = Told("slow", [(1, 50.0, 54.0), (2, 50.0, 56.0), (3, 60.0, 65.0)])
    for told in (stopped, whole, slow):
        told.write(memory_store)  # type: ignore[misc]
    with analysed(memory_store, stopped, whole, slow) as (_, lives, journeys):  # type: ignore[arg-type]
        first, second = lost_progress(lives, journeys, "stopped", ["whole", "slow"]).rows(named=True)
    assert (first["against"], first["running"], first["siblings"]) == ("whole", 2, 2)
    assert (first["late_s"], first["drift_s"], first["lost_s"]) == (((35 - 9) + (40 - 12)) / 2, 1.0, 26.0)
    assert (second["against"], second["siblings"], second["late_s"], second["lost_s"]) == ("slow", 1, 20.0, 20.0)


def test_runs_that_share_no_sibling_have_no_lost_progress(memory_store: Store) -> None:
    stopped = Told("stopped", [(1, 0.0, None)], [(1, 9.0, 12.0)])
    other = Told("other", [(7, 0.0, 1.0)])
    stopped.write(memory_store)  # type: ignore[misc]
    other.write(memory_store)  # type: ignore[misc]
    with analysed(memory_store, stopped, other) as (_, lives, journeys):  # type: ignore[arg-type]
        (row,) = lost_progress(lives, journeys, "stopped", ["other"]).rows(named=True)
    assert (row["running"], row["siblings"], row["late_s"], row["lost_s"]) == (1, 0, None, None)


def test_a_run_without_a_trace_has_no_figures(memory_store: Store) -> None:
    with analysed(memory_store, SimulatedRun("run", 0, stops=0)) as (trace, lives, journeys):
        assert lives.is_empty()
        assert train_steps(trace, lives, journeys).is_empty()
        costs = stops(trace, lives, journeys)
        assert costs.is_empty()
        assert {"thrown_away_s", "redone_s", "retrained_s"} <= set(costs.columns)
        assert stage_seconds(journeys).is_empty()
        assert throughput_around_stops(trace, lives).is_empty()
        assert lost_progress(lives, journeys, "run", ["other"]).is_empty()
