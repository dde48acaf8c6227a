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
    """For each stop of each run, `bins` bins of `window_s` / `bins` seconds before the last event of the life that was
    stopped, and as many from the start of the next one on; the time between them is left out.

    `after_s` is the middle of the bin: negative before the stop, positive after the start. `tokens_per_s` are those of
    siblings that were sealed, `trained_groups_per_s` groups of committed steps. Bins in which nothing happened have
    zeros.
    """
    width = window_s / bins
    windows = lives.filter(pl.col("life") > 0).select(
        "run", pl.col("life").alias("stop"), "run_process", "stopped_at", "started_at"
    )
    near = [_near(trace, window, window_s, width) for window in windows.iter_rows(named=True)]
    counted = pl.concat(near) if near else pl.DataFrame(schema=_COUNTED)
    all_bins = windows.select("run", "stop").join(pl.select(pl.int_range(-bins, bins).alias("bin")), how="cross")
    found = all_bins.join(counted, on=["run", "stop", "bin"], how="left").with_columns(
        pl.col("tokens_per_s", "trained_groups_per_s").fill_null(0.0)
    )
    middle = ((pl.col("bin") + 0.5) * width).alias("after_s")
    return found.select("run", "stop", middle, "tokens_per_s", "trained_groups_per_s").sort("run", "stop", "after_s")


def _near(trace: pl.LazyFrame, window: Mapping[str, Any], window_s: float, width: float) -> pl.DataFrame:
    """The bins of one stop in which something happened."""
    t, stop = pl.col("t"), pl.lit(window["stop"], pl.Int64()).alias("stop")
    is_next = pl.col("run_process") == window["run_process"]
    before = ~is_next & t.is_between(window["stopped_at"] - window_s, window["stopped_at"])
    after = is_next & t.is_between(window["started_at"], window["started_at"] + window_s, closed="left")
    near = trace.filter(
        pl.col("run") == window["run"], before | after, pl.col("event").is_in(["attempt_sealed", "train_step"])
    ).select("run", "t", "num_tokens", pl.col("group_ids").list.len().alias("num_groups"), is_next.alias("is_next"))
    number = (
        pl.when("is_next")
        .then(((t - window["started_at"]) / width).floor())
        # The stop itself is the last moment of the last bin.
        .otherwise(((t - window["stopped_at"]) / width).floor().clip(upper_bound=-1))
        .cast(pl.Int64)
        .alias("bin")
    )
    return (
        near.group_by("run", stop, number)
        .agg(
            (pl.col("num_tokens").sum() / width).alias("tokens_per_s"),
            (pl.col("num_groups").sum() / width).alias("trained_groups_per_s"),
        )
        .collect(engine="streaming")
    )
