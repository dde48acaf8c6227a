"""Snapshots and checkpoints over time: what each attempt came to, and what it cost."""

import polars as pl

_COSTS = ("cut_ms", "barrier_wait_ms", "peek_ms", "write_s")
_COUNTS = (
    "groups",
    "rows",
    "running_attempts",
    "recorded_steps",
    "partial_calls",
    "partial_tokens",
    "unreadable_calls",
)


def snapshot_attempts(trace: pl.LazyFrame) -> pl.DataFrame:
    """One row for each attempt that was recorded, by run and time: `after_s` since the first event of the run, number,
    outcome, reason, step, and of a completed one its costs (cut, barrier wait and look at the running calls in
    milliseconds, write in seconds) and what it holds.
    """
    origins = trace.group_by("run").agg(pl.col("t").min().alias("origin")).collect(engine="streaming")
    chosen = trace.filter(event="snapshot_attempt").select(
        "run", "t", "number", "outcome", "reason", "sequence", "step", *_COSTS, *_COUNTS
    )
    attempts = chosen.collect(engine="streaming").join(origins, on="run")
    after = (pl.col("t") - pl.col("origin")).alias("after_s")
    return attempts.select("run", "t", after, pl.exclude("run", "t", "origin")).sort("run", "t")


def snapshot_summary(trace: pl.LazyFrame) -> pl.DataFrame:
    """Attempts by run, outcome and reason: how many, and the medians and greatest values of their costs."""
    attempts = trace.filter(event="snapshot_attempt").group_by("run", "outcome", "reason")
    costs = [
        column
        for name in _COSTS
        for column in (pl.col(name).median().alias(f"{name}_median"), pl.col(name).max().alias(f"{name}_most"))
    ]
    return attempts.agg(pl.len().alias("attempts"), *costs).sort("run", "outcome", "reason").collect(engine="streaming")
