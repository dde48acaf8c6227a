"""Reads the traces of all processes of a run as one sequence of events."""

import json
from collections.abc import Iterator
from typing import Any

import polars as pl

from storage.filesystem import Store
from storage.layout import RunLayout
from storage.refusals import corrupt

Event = dict[str, Any]


def read_events(store: Store, layout: RunLayout) -> list[Event]:
    """Every event of every process, by wall-clock time. Each has `t`, `run_process` and `event`.

    The last line of a process may be torn by a kill and is left out.

    Raises: SnapshotCorrupt naming file and line for any other line that is no event; StoreUnavailable.
    """
    events = [event for path in store.list(layout.traces) for event in _events_of(store.read(path), path)]
    return sorted(events, key=lambda event: float(event["t"]))


def read_trace(store: Store, layout: RunLayout) -> pl.LazyFrame:
    """The events as a lazy frame: one column per field, lists and objects as JSON text."""
    events = read_events(store, layout)
    if not events:
        schema = {"t": pl.Float64, "run_process": pl.String, "event": pl.String}
        return pl.LazyFrame(schema=schema)
    rows = [{name: _cell(value) for name, value in event.items()} for event in events]
    return pl.from_dicts(rows, infer_schema_length=None, strict=False).lazy()


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value


def _events_of(data: bytes, path: str) -> Iterator[Event]:
    lines = [line for line in data.split(b"\n") if line.strip()]
    events = [_parse(line) for line in lines]
    for number, event in enumerate(events):
        if event is not None:
            yield event
        elif not _may_be_torn(events, number):
            raise corrupt(path, f"line {number + 1} is no trace event: {lines[number][:80]!r}")


def _parse(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(event, dict) and isinstance(event.get("t"), int | float) and "event" in event
    return event if whole and "run_process" in event else None


def _may_be_torn(events: list[Event | None], number: int) -> bool:
    """A process that was killed leaves one torn line: the last, or the one before another process goes on."""
    if number + 1 == len(events):
        return True
    before = events[number - 1] if number else None
    after = events[number + 1]
    return before is not None and after is not None and before["run_process"] != after["run_process"]
