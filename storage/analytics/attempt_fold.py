"""From the events of one life to its attempts: when each was dispatched, when and how it ended."""

import polars as pl

# `dispatched_at`: when the attempt began in this life; an interruption after which it went on ends nothing. `resumed`:
# it went on from finished turns or from tokens. `ending`: `sealed`, `refused` (it may begin again, in another row), the
# reason of its abandonment, `discarded` with its group, or `running` at the end of the life, where `ended_at` is null.
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
        ends = events.filter(kind.is_in(["attempt_sealed", "attempt_abandoned"])).select(
            *_KEY,
            pl.col("t").alias("ended_at"),
            pl.when(kind == "attempt_sealed").then(pl.lit("sealed")).otherwise("reason").alias("ending"),
            *("num_tokens", "generation_s", "environment_s"),
        )
        given_up = events.filter(kind.is_in(["group_discarded", "prompt_dropped"]))
        gone = given_up.select("group_id", pl.col("t").alias("gone_at")).unique("group_id", keep="first")
        begun, refused = self._begun(events), pl.col("refused_at").is_not_null()
        known = begun.filter(~refused).join(ends.unique(_KEY, keep="first", maintain_order=True), on=_KEY, how="left")
        known = known.join(gone, on="group_id", how="left").with_columns(
            pl.coalesce("ended_at", "gone_at").alias("ended_at"),
            pl.coalesce("ending", pl.when(pl.col("gone_at").is_not_null()).then(pl.lit("discarded"))).alias("ending"),
        )
        self._open = known.filter(pl.col("ended_at").is_null()).select(*_OPEN)
        ended = pl.lit("refused").alias("ending"), pl.col("refused_at").alias("ended_at")
        over = [known.filter(pl.col("ended_at").is_not_null()), begun.filter(refused).with_columns(ended)]
        return pl.concat(over, how="diagonal").with_columns(self._names)

    def _begun(self, events: pl.DataFrame) -> pl.DataFrame:
        """The attempts that ran before these events or begin in them, with when each was refused: once for each time
        that it was sent, but for interruptions.
        """
        kind = pl.col("event")
        told = events.filter(kind.is_in(["attempt_dispatched", "attempt_resumed", "attempt_refused"])).with_columns(
            pl.when(kind != "attempt_refused").then("t").alias("dispatched_at"),
            pl.when(kind == "attempt_refused").then("t").alias("refused_at"),
            (kind == "attempt_resumed").alias("resumed"),
        )
        open_ones = self._open.with_columns(pl.lit(None, pl.Float64()).alias("refused_at"))
        known = pl.concat([open_ones, told.select(*_OPEN, "refused_at")])
        refusals = pl.col("refused_at").is_not_null().cast(pl.Int64)
        sent = (refusals.cum_sum().over(_KEY) - refusals).alias("sent")
        facts = [pl.col(name).drop_nulls().first() for name in (*_OPEN, "refused_at") if name not in (*_KEY, "resumed")]
        begun = known.with_columns(sent).group_by(*_KEY, "sent", maintain_order=True)
        return begun.agg(*facts, pl.col("resumed").any()).filter(pl.col("dispatched_at").is_not_null()).drop("sent")

    def left_over(self) -> pl.DataFrame:
        """What ran when the life ended."""
        added = [pl.lit(None, ATTEMPTS[name]).alias(name) for name in ATTEMPTS if name not in (*_OPEN, "run", "life")]
        return self._open.with_columns(*self._names, *added).with_columns(pl.lit("running").alias("ending"))
