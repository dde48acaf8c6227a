"""From the events of the lives of a run to its groups: when each got how far, and what trained it."""

import polars as pl

# Times in Unix seconds, null where the trace does not tell. `life`: where the row came to be; `first_life`: where the
# group was reserved. `dispatched_at` is its first dispatch, `sealed_at` its last seal before it was published;
# `generation_s` and `environment_s` are those of the sibling that was sealed last. `fate`: `trained` by `step`, at
# trainer version `version`; `discarded`; or `left` at the end of the trace. `step_line` tells apart two events of one
# step. `aged_tokens` is the sum of n(v) * (version - v), `num_tokens` that of n(v), over `version_tokens`.
GROUPS: dict[str, pl.DataType] = {
    **{"run": pl.String(), "life": pl.Int64(), "first_life": pl.Int64(), "group_id": pl.String()},
    **{"prompt_id": pl.Int64(), "epoch": pl.Int64(), "fate": pl.String()},
    **{name: pl.Float64() for name in ("reserved_at", "admitted_at", "dispatched_at", "sealed_at", "published_at")},
    **{"generation_s": pl.Float64(), "environment_s": pl.Float64()},
    **{"version_tokens": pl.List(pl.List(pl.Int64())), "num_tokens": pl.Int64(), "aged_tokens": pl.Int64()},
    **{"step": pl.Int64(), "step_line": pl.Int64(), "version": pl.Int64()},
    **{"step_began_at": pl.Float64(), "ended_at": pl.Float64()},
}
_FIRST = ("prompt_id", "epoch", "first_life", "reserved_at", "admitted_at", "dispatched_at")
_LAST = ("sealed_at", "generation_s", "environment_s", "published_at", "version_tokens")
_OPEN = {
    "group_id": pl.String(),
    **{name: GROUPS[name] for name in (*_FIRST, *_LAST)},
    **{"discarded_at": pl.Float64(), "told_in_life": pl.Int64(), "trained_step": pl.Int64()},
}
_NEVER = 2**62


class GroupFold:
    """Holds the groups that may still be trained: those in flight, and those that a later life trains again."""

    def __init__(self, run: str, lives: pl.DataFrame) -> None:
        self._run = pl.lit(run).alias("run")
        self._lives = lives.rows(named=True)
        self._open = pl.DataFrame(schema=_OPEN)

    def take(self, events: pl.DataFrame, life: int) -> pl.DataFrame:
        """The groups that these events of a life have trained or given up."""
        added = _progress(events, life)
        # What is reserved again begins anew.
        again = added.filter(pl.col("reserved_at").is_not_null()).select("group_id")
        known = _merged(self._open.join(again, on="group_id", how="anti"), added)
        trained = self._trained(events, known, life)
        discarded = known.filter(pl.col("discarded_at").is_not_null()).with_columns(
            pl.lit("discarded").alias("fate"), pl.col("discarded_at").alias("ended_at"), pl.lit(life).alias("life")
        )
        self._keep(known, trained, life)
        return pl.concat([self._rows(trained), self._rows(discarded)])

    def left_over(self) -> pl.DataFrame:
        """What was neither trained nor given up when the trace ended."""
        last = self._lives[-1]["life"] if self._lives else 0
        left = self._open.filter(pl.col("told_in_life").is_null())
        return self._rows(left.with_columns(pl.lit("left").alias("fate"), pl.lit(last).alias("life")))

    def _trained(self, events: pl.DataFrame, known: pl.DataFrame, life: int) -> pl.DataFrame:
        """One row for each group of each train step."""
        steps = events.filter(pl.col("event") == "train_step").select(
            pl.col("group_ids").alias("group_id"),
            pl.col("step"),
            pl.col("line").alias("step_line"),
            (pl.col("version") - 1).alias("version"),
            pl.col("t").alias("ended_at"),
            (pl.col("t") - (pl.col("seconds") - pl.col("waited_s").fill_null(0.0))).alias("step_began_at"),
        )
        groups = steps.explode("group_id", empty_as_null=False).join(known, on="group_id", how="left")
        return groups.with_columns(pl.lit("trained").alias("fate"), pl.lit(life).alias("life"))

    def _keep(self, known: pl.DataFrame, trained: pl.DataFrame, life: int) -> None:
        """A group that was trained or discarded is kept as long as a life goes on from before that."""
        steps = trained.group_by("group_id").agg(pl.col("step").max().alias("now_trained"))
        rest = known.join(steps, on="group_id", how="left").with_columns(
            pl.coalesce("now_trained", "trained_step").alias("trained_step"),
            pl.when(pl.col("now_trained").is_not_null() | pl.col("discarded_at").is_not_null())
            .then(life)
            .otherwise("told_in_life")
            .alias("told_in_life"),
            pl.lit(None, pl.Float64()).alias("discarded_at"),
        )
        told_now, from_now_on, later = pl.col("told_in_life") == life, self._back_to(life), self._back_to(life + 1)
        may_come_back = pl.when(told_now).then(later).otherwise(from_now_on) < pl.col("trained_step").fill_null(_NEVER)
        self._open = rest.filter(pl.col("told_in_life").is_null() | may_come_back).select(*_OPEN)

    def _back_to(self, life: int) -> int:
        """The earliest model that this life or a later one goes on from."""
        return min((other["model_step"] for other in self._lives if other["life"] >= life), default=_NEVER)

    def _rows(self, groups: pl.DataFrame) -> pl.DataFrame:
        pairs = pl.col("version_tokens")
        tokens = pairs.list.eval(pl.element().list.get(1)).list.sum()
        products = pairs.list.eval(pl.element().list.get(0) * pl.element().list.get(1)).list.sum()
        given = {*groups.columns, "run", "num_tokens", "aged_tokens"}
        lacking = [pl.lit(None, dtype).alias(name) for name, dtype in GROUPS.items() if name not in given]
        rows = groups.with_columns(self._run, tokens.alias("num_tokens"), *lacking)
        aged = pl.col("version") * pl.col("num_tokens") - products
        return rows.with_columns(aged.alias("aged_tokens")).select(
            pl.col(name).cast(dtype) for name, dtype in GROUPS.items()
        )


def _progress(events: pl.DataFrame, life: int) -> pl.DataFrame:
    """How far these events bring each group."""
    kind, t = pl.col("event"), pl.col("t")
    sealed, published = kind == "attempt_sealed", kind == "group_published"
    about_groups = events.filter(
        kind.is_in(
            [
                *("group_reserved", "group_admitted", "attempt_dispatched", "attempt_resumed", "attempt_sealed"),
                *("group_published", "group_discarded", "prompt_dropped"),
            ]
        )
    )
    rows = about_groups.group_by("group_id", maintain_order=True).agg(
        pl.col("prompt_id").drop_nulls().first(),
        pl.col("epoch").drop_nulls().first(),
        t.filter(kind == "group_reserved").last().alias("reserved_at"),
        t.filter(kind == "group_admitted").last().alias("admitted_at"),
        t.filter(kind.is_in(["attempt_dispatched", "attempt_resumed"])).first().alias("dispatched_at"),
        t.filter(sealed).last().alias("sealed_at"),
        pl.col("generation_s").filter(sealed).last(),
        pl.col("environment_s").filter(sealed).last(),
        t.filter(published).last().alias("published_at"),
        pl.col("version_tokens").filter(published).last(),
        t.filter(kind.is_in(["group_discarded", "prompt_dropped"])).last().alias("discarded_at"),
    )
    return rows.with_columns(
        pl.lit(life, pl.Int64()).alias("first_life"),
        *(pl.lit(None, pl.Int64()).alias(name) for name in ("told_in_life", "trained_step")),
    ).select(*_OPEN)


def _merged(known: pl.DataFrame, added: pl.DataFrame) -> pl.DataFrame:
    """What was known of each group, and what came to it."""
    grouped = pl.concat([known, added]).group_by("group_id", maintain_order=True)
    return grouped.agg(
        *[pl.col(name).drop_nulls().first() for name in _FIRST],
        *[pl.col(name).drop_nulls().last() for name in _LAST],
        pl.col("discarded_at").drop_nulls().last(),
        # An event about a group that was over begins a new journey of it.
        pl.col("told_in_life", "trained_step").last(),
    ).select(*_OPEN)
