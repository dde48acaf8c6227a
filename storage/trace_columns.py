"""Events as columns and back, without loss: what the columns of the schema can't hold goes to `extra`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import polars as pl

from storage.trace_lines import Event
from storage.trace_schema import COLUMNS, FIELDS, HEAD, OBJECTS

_EMPTY = pl.DataFrame(schema=COLUMNS)
_FIELDS: Mapping[str, pl.DataType] = {**HEAD, **FIELDS}
_PYTHON_TYPES: Mapping[Any, set[type]] = {
    pl.String(): {str},
    pl.Int64(): {int},
    pl.Float64(): {int, float},
    pl.Boolean(): {bool},
}
_GREATEST = 2**63 - 1
# Whole numbers beyond this are no longer exact as floating point numbers.
_EXACT = 2**53
_ABSENT = object()


def frame_of(events: Sequence[Event], *, first_line: int = 0) -> pl.DataFrame:
    """The events of one process in their order, as rows of `COLUMNS`; `first_line` is the place of the first."""
    by_name: dict[str, list[int]] = {}
    for place, event in enumerate(events):
        by_name.setdefault(str(event["event"]), []).append(place)
    frames = [_EMPTY, *(_frame_of_one_kind(events, places, first_line) for places in by_name.values())]
    return pl.concat(frames, how="diagonal").sort("line")


def _frame_of_one_kind(events: Sequence[Event], places: Sequence[int], first_line: int) -> pl.DataFrame:
    """Events of one name, which have nearly the same fields: short columns without gaps."""
    chosen = [events[place] for place in places]
    columns: dict[str, list[Any]] = {"line": [first_line + place for place in places]}
    extra: dict[int, dict[str, Any]] = {}
    for name in dict.fromkeys(chain.from_iterable(chosen)):
        if name in _FIELDS:
            columns[name] = _column(name, chosen, extra)
            continue
        for row, event in enumerate(chosen):
            if name in event:
                extra.setdefault(row, {})[name] = event[name]
    columns["extra"] = [json.dumps(extra[row]) if row in extra else None for row in range(len(chosen))]
    return pl.DataFrame(columns, schema={name: COLUMNS[name] for name in columns})


def _column(name: str, events: Sequence[Event], extra: dict[int, dict[str, Any]]) -> list[Any]:
    """The values of a field; those that its column can't hold go to `extra`, by row."""
    dtype, values = _FIELDS[name], [event.get(name, _ABSENT) for event in events]
    if name in OBJECTS:
        fits = [isinstance(value, dict) for value in values]
    elif _all_fit(values, dtype):
        return _cast(values, dtype)
    else:
        fits = [_all_fit([value], dtype) for value in values]
    for row, value in enumerate(values):
        if not fits[row] and value is not _ABSENT:
            extra.setdefault(row, {})[name] = value
    kept = [value if fit else None for value, fit in zip(values, fits, strict=True)]
    if name in OBJECTS:
        return [None if value is None else json.dumps(value) for value in kept]
    return _cast(kept, dtype)


def _cast(values: list[Any], dtype: pl.DataType) -> list[Any]:
    return [None if value is None else float(value) for value in values] if dtype == pl.Float64() else values


def _all_fit(values: Sequence[Any], dtype: Any) -> bool:
    """Whether a column gives back exactly these values."""
    kinds = set(map(type, values))
    if isinstance(dtype, pl.List):
        return kinds <= {list} and _all_fit(list(chain.from_iterable(values)), dtype.inner)
    if not kinds <= _PYTHON_TYPES[dtype]:
        return False
    if int not in kinds:
        return True
    most = _GREATEST if dtype == pl.Int64() else _EXACT
    return all(-most <= value <= most for value in values if isinstance(value, int))


def events_of(frame: pl.DataFrame) -> Iterator[Event]:
    """The events that such a frame was made of, field by field."""
    names = [name for name in frame.columns if name in HEAD or name in FIELDS]
    extras = frame["extra"].to_list()
    for values, extra in zip(frame.select(names).iter_rows(), extras, strict=True):
        event = {name: value for name, value in zip(names, values, strict=True) if value is not None}
        for name in OBJECTS & event.keys():
            event[name] = json.loads(event[name])
        if extra is not None:
            event |= json.loads(extra)
        yield event
