"""The rollout state as files: one Parquet table per kind of record, and the counters as JSON."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import pyarrow as pa

from storage import state_records as plain
from storage.canonical import canonical_json
from storage.parquet import decode_table, encode_table
from storage.records import Progress, RolloutState
from storage.refusals import corrupt
from storage.state_checks import defects
from storage.state_schemas import ROWS, SCHEMAS_BY_VERSION, STATE_SCHEMA_VERSION, STATE_SCHEMAS, state_kinds

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class RowPlace:
    """A line of the `rows` table: in which part a row lies, where in it, and its content digest."""

    row_id: str
    kind: str
    part: str
    offset: int
    digest: str


@dataclasses.dataclass(frozen=True, slots=True)
class StateFile:
    """One encoded table with its number of rows (None for the counters)."""

    kind: str
    data: bytes
    rows: int | None


def encode_state(state: RolloutState, places: list[RowPlace], *, writer: str) -> list[StateFile]:
    """The files of a state, one of each of `STATE_KINDS`."""
    tables = plain.plain_tables(state)
    files = [
        _state_file(kind, pa.Table.from_pylist(tables[kind], schema=schema), writer)
        for kind, schema in STATE_SCHEMAS.items()
        if kind in tables
    ]
    # By column: a dict for each of very many rows would keep interpreter and garbage collector busy.
    columns = {name: [getattr(place, name) for place in places] for name in ROWS.names}
    files.append(_state_file("rows", pa.table(columns, schema=ROWS), writer))
    progress = {"progress": plain.plain_progress(state.progress), "writer": writer}
    return [*files, StateFile("progress", canonical_json(progress), None)]


def _state_file(kind: str, table: pa.Table, writer: str) -> StateFile:
    return StateFile(kind, encode_table(table, writer=writer), table.num_rows)


def decode_state(
    files: Mapping[str, tuple[str, bytes]], *, version: int = STATE_SCHEMA_VERSION
) -> tuple[RolloutState, list[RowPlace]]:
    """State and row places from `kind -> (path, verified bytes)`, which holds each of `state_kinds(version)`.

    Raises: SnapshotCorrupt naming the file and what is wrong, or the promise that the state breaks.
    """
    if missing := set(state_kinds(version)) - files.keys():
        raise corrupt("the bundle", f"has no {sorted(missing)}")
    schemas = SCHEMAS_BY_VERSION[version]
    state = RolloutState(
        progress=_decode_progress(*files["progress"]),
        ledger=_decode_records("ledger", files, schemas, plain.ledger_group_from),
        buffer=_decode_records("replay_index", files, schemas, plain.buffered_from),
        spares=_decode_records("spare_prompts", files, schemas, plain.prompt_from),
        dropped=_decode_records("dropped", files, schemas, plain.dropped_from),
        trained=_decode_records("trained", files, schemas, plain.trained_from),
        episodes=_decode_records("episodes", files, schemas, plain.episode_from),
        partial_calls=_decode_records("partial_calls", files, schemas, plain.partial_call_from),
    )
    places = _decode_records("rows", files, schemas, lambda row: RowPlace(**row))
    if found := defects(state):
        path = files["replay_index"][0]
        raise corrupt(f"{path} and its sister tables", "; ".join(found))
    return state, list(places)


def _decode_records(
    kind: str,
    files: Mapping[str, tuple[str, bytes]],
    schemas: Mapping[str, pa.Schema],
    build: Callable[[dict[str, Any]], T],
) -> tuple[T, ...]:
    """The lines of a table; none of one that the version of the format does not have."""
    if kind not in schemas:
        return ()
    path, data = files[kind]
    table = decode_table(data, schemas[kind], path)
    try:
        return tuple(build(row) for row in table.to_pylist())
    except (ValueError, TypeError, KeyError) as error:
        raise corrupt(path, str(error)) from error


def _decode_progress(path: str, data: bytes) -> Progress:
    try:
        body = json.loads(data)
        counters = dict(body["progress"])
        if body.keys() != {"progress", "writer"}:
            raise ValueError(f"keys {sorted(body)} instead of progress and writer")
        _check_progress(counters)
        return plain.progress_from(counters)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise corrupt(path, repr(error)) from error


def _check_progress(counters: Mapping[str, Any]) -> None:
    expected = {field.name for field in dataclasses.fields(Progress)}
    if counters.keys() != expected:
        raise ValueError(
            f"unknown fields {sorted(counters.keys() - expected)}, missing {sorted(expected - counters.keys())}"
        )
    if counters["source"].keys() != {"epoch", "offset"}:
        raise ValueError(f"source {counters['source']} instead of epoch and offset")
    others = ("source", "sampler", "stamps", "shortfall")
    numbers = [value for name, value in counters.items() if name not in others]
    numbers += [*counters["source"].values(), *counters["shortfall"].values()]
    if not all(type(number) is int for number in numbers):
        raise ValueError(f"counters must be integers: {dict(counters)}")
    if type(counters["sampler"]) is not str or type(counters["stamps"]) not in (bool, type(None)):
        raise ValueError(f"sampler {counters['sampler']!r}, stamps {counters['stamps']!r}")
