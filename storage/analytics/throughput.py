"""Tokens per second around each stop of a run."""

import polars as pl

WINDOW_S = 120.0
BINS = 60


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
    events = trace.filter(pl.col("event").is_in(["attempt_sealed", "train_step"])).select(
        "run", "t", "num_tokens", pl.col("group_ids").list.len().alias("num_groups")
    )
    after_s = pl.col("t") - pl.col("stopped_at")
    near = events.join(windows.lazy(), on="run").filter(after_s >= -window_s, after_s < pl.col("until_s"))
    counted = near.group_by("run", "stop", (after_s / width).floor().cast(pl.Int64).alias("bin")).agg(
        (pl.col("num_tokens").sum() / width).alias("tokens_per_s"),
        (pl.col("num_groups").sum() / width).alias("trained_groups_per_s"),
    )
    last = (pl.col("until_s") / width).ceil().cast(pl.Int64)
    all_bins = windows.select("run", "stop", pl.int_ranges(-bins, last).alias("bin")).explode("bin")
    found = (
        all_bins.lazy()
        .join(counted, on=["run", "stop", "bin"], how="left")
        .with_columns(pl.col("tokens_per_s", "trained_groups_per_s").fill_null(0.0))
    )
    middle = ((pl.col("bin") + 0.5) * width).alias("after_s")
    return (
        found.select("run", "stop", middle, "tokens_per_s", "trained_groups_per_s")
        .sort("run", "stop", "after_s")
        .collect(engine="streaming")
    )
