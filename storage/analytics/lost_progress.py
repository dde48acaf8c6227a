"""How much later an interrupted run got its results than runs that were never stopped."""

from collections.abc import Sequence

import polars as pl

from storage.analytics.journeys import Journeys

_SIBLING = ("prompt_id", "epoch", "generation_index")
# Siblings sealed last before the cut: how far the two runs are apart without this stop.
_COMPARED_BEFORE = 200


def lost_progress(lives: pl.DataFrame, journeys: Journeys, run: str, against: Sequence[str]) -> pl.DataFrame:
    """One row for each stop of `run` and each of the runs `against` it:

        late_s   mean of (seal - first dispatch of the run) here - the same there, over the siblings that ran at the
                 stop and were sealed in both runs afterwards (`siblings` of `running`)
        drift_s  median of the same over the siblings sealed last before the restored cut
        lost_s   late_s - drift_s: what this stop alone has cost

    Siblings of two runs are the same by prompt id, epoch and generation index. Null where none are.
    """
    origins = _origins(journeys, [run, *against])
    seals = journeys.attempts.filter(ending="sealed").join(origins.lazy(), on="run")
    seals = seals.with_columns((pl.col("ended_at") - pl.col("origin")).alias("sealed_after_s"))
    rows = []
    for life in lives.filter(pl.col("run") == run, pl.col("life") > 0).sort("life").iter_rows(named=True):
        here = (pl.col("run") == run) & (pl.col("life") >= life["life"])
        cut_off = journeys.attempts.filter(run=run, life=life["life"] - 1, ending="running")
        running = cut_off.select(_SIBLING).unique().collect(engine="streaming")
        late = _lateness(seals, running, here, against)
        before = _lateness(seals, _newest_before(seals, run, life), pl.col("run") == run, against)
        for other in against:
            rows.append({"run": run, "stop": life["life"], "against": other, "running": running.height})
            own, drift = late.filter(against=other)["late_s"], before.filter(against=other)["late_s"].median()
            rows[-1] |= {"siblings": own.len(), "late_s": own.mean(), "drift_s": drift}
    schema = {"run": pl.String, "stop": pl.Int64, "against": pl.String, "running": pl.Int64, "siblings": pl.Int64}
    found = pl.DataFrame(rows, schema={**schema, "late_s": pl.Float64, "drift_s": pl.Float64})
    return found.with_columns((pl.col("late_s") - pl.col("drift_s").fill_null(0.0)).alias("lost_s"))


def _origins(journeys: Journeys, runs: Sequence[str]) -> pl.DataFrame:
    first = pl.col("dispatched_at").min().alias("origin")
    return journeys.attempts.filter(pl.col("run").is_in(runs)).group_by("run").agg(first).collect(engine="streaming")


def _newest_before(seals: pl.LazyFrame, run: str, life: dict[str, float]) -> pl.DataFrame:
    if life["cut_life"] is None:
        return pl.DataFrame(schema=dict.fromkeys(_SIBLING, pl.Int64()))
    own = seals.filter(pl.col("run") == run, pl.col("life") == life["cut_life"], pl.col("ended_at") <= life["cut_time"])
    newest = own.select(*_SIBLING, "ended_at").top_k(_COMPARED_BEFORE, by="ended_at")
    return newest.select(_SIBLING).unique().collect(engine="streaming")


def _lateness(seals: pl.LazyFrame, siblings: pl.DataFrame, here: pl.Expr, against: Sequence[str]) -> pl.DataFrame:
    """Each of the siblings with each run that sealed it too: how much later it was sealed here."""
    chosen = seals.join(siblings.lazy(), on=_SIBLING, how="semi")
    first = pl.col("sealed_after_s").min()
    own = chosen.filter(here).group_by(_SIBLING).agg(first.alias("here_s"))
    others = chosen.filter(pl.col("run").is_in(against)).group_by("run", *_SIBLING).agg(first.alias("there_s"))
    pairs = own.join(others, on=_SIBLING).with_columns((pl.col("here_s") - pl.col("there_s")).alias("late_s"))
    return pairs.select(pl.col("run").alias("against"), "late_s").collect(engine="streaming")
