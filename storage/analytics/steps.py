"""Train steps and how stale their tokens were."""

import polars as pl

from storage.analytics.journeys import Journeys


def train_steps(trace: pl.LazyFrame, lives: pl.DataFrame, journeys: Journeys) -> pl.DataFrame:
    """One row for each train step that counts, by run and step: what it reported and its batch age.

    A step counts if no later life went on from before it; of a step that was trained again, the newest event counts.

        batch_age = sum over groups g, versions v of n(g,v) * (V - v) / sum of n(g,v)

    with V the trainer's version at which the step was trained (`trained_at`) and n(g,v) the tokens of group g that were
    sampled under version v. `recorded_batch_age` is what the controller said. `num_tokens` counts the tokens.
    """
    steps = trace.filter(event="train_step").select(
        *("run", "run_process", "line", "t", "step", "rewards_mean", "seconds", "waited_s", "replayed"),
        (pl.col("version") - 1).alias("trained_at"),
        pl.col("batch_age").alias("recorded_batch_age"),
        pl.col("group_ids").list.len().alias("num_groups"),
    )
    known = steps.join(_undone_from(lives).lazy(), on=["run", "run_process"], how="inner")
    counted = known.filter(
        pl.col("line") >= pl.col("first_line"),
        pl.col("undone_after").is_null() | (pl.col("step") <= pl.col("undone_after")),
    )
    newest = counted.sort("life", "line").unique(["run", "step"], keep="last", maintain_order=True)
    ages = journeys.groups.filter(fate="trained").group_by("run", "life", "step_line")
    tokens = ages.agg(pl.col("num_tokens").sum(), pl.col("aged_tokens").sum())
    joined = newest.join(tokens, left_on=["run", "life", "line"], right_on=["run", "life", "step_line"], how="left")
    age = pl.when(pl.col("num_tokens") > 0).then(pl.col("aged_tokens") / pl.col("num_tokens")).otherwise(0.0)
    return (
        joined.select(
            *("run", "step", "life", "t", "trained_at", age.alias("batch_age"), "recorded_batch_age"),
            *("num_tokens", "num_groups", "rewards_mean", "seconds", "waited_s", "replayed"),
        )
        .sort("run", "step")
        .collect(engine="streaming")
    )


def _undone_from(lives: pl.DataFrame) -> pl.DataFrame:
    """For each process the step after which a later life has undone its steps; null for the newest."""
    backwards = pl.col("step").reverse().cum_min().reverse().shift(-1)
    return lives.sort("run", "life").select(
        "run", "run_process", "life", "first_line", backwards.over("run").alias("undone_after")
    )


def staleness(journeys: Journeys) -> pl.DataFrame:
    """Trained tokens by staleness V - v, for each run: `num_tokens`, and their `share` of the run's. Steps that a stop
    has undone are among them.
    """
    pairs = journeys.groups.filter(fate="trained").select("run", "version", "version_tokens")
    spans = pairs.explode("version_tokens", empty_as_null=False, keep_nulls=False).select(
        "run",
        (pl.col("version") - pl.col("version_tokens").list.get(0)).alias("staleness"),
        pl.col("version_tokens").list.get(1).alias("num_tokens"),
    )
    counted = spans.group_by("run", "staleness").agg(pl.col("num_tokens").sum()).collect(engine="streaming")
    share = pl.col("num_tokens") / pl.col("num_tokens").sum().over("run")
    return counted.sort("run", "staleness").with_columns(share.alias("share"))
