"""The invariants of a saved rollout state as set algebra over the tables of its bundle.

    I1  every prompt that the source has passed has an owner (or was trained up to the bundle's model), and no other has
    I2  no group has two owners
    I3  the rows in the parts are those that the index refers to, under their groups
    I4  a stamp is admitted once, the cursor covers all stamps, and each admitted batch is complete

What was trained up to the model is in no table: it is what was passed and has no owner. That remainder is compared:
with nothing on the initial model, with that of the anchor for a snapshot (they share a model), and with that of the
checkpoint before it by the same writer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import polars as pl
import pyarrow as pa

from storage import state_records as plain
from storage.manifests import Manifest
from storage.records import Progress, RolloutState
from storage.rows import RowHandle
from storage.snapshot_reader import RestoredBundle
from storage.state_schemas import STATE_SCHEMAS

_SHOWN = 5
_KEY = ["epoch", "prompt_id"]
OWNERS = {
    "ledger": "ledger",
    "replay_index": "replay buffer",
    "trained": "recorded batches",
    "spare_prompts": "spare prompts",
    "dropped": "dropped prompts",
}

# The prompt ids of an epoch, in the order in which the source hands them out.
Order = Callable[[int], Sequence[int]]


@dataclass(frozen=True, slots=True)
class StateTables:
    """The tables of one bundle as frames. `rows` holds `row_id`, `kind` and `group_id` of what lies in the parts."""

    tables: Mapping[str, pl.DataFrame]
    rows: pl.DataFrame
    progress: Progress

    @classmethod
    def of(cls, bundle: RestoredBundle) -> "StateTables":
        """The frames of a bundle that was read."""
        return cls(_tables(bundle.state), _rows(bundle.rows), bundle.state.progress)

    def owned(self) -> pl.DataFrame:
        """One line for each owner of a group: `epoch`, `prompt_id`, `owner`."""
        return pl.concat(
            self.tables[kind].select(*_KEY).with_columns(pl.lit(owner).alias("owner")) for kind, owner in OWNERS.items()
        )


@dataclass(slots=True)
class InvariantChecks:
    """Goes through the bundles of one run, oldest first; each is compared with those that it stands on."""

    _trained: dict[int, pl.DataFrame] = field(default_factory=dict)
    _previous: dict[str, Manifest] = field(default_factory=dict)

    def broken(self, bundle: RestoredBundle, order: Order | None, *, step_size: int) -> list[str]:
        """Every broken invariant of one bundle in words. Without an `order` nothing is said about I1.

        `step_size`: the run's `algorithm.num_prompts_per_step`.
        """
        tables, manifest = StateTables.of(bundle), bundle.manifest
        found = [*two_owners(tables), *rows_off_index(tables), *stamps_off_cursor(tables, step_size)]
        if order is not None:
            trained, beyond = ownerless(tables, passed_by(tables.progress, order))
            found += beyond
            found += self._compare(manifest, trained, step_size)
            if manifest.kind == "trainer_checkpoint":
                self._trained[manifest.sequence] = trained
                self._previous[manifest.writer] = manifest
        return found

    def _compare(self, manifest: Manifest, trained: pl.DataFrame, step_size: int) -> Iterator[str]:
        """The trained remainder against what the bundle stands on."""
        anchor = manifest.anchor
        model_step = manifest.step if anchor is None else anchor.step
        yield from lost_prompts(trained, at_most=model_step * step_size, since="the start of the run")
        if anchor is not None:
            before = self._trained.get(-1 if anchor.sequence is None else anchor.sequence)
            steps = 0
        else:
            earlier = self._previous.get(manifest.writer)
            before = None if earlier is None else self._trained.get(earlier.sequence)
            steps = 0 if earlier is None else manifest.step - earlier.step
        if before is None:
            return
        gone, back = _minus(trained, before), _minus(before, trained)
        yield from lost_prompts(gone, at_most=steps * step_size, since="the checkpoint before")
        if back.height:
            yield f"I1: {_named(back)} trained before the bundle's model and owned again"


def passed_by(progress: Progress, order: Order) -> pl.DataFrame:
    """Every prompt that the source has passed."""
    source = progress.source
    epochs = [(epoch, list(order(epoch))) for epoch in range(source.epoch)]
    if source.offset:
        epochs.append((source.epoch, list(order(source.epoch))[: source.offset]))
    schema = dict.fromkeys(_KEY, pl.Int64)
    frames = [pl.DataFrame({"epoch": [epoch] * len(ids), "prompt_id": ids}, schema=schema) for epoch, ids in epochs]
    return pl.concat([pl.DataFrame(schema=schema), *frames])


def ownerless(tables: StateTables, passed: pl.DataFrame) -> tuple[pl.DataFrame, list[str]]:
    """Prompts that were passed and that no table owns, and (I1) owned groups that the source has not handed out."""
    owned = tables.owned().select(*_KEY).unique()
    beyond = _minus(owned, passed)
    problems = [f"I1: {_named(beyond)} owned, but not handed out by the source yet"] if beyond.height else []
    return _minus(passed, owned), problems


def lost_prompts(trained: pl.DataFrame, *, at_most: int, since: str) -> Iterator[str]:
    """I1: more prompts without an owner than can have been trained."""
    if trained.height > at_most:
        yield f"I1: {_named(trained)} without an owner, but at most {at_most} were trained since {since}"


def two_owners(tables: StateTables) -> Iterator[str]:
    """I2."""
    twice = tables.owned().group_by(_KEY).agg(pl.col("owner").sort()).filter(pl.col("owner").list.len() > 1)
    for line in twice.sort(_KEY).head(_SHOWN).iter_rows(named=True):
        yield f"I2: group e{line['epoch']}-p{line['prompt_id']} is owned by {' and '.join(line['owner'])}"


def rows_off_index(tables: StateTables) -> Iterator[str]:
    """I3: rows without index, index without rows, rows twice, rows of another group."""
    index, rows = _index(tables), tables.rows
    for what, extra in (("rows", rows), ("entries of the index", index)):
        repeated = extra.filter(pl.col("row_id").is_duplicated())
        if repeated.height:
            yield f"I3: {what} that are there twice: {_ids(repeated)}"
    without_index = rows.join(index, on=["row_id", "kind"], how="anti")
    without_rows = index.join(rows, on=["row_id", "kind"], how="anti")
    if without_index.height:
        yield f"I3: {without_index.height} rows that the index does not refer to: {_ids(without_index)}"
    if without_rows.height:
        yield f"I3: {without_rows.height} rows that are not there: {_ids(without_rows)}"
    both = index.join(rows, on=["row_id", "kind"], how="inner", suffix="_of_row")
    foreign = both.filter(pl.col("group_id") != pl.col("group_id_of_row"))
    if foreign.height:
        yield f"I3: {foreign.height} rows of other groups than the index says: {_ids(foreign)}"


def stamps_off_cursor(tables: StateTables, step_size: int) -> Iterator[str]:
    """I4. Groups of the ledger and the replay buffer carry the stamps that are admitted and not trained yet."""
    progress = tables.progress
    stamped = pl.concat(tables.tables[kind].select("target_step") for kind in ("ledger", "replay_index"))
    counts = stamped.drop_nulls().group_by("target_step").len().rename({"len": "groups"})
    if not progress.stamps:
        if counts.height or progress.shortfall:
            yield f"I4: the sampler does not stamp, but stamps are {sorted(counts['target_step'].to_list())[:_SHOWN]}"
        return
    first, last = progress.trainer_version, progress.sampler_cursor
    # Only of our own sampler is it known that it stamps one step after the other.
    in_order = progress.sampler == "in_order"
    outside = counts.filter((pl.col("target_step") > last) | (in_order & (pl.col("target_step") < first)))
    if outside.height:
        steps = sorted(outside["target_step"].to_list())[:_SHOWN]
        yield f"I4: stamps {steps} lie outside {first} to {last}, what the cursor has admitted and is not trained"
    if in_order:
        yield from _incomplete_batches(counts, progress, step_size)


def _incomplete_batches(counts: pl.DataFrame, progress: Progress, step_size: int) -> Iterator[str]:
    first, last = progress.trainer_version, progress.sampler_cursor
    missing = pl.DataFrame(
        list(progress.shortfall.items()), schema={"target_step": pl.Int64, "missing": pl.Int64}, orient="row"
    ).filter(pl.col("target_step").is_between(first, last))
    batches = counts.join(missing, on="target_step", how="full", coalesce=True)
    batches = batches.with_columns(pl.col("groups", "missing").fill_null(0).cast(pl.Int64))
    incomplete = batches.filter(pl.col("groups") + pl.col("missing") != step_size).sort("target_step")
    for step, groups, lacking in incomplete.select("target_step", "groups", "missing").head(_SHOWN).iter_rows():
        yield f"I4: step {step} has {groups} groups and {lacking} that never arrive, its batch is {step_size}"
    unfilled = last - first + 1 - batches.filter(pl.col("target_step").is_between(first, last)).height
    if unfilled > 0:
        yield f"I4: of the steps {first} to {last} that were admitted, {unfilled} have no group"


def _index(tables: StateTables) -> pl.DataFrame:
    """What the tables refer to: `row_id`, `kind`, `group_id`."""
    finished = pl.concat(tables.tables[kind].select(*_KEY, "row_ids") for kind in ("replay_index", "trained"))
    training = finished.explode("row_ids", empty_as_null=False).rename({"row_ids": "row_id"})
    siblings = tables.tables["ledger"].select(*_KEY, "siblings").explode("siblings", empty_as_null=False)
    sealed = siblings.select(*_KEY, pl.col("siblings").struct.field("sealed")).drop_nulls("sealed")
    keys = sealed.select(*_KEY, pl.col("sealed").struct.field("call_keys").alias("row_id"))
    staged = pl.concat([keys, _of_rollouts(tables.tables["episodes"], "calls")]).explode("row_id", empty_as_null=False)
    partial = _of_rollouts(tables.tables["partial_calls"], "chunks").explode("row_id", empty_as_null=False)
    group = pl.format("e{}-p{}", "epoch", "prompt_id").alias("group_id")
    kinds = ((training, "training_rows"), (staged, "staged_calls"), (partial, "partial_tokens"))
    return pl.concat(frame.select("row_id", pl.lit(kind).alias("kind"), group) for frame, kind in kinds)


def _of_rollouts(table: pl.DataFrame, rows: str) -> pl.DataFrame:
    """`epoch`, `prompt_id` and the list `row_id` from a table of rollouts and their `rows`."""
    parsed = pl.col("rollout_id").str.extract_groups(r"^e(?<epoch>\d+)-p(?<prompt_id>\d+)_g\d+$")
    return table.select(
        parsed.struct.field("epoch").cast(pl.Int64),
        parsed.struct.field("prompt_id").cast(pl.Int64),
        pl.col(rows).alias("row_id"),
    )


def _tables(state: RolloutState) -> dict[str, pl.DataFrame]:
    return {
        kind: pl.DataFrame(pl.from_arrow(pa.Table.from_pylist(lines, schema=STATE_SCHEMAS[kind])))
        for kind, lines in plain.plain_tables(state).items()
    }


def _rows(rows: Mapping[str, RowHandle]) -> pl.DataFrame:
    groups: dict[int, list[str]] = {}
    for row in rows.values():
        if id(row.batch) not in groups:
            groups[id(row.batch)] = row.batch.column("group_id").to_pylist()
    lines = [(row_id, row.kind.value, groups[id(row.batch)][row.index]) for row_id, row in rows.items()]
    return pl.DataFrame(lines, schema={"row_id": pl.String, "kind": pl.String, "group_id": pl.String}, orient="row")


def _minus(frame: pl.DataFrame, other: pl.DataFrame) -> pl.DataFrame:
    return frame.join(other, on=_KEY, how="anti")


def _named(frame: pl.DataFrame) -> str:
    """Number and first ids of groups."""
    first = [f"e{epoch}-p{prompt}" for epoch, prompt in frame.sort(_KEY).select(*_KEY).head(_SHOWN).iter_rows()]
    more = " ..." if frame.height > _SHOWN else ""
    return f"{frame.height} prompts ({', '.join(first)}{more}) are"


def _ids(frame: pl.DataFrame) -> str:
    return ", ".join(frame["row_id"].sort().head(_SHOWN).to_list()) + (" ..." if frame.height > _SHOWN else "")
