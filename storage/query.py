"""SQL over a run: its snapshots, its trace, and the rows and groups of one bundle, as Polars frames in memory.

Only one SELECT is run, over these frames alone: no statement that changes something, no function that opens a file.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import polars as pl
import pyarrow as pa

from storage.bundle_diff import owners_of
from storage.catalog import select
from storage.errors import ConfigurationError
from storage.filesystem import Store
from storage.layout import RunLayout
from storage.manifests import Manifest
from storage.records import RowKind
from storage.runs import bundle_facts, find_bundle, log_of_run, require_live
from storage.schemas import ROW_SCHEMAS
from storage.snapshot_reader import RestoredBundle, read_bundle
from storage.state_records import (
    plain_buffered,
    plain_dropped,
    plain_ledger_group,
    plain_partial_call,
    plain_prompt,
    plain_trained,
)
from storage.trace_reader import read_trace

FRAMES = ("rows", "groups", "calls", "trace", "snapshots")

_SELECT = re.compile(r"\s*(select|with)\b", re.IGNORECASE)
# Anywhere, also in quotes, text or comments: what a parser takes for a name is not for a pattern to decide.
_OPENS_FILES = re.compile(r"(?:read|scan)_(?:csv|database|delta|iceberg|ipc|json|ndjson|parquet)", re.IGNORECASE)
_TEXT = re.compile(r"'(?:[^']|'')*'")

_GROUPS: dict[str, Any] = {
    "group_id": pl.String,
    "owner": pl.String,
    "level": pl.String,
    "prompt_id": pl.Int64,
    "epoch": pl.Int64,
    "order": pl.Int64,
    "batch": pl.Int64,
    "phase": pl.String,
    "status": pl.String,
    "target_step": pl.Int64,
    "start_version": pl.Int64,
    "step": pl.Int64,
    "claimed_by": pl.Int64,
    "siblings": pl.Int64,
    "sealed": pl.Int64,
    "num_tokens": pl.Int64,
    "rewards": pl.List(pl.Float64),
    "reason": pl.String,
}
_CALLS: dict[str, Any] = {
    "call": pl.String,
    "rollout_id": pl.String,
    "group_id": pl.String,
    "attempt": pl.Int64,
    "turn": pl.Int64,
    "prompt_tokens": pl.Int64,
    "num_tokens": pl.Int64,
    "num_rows": pl.Int64,
    "sampling": pl.String,
    "finish_reason": pl.String,
}
_SNAPSHOTS: dict[str, Any] = {
    "sequence": pl.Int64,
    "kind": pl.String,
    "step": pl.Int64,
    "model_step": pl.Int64,
    "anchor_sequence": pl.Int64,
    "cut_time": pl.Float64,
    "published_at": pl.Float64,
    "retired": pl.Boolean,
    "bytes": pl.Int64,
    "files": pl.Int64,
    "counts": pl.String,
}


def query(store: Store, layout: RunLayout, sql: str, *, sequence: int | None = None) -> pl.DataFrame:
    """The answer to one SELECT. `rows`, `groups` and `calls` are those of bundle `sequence`, by default of the one that
    a restore would choose; only the frames that the SQL names are read.

    Raises: ConfigurationError for SQL that can't be run, with the reason and the frames; NotFound; SnapshotCorrupt.
    """
    _refuse_other_statements(sql)
    log_of_run(store, layout)
    bundle = _Bundle(store, layout, sequence)
    loaders: Mapping[str, Callable[[], pl.DataFrame]] = {
        "rows": lambda: rows_frame(bundle.read()),
        "groups": lambda: groups_frame(bundle.read()),
        "calls": lambda: calls_frame(bundle.read()),
        "trace": lambda: read_trace(store, layout),
        "snapshots": lambda: snapshots_frame(store, layout),
    }
    named = [name for name in FRAMES if re.search(rf"\b{name}\b", sql, re.IGNORECASE)]
    frames = {name: loaders[name]() for name in named}
    try:
        return pl.SQLContext(frames, eager=True).execute(sql)
    except pl.exceptions.PolarsError as error:
        columns = "; ".join(f"{name}({', '.join(frame.columns)})" for name, frame in frames.items())
        raise ConfigurationError(
            f"the SQL {sql!r} can't be run: {error}. The frames are {columns or ', '.join(FRAMES)}"
        ) from error


def _refuse_other_statements(sql: str) -> None:
    bare = _TEXT.sub("''", sql)
    problem = None
    if not _SELECT.match(bare):
        problem = "it does not begin with SELECT or WITH"
    elif ";" in bare.rstrip().removesuffix(";"):
        problem = "it holds more than one statement"
    elif found := _OPENS_FILES.search(sql):
        problem = f"{found[0]} opens files"
    if problem is not None:
        raise ConfigurationError(
            f"the SQL {sql!r} is not run: {problem}. Give one SELECT over the frames {', '.join(FRAMES)}"
        )


class _Bundle:
    """The bundle that is asked about, read and verified once, and only if it is needed. None: the run has none."""

    def __init__(self, store: Store, layout: RunLayout, sequence: int | None) -> None:
        self._store = store
        self._layout = layout
        self._manifest: Manifest | None = None
        self._sequence = sequence
        self._read: RestoredBundle | None = None
        if sequence is not None:
            log = log_of_run(store, layout)
            self._manifest = find_bundle(store, layout, log, sequence)
            require_live(layout, log, self._manifest)

    def read(self) -> RestoredBundle | None:
        """Raises SnapshotCorrupt, NoRestorableState."""
        if self._read is None:
            manifest = self._manifest if self._sequence is not None else select(self._store, self._layout).target
            self._read = None if manifest is None else read_bundle(self._store, self._layout, manifest)
        return self._read


def rows_frame(bundle: RestoredBundle | None) -> pl.DataFrame:
    """Training rows, staged calls and tokens of running calls, with their `kind`; a column that a kind does not have is
    null.
    """
    frames = []
    for kind in RowKind:
        rows = [] if bundle is None else [row for row in bundle.rows.values() if row.kind is kind]
        tables = [row.batch.slice(row.index, 1) for row in rows]
        table = pa.Table.from_batches(tables, schema=ROW_SCHEMAS[kind])
        frame = pl.DataFrame(pl.from_arrow(table))
        frames.append(frame.with_columns(pl.lit(kind.value).alias("kind")))
    return pl.concat(frames, how="diagonal")


def groups_frame(bundle: RestoredBundle | None) -> pl.DataFrame:
    """Every group that the bundle names, with its one owner."""
    rows = [] if bundle is None else list(_group_rows(bundle))
    return pl.DataFrame([{name: row.get(name) for name in _GROUPS} for row in rows], schema=_GROUPS)


def _group_rows(bundle: RestoredBundle) -> Iterator[dict[str, Any]]:
    state, owners = bundle.state, owners_of(bundle.state)
    for group in state.ledger:
        sealed = [s.sealed for s in group.siblings if s.sealed is not None]
        own = {"siblings": len(group.siblings), "sealed": len(sealed)}
        own |= {"num_tokens": sum(result.num_tokens for result in sealed)}
        rewards = [result.reward for result in sealed]
        yield {**plain_ledger_group(group), **own, "rewards": rewards, **_owned(group.group_id, owners)}
    for finished in state.buffer:
        yield {**plain_buffered(finished), **_complete(len(finished.rewards)), **_owned(finished.group_id, owners)}
    for entry in state.trained:
        own = {**plain_trained(entry), **_complete(len(entry.group.rewards))}
        yield {**own, **_owned(entry.group.group_id, owners)}
    for prompt in state.spares:
        yield {**plain_prompt(prompt), **_owned(prompt.group_id, owners)}
    for dropped in state.dropped:
        yield {**plain_dropped(dropped), **_owned(dropped.prompt.group_id, owners)}


def _complete(siblings: int) -> dict[str, int]:
    return {"siblings": siblings, "sealed": siblings}


def _owned(group_id: str, owners: Mapping[str, str]) -> dict[str, str]:
    return {"group_id": group_id, "owner": owners[group_id]}


def calls_frame(bundle: RestoredBundle | None) -> pl.DataFrame:
    """Every model call that had not ended at the cut of the bundle. Its tokens are in `rows`, in `num_rows` of them."""
    rows = [
        {
            **plain_partial_call(call),
            "call": call.key,
            "group_id": call.rollout_id.rpartition("_g")[0],
            "num_rows": len(call.chunks),
            "sampling": call.sampling.kind,
        }
        for call in (() if bundle is None else bundle.state.partial_calls)
    ]
    return pl.DataFrame([{name: row[name] for name in _CALLS} for row in rows], schema=_CALLS)


def snapshots_frame(store: Store, layout: RunLayout) -> pl.DataFrame:
    """Every bundle of the log, retired ones too; `counts` is JSON text."""
    log = log_of_run(store, layout)
    facts = [
        bundle_facts(layout, log, slot)
        for slot in log
        if isinstance(slot, Manifest) and slot.kind in ("trainer_checkpoint", "rollout_snapshot")
    ]
    rows = [
        {
            **{name: fact.get(name) for name in _SNAPSHOTS},
            "anchor_sequence": None if fact["anchor"] is None else fact["anchor"]["sequence"],
            "files": len(fact["files"]),
            "counts": json.dumps(fact["counts"], sort_keys=True),
        }
        for fact in facts
    ]
    return pl.DataFrame(rows, schema=_SNAPSHOTS)
