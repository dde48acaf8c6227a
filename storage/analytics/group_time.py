"""Where the time of each trained group went, from its reservation to the step that trained it."""

import polars as pl

from storage.analytics.journeys import Journeys

# Seconds, in the order in which a group goes through them; they add up to its whole time.
STAGES = ("queue_s", "generation_s", "environment_s", "other_s", "finalize_s", "waiting_s", "training_s")


def group_time(journeys: Journeys) -> pl.LazyFrame:
    """One row for each group that was reserved, generated and trained by one life, with its `STAGES`:

        queue_s        first dispatch - reservation: admission by the sampler, and capacity
        generation_s   model calls of the sibling that was sealed last
        environment_s  environment turns of that sibling, scoring included
        other_s        the rest from first dispatch to last seal: attempts that failed, messages, what was not measured
        finalize_s     publication - last seal
        waiting_s      in the replay buffer until its step began to train
        training_s     from then, or from its publication if that was later (streamed steps), to the commit

    A step begins to train at t - (seconds - waited_s). The other groups crossed a stop; `crossed` counts them.
    """
    groups = journeys.groups.filter(fate="trained").with_columns(
        pl.max_horizontal("published_at", pl.min_horizontal("step_began_at", "ended_at")).alias("began_at")
    )
    running = pl.col("sealed_at") - pl.col("dispatched_at")
    generation, environment = pl.col("generation_s").fill_null(0.0), pl.col("environment_s").fill_null(0.0)
    stages = (
        (pl.col("dispatched_at") - pl.col("reserved_at")).alias("queue_s"),
        generation.alias("generation_s"),
        environment.alias("environment_s"),
        (running - generation - environment).alias("other_s"),
        (pl.col("published_at") - pl.col("sealed_at")).alias("finalize_s"),
        (pl.col("began_at") - pl.col("published_at")).alias("waiting_s"),
        (pl.col("ended_at") - pl.col("began_at")).alias("training_s"),
    )
    own = groups.filter(pl.col("life") == pl.col("first_life"), pl.col("reserved_at").is_not_null())
    return own.select("run", "life", "group_id", "step", "ended_at", *stages)


def stage_seconds(journeys: Journeys) -> pl.DataFrame:
    """For each run the mean seconds of each stage (columns `STAGES`), `groups` they are of, and how many `crossed` a
    stop and are left out.
    """
    means = group_time(journeys).group_by("run").agg(pl.len().alias("groups"), *(pl.col(s).mean() for s in STAGES))
    trained = journeys.groups.filter(fate="trained").group_by("run").agg(pl.len().alias("trained"))
    found = trained.join(means, on="run", how="left").collect(engine="streaming")
    groups = pl.col("groups").fill_null(0)
    crossed = (pl.col("trained") - groups).alias("crossed")
    return found.with_columns(groups, crossed).select("run", "groups", "crossed", *STAGES).sort("run")


def stage_seconds_by_step(journeys: Journeys) -> pl.DataFrame:
    """The mean seconds of each stage over the groups of each train step, by run and step."""
    by_step = (
        group_time(journeys).group_by("run", "step").agg(pl.len().alias("groups"), *(pl.col(s).mean() for s in STAGES))
    )
    return by_step.sort("run", "step").collect(engine="streaming")
