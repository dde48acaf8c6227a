"""Follows every attempt and every group through the trace, in one pass whose memory is what is in flight.

    events of one life, a batch at a time --+--> attempts that ended   what still runs waits for the next batch
                                            +--> groups that were trained or given up

Two tables come of it, in a folder: `attempts`, one row for each attempt and life; `groups`, one row each time that a
group was trained, was given up, or was left over at the end. Everything else is asked of these two.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from storage.analytics.attempt_fold import ATTEMPTS, AttemptFold
from storage.analytics.group_fold import GROUPS, GroupFold

BATCH_EVENTS = 50_000
_COLUMNS = (
    *("t", "event", "line", "group_id", "rollout_id", "attempt", "prompt_id", "epoch", "generation_index"),
    *("num_tokens", "generation_s", "environment_s", "version_tokens", "reason"),
    *("step", "version", "group_ids", "seconds", "waited_s"),
)


@dataclass(frozen=True, slots=True)
class Journeys:
    """The two tables, with the columns `ATTEMPTS` and `GROUPS`. They live as long as their folder."""

    attempts: pl.LazyFrame
    groups: pl.LazyFrame


def follow(trace: pl.LazyFrame, lives: pl.DataFrame, folder: Path, *, batch_events: int = BATCH_EVENTS) -> Journeys:
    """The journeys of all runs of a trace; `lives` is that of `lives_of`, `folder` exists and is empty."""
    attempts, groups = _Table(folder, "attempts", ATTEMPTS), _Table(folder, "groups", GROUPS)
    for run in lives["run"].unique(maintain_order=True):
        own = lives.filter(run=run).sort("life")
        fold = GroupFold(run, own)
        for life in own.iter_rows(named=True):
            running = AttemptFold(run, life["life"])
            for events in _batches(trace, life, batch_events):
                attempts.add(running.take(events))
                groups.add(fold.take(events, life["life"]))
            attempts.add(running.left_over())
        groups.add(fold.left_over())
    return Journeys(attempts.scan(), groups.scan())


def _batches(trace: pl.LazyFrame, life: dict[str, Any], batch_events: int) -> Iterator[pl.DataFrame]:
    """The events of one life in their order, each with the group it is about.

    Each batch is a query of its own: the statistics of the Parquet files say where its lines are, and nothing is read
    ahead.
    """
    line = pl.col("line")
    own = trace.filter(run=life["run"], run_process=life["run_process"]).filter(line >= life["first_line"])
    last = own.select(line.max()).collect(engine="streaming").item()
    of_rollout = pl.col("rollout_id").str.replace(r"_g\d+$", "")
    chosen = own.select(*_COLUMNS).with_columns(pl.coalesce("group_id", of_rollout).alias("group_id"))
    for first in range(life["first_line"], (life["first_line"] if last is None else last) + 1, batch_events):
        wanted = line.is_between(first, first + batch_events, closed="left")
        yield chosen.filter(wanted).collect(engine="streaming").sort("line")


class _Table:
    """A table that grows by one Parquet file at a time."""

    def __init__(self, folder: Path, name: str, schema: dict[str, pl.DataType]) -> None:
        self._folder = folder / name
        self._folder.mkdir()
        self._schema = schema
        self._paths: list[Path] = []

    def add(self, rows: pl.DataFrame) -> None:
        if rows.height:
            self._paths.append(self._folder / f"{len(self._paths):08d}.parquet")
            rows.select(pl.col(name).cast(dtype) for name, dtype in self._schema.items()).write_parquet(self._paths[-1])

    def scan(self) -> pl.LazyFrame:
        return pl.scan_parquet(self._paths) if self._paths else pl.LazyFrame(schema=self._schema)
