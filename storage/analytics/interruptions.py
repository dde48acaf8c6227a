"""Model calls that were cut off: which went on with their tokens, and which had to begin anew."""

import polars as pl

# What the trace calls it, in the order of a report.
KINDS = ("attempt_interrupted", "attempt_resumed", "prefix_discarded", "call_unreadable", "peek_failed")


def interruptions(trace: pl.LazyFrame) -> pl.DataFrame:
    """One row for each run and kind of event (`KINDS`) that happened: how many `times`, with how many `tokens` in all
    (null where the event tells none), and the newest `reason`. An attempt that was resumed counts if it had tokens of a
    model call, after a restart or on another generator.
    """
    with_tokens = (pl.col("event") != "attempt_resumed") | (pl.col("tokens") > 0)
    found = trace.filter(pl.col("event").is_in(KINDS), with_tokens).select("run", "t", "event", "tokens", "reason")
    counted = (
        found.sort("t")
        .group_by("run", pl.col("event").alias("kind"))
        .agg(
            pl.len().alias("times"),
            pl.when(pl.col("tokens").count() > 0).then(pl.col("tokens").sum()).alias("tokens"),
            pl.col("reason").drop_nulls().last(),
        )
        .collect(engine="streaming")
    )
    order = pl.col("kind").replace_strict({kind: place for place, kind in enumerate(KINDS)}, return_dtype=pl.Int64)
    return counted.sort("run", order)
