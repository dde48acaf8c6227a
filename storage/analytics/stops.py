"""What each stop of a run cost, in seconds of attempts and of steps."""

from collections.abc import Callable, Mapping
from typing import Any

import polars as pl

from storage.analytics.journeys import Journeys

_SIBLING = ("prompt_id", "epoch", "generation_index")
_ATTEMPT = ("rollout_id", "attempt")


def stops(trace: pl.LazyFrame, lives: pl.DataFrame, journeys: Journeys) -> pl.DataFrame:
    """One row for each life after the first of a run, with the cost of the stop before it:

        down_s         start of this life - last event before it (0 where clocks contradict)
        lost_s         last event before it - the restored cut
        running        attempts that ran at the cut and did not go on from their turns or tokens
        thrown_away_s  sum over those of (cut_time - when they began)
        redone         siblings that were sealed before the stop, and sealed again by this life
        redone_s       sum over those of (seal - begin) of the attempt in this life
        retrained      train steps of this life that had been trained before, `retrained_s` their seconds

    `stop` counts from 1. `cut_time` is that of the restored bundle, or the start of the run for a fresh start.
    """
    after = lives.filter(pl.col("life") > 0)
    facts = after.select(
        "run",
        pl.col("life").alias("stop"),
        *("run_process", "restored", "sequence", "step", "stopped_at", "cut_time"),
        (pl.col("started_at") - pl.col("stopped_at")).clip(0.0).alias("down_s"),
        (pl.col("stopped_at") - pl.col("cut_time")).clip(0.0).alias("lost_s"),
    )
    for costs in (_thrown_away(trace, lives, journeys), _redone(trace, lives, journeys), _retrained(trace, lives)):
        facts = facts.join(costs, on=["run", "stop"], how="left")
    return facts.with_columns(pl.selectors.numeric().exclude("sequence").fill_null(0)).sort("run", "stop")


def _of_each_stop(
    lives: pl.DataFrame, query: Callable[[Mapping[str, Any]], pl.LazyFrame], *, count: str, seconds: str
) -> pl.DataFrame:
    """The one row of the query for each stop, with a count and seconds. A join of all stops would hold its long side in
    memory; these are filters.
    """
    later = lives.filter(pl.col("life") > 0).iter_rows(named=True)
    rows = [
        query(life)
        .collect(engine="streaming")
        .select(pl.lit(life["run"]).alias("run"), pl.lit(life["life"], pl.Int64()).alias("stop"), pl.all())
        for life in later
    ]
    nothing = {"run": pl.String(), "stop": pl.Int64(), count: pl.UInt32(), seconds: pl.Float64()}
    return pl.concat(rows) if rows else pl.DataFrame(schema=nothing)


def _thrown_away(trace: pl.LazyFrame, lives: pl.DataFrame, journeys: Journeys) -> pl.DataFrame:
    def of(life: Mapping[str, Any]) -> pl.LazyFrame:
        own, cut_time = journeys.attempts.filter(run=life["run"]), life["cut_time"]
        at_cut = own.filter(
            pl.col("life") == pl.lit(life["cut_life"], pl.Int64()),
            pl.col("dispatched_at") <= cut_time,
            pl.col("ended_at").is_null() | (pl.col("ended_at") > cut_time),
        )
        went_on = own.filter(pl.col("life") == life["life"], "resumed").select(_ATTEMPT)
        kept = went_on.join(_sampled_anew(trace, life), on=_ATTEMPT, how="anti")
        seconds = (cut_time - pl.col("dispatched_at")).sum().alias("thrown_away_s")
        return at_cut.join(kept, on=_ATTEMPT, how="anti").select(pl.len().alias("running"), seconds)

    return _of_each_stop(lives, of, count="running", seconds="thrown_away_s")


def _sampled_anew(trace: pl.LazyFrame, life: Mapping[str, Any]) -> pl.LazyFrame:
    """Attempts of a life that had no finished turn and whose tokens could not be continued: nothing of them is left."""
    own = trace.filter(run=life["run"], run_process=life["run_process"])
    with_turns = own.filter(pl.col("event") == "attempt_resumed", pl.col("turns") > 0).select(_ATTEMPT)
    return own.filter(event="prefix_discarded").select(_ATTEMPT).join(with_turns, on=_ATTEMPT, how="anti")


def _redone(trace: pl.LazyFrame, lives: pl.DataFrame, journeys: Journeys) -> pl.DataFrame:
    """Siblings that were sealed after the cut, or in groups that were launched again: so few that they fit in memory,
    unless a run starts afresh.
    """

    def of(life: Mapping[str, Any]) -> pl.LazyFrame:
        sealed, number = journeys.attempts.filter(run=life["run"], ending="sealed"), life["life"]
        again = trace.filter(run=life["run"], run_process=life["run_process"], event="redispatched").select("group_id")
        before, first_lost = sealed.filter(pl.col("life") < number), life["cut_life"]
        lost = before.filter(
            (pl.col("life") > (-1 if first_lost is None else first_lost))
            | ((pl.col("life") == pl.lit(first_lost, pl.Int64())) & (pl.col("ended_at") > life["cut_time"]))
        )
        launched = before.join(again.collect(engine="streaming").lazy(), on="group_id", how="semi")
        siblings = pl.concat([lost.select(_SIBLING), launched.select(_SIBLING)]).unique().collect(engine="streaming")
        new = sealed.filter(pl.col("life") == number).join(siblings.lazy(), on=_SIBLING, how="semi")
        seconds = (pl.col("ended_at") - pl.col("dispatched_at")).sum().alias("redone_s")
        return new.select(pl.len().alias("redone"), seconds)

    return _of_each_stop(lives, of, count="redone", seconds="redone_s")


def _retrained(trace: pl.LazyFrame, lives: pl.DataFrame) -> pl.DataFrame:
    """Steps that an earlier life had trained already, replayed from their batches or not."""
    named = lives.lazy().select("run", "run_process", "life", "first_line")
    steps = trace.filter(event="train_step").join(named, on=["run", "run_process"])
    own = steps.filter(pl.col("line") >= pl.col("first_line")).select("run", "life", "step", "seconds")
    furthest = own.group_by("run", "life").agg(pl.col("step").max()).collect(engine="streaming").sort("run", "life")
    reached = furthest.join(lives.select("run", "life"), on=["run", "life"], how="right").sort("run", "life")
    before = reached.select("run", "life", pl.col("step").fill_null(0).cum_max().shift(1).over("run").alias("reached"))
    done = own.join(before.lazy(), on=["run", "life"]).filter(pl.col("step") <= pl.col("reached"))
    counted = done.group_by("run", pl.col("life").alias("stop"))
    return counted.agg(pl.len().alias("retrained"), pl.col("seconds").sum().alias("retrained_s")).collect(
        engine="streaming"
    )


def parked(trace: pl.LazyFrame) -> pl.DataFrame:
    """For each run how long its environments were closed for snapshots: `times` and `parked_s`."""
    seconds = pl.col("seconds").sum().alias("parked_s")
    closed = trace.filter(event="environment_parked").group_by("run").agg(pl.len().alias("times"), seconds)
    runs = trace.select("run").unique()
    found = runs.join(closed, on="run", how="left").with_columns(pl.col("times", "parked_s").fill_null(0))
    return found.sort("run").collect(engine="streaming")
