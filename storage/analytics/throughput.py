"""Tokens per second around each stop of a run."""

from collections.abc import Mapping
from typing import Any

import polars as pl

WINDOW_S = 120.0
BINS = 60
_COUNTED = {
    **{"run": pl.String(), "stop": pl.Int64(), "bin": pl.Int64()},
    **{"tokens_per_s": pl.Float64(), "trained_groups_per_s": pl.Float64()},
}


def throughput_around_stops(
    trace: pl.LazyFrame, lives: pl.DataFrame, *, window_s: float = WINDOW_S, bins: int = BINS
) -> pl.DataFrame:
    """For each stop of each run, bins of `window_s` / `bins` seconds from `window_s` before the last event of the life
    that was stopped to `window_s` after the start of the next one.

    `after_s` is the middle of the bin, counted from the stop; `tokens_per_s` are those of siblings that were sealed,
    `trained_groups_per_s` groups of committed steps. A bin in which nothing happened has zeros.
    """
    width = window_s / bins
    windows = lives.filter(pl.col("life") > 0).select(
        "run",
        pl.col("life").alias("stop"),
        "stopped_at",
        ((pl.col("started_at") - pl.col("stopped_at")).clip(0.0) + window_s).alias("until_s"),
    )
    near = [_near(trace, window, window_s, width) for window in windows.iter_rows(named=True)]
    counted = pl.concat(near) if near else pl.DataFrame(schema=_COUNTED)
    last = (pl.col("until_s") / width).ceil().cast(pl.Int64)
    all_bins = windows.select("run", "stop", pl.int_ranges(-bins, last).alias("bin")).explode("bin")
    found = all_bins.join(counted, on=["run", "stop", "bin"], how="left").with_columns(
        pl.col("tokens_per_s", "trained_groups_per_s").fill_null(0.0)
    )
    middle = ((pl.col("bin") + 0.5) * width).alias("after_s")
    return found.select("run", "stop", middle, "tokens_per_s", "trained_groups_per_s").sort("run", "stop", "after_s")


def _near(trace: pl.LazyFrame, window: Mapping[str, Any], window_s: float, width: float) -> pl.DataFrame:
    """The bins of one stop in which something happened."""
    stopped_at, stop = window["stopped_at"], pl.lit(window["stop"], pl.Int64()).alias("stop")
    near = trace.filter(
        pl.col("run") == window["run"],
        pl.col("t").is_between(stopped_at - window_s, stopped_at + window["until_s"], closed="left"),
        pl.col("event").is_in(["attempt_sealed", "train_step"]),
    ).select("run", "t", "num_tokens", pl.col("group_ids").list.len().alias("num_groups"))
    number = ((pl.col("t") - stopped_at) / width).floor().cast(pl.Int64).alias("bin")
    return (
        near.group_by("run", stop, number)
        .agg(
            (pl.col("num_tokens").sum() / width).alias("tokens_per_s"),
            (pl.col("num_groups").sum() / width).alias("trained_groups_per_s"),
        )
        .collect(engine="streaming")
    )
