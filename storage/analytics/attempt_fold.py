"""From the events of one life to its attempts: when each was dispatched, when and how it ended."""

import polars as pl

# `dispatched_at`: the last dispatch of the attempt in this life; `resumed`: it went on from finished turns. `ending`:
# `sealed`, the reason of its abandonment, `discarded` with its group, or `running` at the end of the life, where
# `ended_at` is null.
ATTEMPTS: dict[str, pl.DataType] = {
    **{"run": pl.String(), "life": pl.Int64(), "group_id": pl.String(), "rollout_id": pl.String()},
    **{"prompt_id": pl.Int64(), "epoch": pl.Int64(), "generation_index": pl.Int64(), "attempt": pl.Int64()},
    **{"resumed": pl.Boolean(), "dispatched_at": pl.Float64(), "ended_at": pl.Float64(), "ending": pl.String()},
    **{"num_tokens": pl.Int64(), "generation_s": pl.Float64(), "environment_s": pl.Float64()},
}
_OPEN = {
    name: ATTEMPTS[name]
    for name in (
        *("rollout_id", "attempt", "group_id", "prompt_id", "epoch", "generation_index"),
        *("dispatched_at", "resumed"),
    )
}
_KEY = ("rollout_id", "attempt")


class AttemptFold:
    """Holds the attempts that run."""

    def __init__(self, run: str, life: int) -> None:
        self._open = pl.DataFrame(schema=_OPEN)
        self._names = (pl.lit(run).alias("run"), pl.lit(life, pl.Int64()).alias("life"))

    def take(self, events: pl.DataFrame) -> pl.DataFrame:
        """The attempts that end in these events."""
        kind = pl.col("event")
        starts = events.filter(kind.is_in(["attempt_dispatched", "attempt_resumed"])).with_columns(
            pl.col("t").alias("dispatched_at"), (kind == "attempt_resumed").alias("resumed")
        )
        last = [pl.col(name).last() for name in _OPEN if name not in _KEY and name != "resumed"]
        begun = pl.concat([self._open, starts.select(*_OPEN)]).group_by(_KEY, maintain_order=True)
        ends = events.filter(kind.is_in(["attempt_sealed", "attempt_abandoned"])).select(
            *_KEY,
            pl.col("t").alias("ended_at"),
            pl.when(kind == "attempt_sealed").then(pl.lit("sealed")).otherwise("reason").alias("ending"),
            *("num_tokens", "generation_s", "environment_s"),
        )
        given_up = events.filter(kind.is_in(["group_discarded", "prompt_dropped"]))
        gone = given_up.select("group_id", pl.col("t").alias("gone_at")).unique("group_id", keep="first")
        known = begun.agg(*last, pl.col("resumed").any()).join(
            ends.unique(_KEY, keep="first", maintain_order=True), on=_KEY, how="left"
        )
        known = known.join(gone, on="group_id", how="left").with_columns(
            pl.coalesce("ended_at", "gone_at").alias("ended_at"),
            pl.coalesce("ending", pl.when(pl.col("gone_at").is_not_null()).then(pl.lit("discarded"))).alias("ending"),
        )
        self._open = known.filter(pl.col("ended_at").is_null()).select(*_OPEN)
        return known.filter(pl.col("ended_at").is_not_null()).with_columns(self._names)

    def left_over(self) -> pl.DataFrame:
        """What ran when the life ended."""
        added = [pl.lit(None, ATTEMPTS[name]).alias(name) for name in ATTEMPTS if name not in (*_OPEN, "run", "life")]
        return self._open.with_columns(*self._names, *added).with_columns(pl.lit("running").alias("ending"))
