"""Everything that is asked of the trace of one run, at once: the tables of a report."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import polars as pl

from storage.analytics.group_time import stage_seconds, stage_seconds_by_step
from storage.analytics.interruptions import interruptions
from storage.analytics.journeys import follow
from storage.analytics.lives import Log, lives_of
from storage.analytics.lost_progress import lost_progress
from storage.analytics.snapshot_costs import snapshot_attempts, snapshot_summary
from storage.analytics.steps import staleness, train_steps
from storage.analytics.stops import parked, stops
from storage.analytics.throughput import throughput_around_stops
from storage.errors import ConfigurationError
from storage.filesystem import Store
from storage.layout import RunLayout
from storage.runs import log_of_run
from storage.trace_reader import open_trace


@dataclass(frozen=True, slots=True)
class RunReport:
    """The tables of one run, without the column `run`; each is documented where it is made.

    `lost_progress` has a row for each stop and each run that the report is `against`.
    """

    run: str
    against: tuple[str, ...]
    steps: pl.DataFrame
    staleness: pl.DataFrame
    stages: pl.DataFrame
    stages_by_step: pl.DataFrame
    stops: pl.DataFrame
    lost_progress: pl.DataFrame
    throughput: pl.DataFrame
    snapshots: pl.DataFrame
    snapshot_summary: pl.DataFrame
    parked: pl.DataFrame
    interruptions: pl.DataFrame

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """Every table as plain rows, by its name."""
        tables = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: table.to_dicts() for name, table in tables if isinstance(table, pl.DataFrame)}

    @property
    def worst_age_error(self) -> float:
        """The greatest difference between a batch age of the trace and the one the controller recorded."""
        error = (self.steps["batch_age"] - self.steps["recorded_batch_age"]).abs().max()
        return float(error) if isinstance(error, int | float) else 0.0


def read_report(store: Store, layout: RunLayout, against: Sequence[RunLayout] = ()) -> RunReport:
    """Read the traces of a run and of the runs it is compared with, in bounded memory. Nothing is changed.

    Raises: NotFound for an unknown run; ConfigurationError for a run that is compared with itself; SnapshotCorrupt for
    a damaged trace; StoreUnavailable.
    """
    if layout in against:
        raise ConfigurationError(f"run {layout.run} is compared with itself: name another run after --against")
    layouts = [layout, *dict.fromkeys(against)]
    logs = {one.run: log_of_run(store, one) for one in layouts}
    with open_trace(store, layouts) as trace:
        return report_of(trace, logs, layout.run, [one.run for one in layouts[1:]])


def report_of(trace: pl.LazyFrame, logs: Mapping[str, Log], run: str, against: Sequence[str]) -> RunReport:
    """The report of `run` from a trace that holds all these runs; `logs` are their manifest logs."""
    with tempfile.TemporaryDirectory(prefix="midflight-report-") as folder:
        lives = lives_of(trace, logs)
        journeys = follow(trace, lives, Path(folder))
        own, own_lives = trace.filter(run=run), lives.filter(run=run)
        found: Mapping[str, pl.DataFrame] = {
            "steps": train_steps(own, own_lives, journeys),
            "staleness": staleness(journeys),
            "stages": stage_seconds(journeys),
            "stages_by_step": stage_seconds_by_step(journeys),
            "stops": stops(own, own_lives, journeys),
            "lost_progress": lost_progress(lives, journeys, run, against),
            "throughput": throughput_around_stops(own, own_lives),
            "snapshots": snapshot_attempts(own),
            "snapshot_summary": snapshot_summary(own),
            "parked": parked(own),
            "interruptions": interruptions(own),
        }
        tables = {name: table.filter(run=run).drop("run") for name, table in found.items()}
    return RunReport(run, tuple(against), **tables)
