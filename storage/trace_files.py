"""Which files hold the trace of each process: lines as they were written, or the compacted parts that replace them."""

import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import polars as pl
from pydantic import BaseModel, ConfigDict, ValidationError

from storage.errors import NotFound
from storage.filesystem import Store
from storage.layout import RunLayout
from storage.refusals import corrupt
from storage.trace_columns import events_of, frame_of
from storage.trace_lines import Event, parsed, parsed_lines
from storage.trace_schema import COLUMNS

_CHUNK_EVENTS = 20_000
PART_EVENTS = 50_000
_TRIES = 3
_TAIL_BYTES = 2**20

T = TypeVar("T")


class PartEntry(BaseModel):
    """One Parquet part: its path, its events, its size in bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    events: int
    bytes: int


class TraceIndex(BaseModel):
    """What a compacted trace consists of: parts in their order, and the files of lines that they replace."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = 1
    parts: tuple[PartEntry, ...]
    sources: tuple[str, ...]

    @property
    def events(self) -> int:
        """Events in all parts."""
        return sum(part.events for part in self.parts)


@dataclass(frozen=True, slots=True)
class ProcessTrace:
    """The trace of one process. `sources`: its files of lines; they count no more once there is an `index`."""

    process: str
    sources: tuple[str, ...]
    index: TraceIndex | None


def process_traces(store: Store, layout: RunLayout) -> list[ProcessTrace]:
    """Every process that has left a trace, by name. Raises SnapshotCorrupt for an index that can't be read."""
    found: dict[str, list[str]] = {}
    for path in store.list(layout.traces):
        process = layout.process_of(path)
        if process is not None:
            found.setdefault(process, []).append(path)
    return [_process_trace(store, layout, process, paths) for process, paths in found.items()]


def _process_trace(store: Store, layout: RunLayout, process: str, paths: Iterable[str]) -> ProcessTrace:
    sources = tuple(path for path in paths if layout.is_trace_source(path))
    # Segments may have been removed, behind an index that was written, while they were being listed.
    is_compacted = layout.trace_index(process) in paths or layout.trace(process) not in sources
    return ProcessTrace(process, sources, read_index(store, layout, process) if is_compacted else None)


def read_index(store: Store, layout: RunLayout, process: str) -> TraceIndex | None:
    """The index of a compacted trace; None when it is not compacted. Raises SnapshotCorrupt."""
    path = layout.trace_index(process)
    try:
        return TraceIndex.model_validate_json(store.read(path))
    except NotFound:
        return None
    except ValidationError as error:
        raise corrupt(path, f"is no index of a trace: {error}") from error


def read_part(store: Store, part: PartEntry) -> pl.DataFrame:
    """The events of a part, with every column of this version's schema."""
    data: Any = store.local_path(part.path)
    if data is None:
        data = io.BytesIO(store.read(part.path))
    elif not data.exists():
        raise NotFound(f"store {store.url}: {part.path} is not there, though the index of the trace names it")
    return scan_parts([data]).collect()


def scan_parts(parts: list[Any]) -> pl.LazyFrame:
    """Parts of any version as one frame: columns they lack are null, columns nobody knows any more are left out."""
    return pl.scan_parquet(parts, schema=dict(COLUMNS), missing_columns="insert", extra_columns="ignore")


def events_of_process(store: Store, trace: ProcessTrace) -> Iterator[Event]:
    """Its events in the order of their recording. Raises SnapshotCorrupt, NotFound when it is compacted meanwhile."""
    if trace.index is not None:
        for part in trace.index.parts:
            yield from events_of(read_part(store, part))
        return
    for path in trace.sources:
        yield from parsed_lines(_lines(store, path), path)


def frames_of_process(store: Store, trace: ProcessTrace, *, part_events: int = PART_EVENTS) -> Iterator[pl.DataFrame]:
    """Its events as frames of at most `part_events` rows; few Python objects live at a time."""
    if trace.index is not None:
        yield from (read_part(store, part) for part in trace.index.parts)
        return
    events, done = events_of_process(store, trace), 0
    while frames := list(_frames(islice(events, part_events), done)):
        whole = pl.concat(frames)
        done += whole.height
        yield whole


def _frames(events: Iterator[Event], first_line: int) -> Iterator[pl.DataFrame]:
    while chunk := list(islice(events, _CHUNK_EVENTS)):
        yield frame_of(chunk, first_line=first_line)
        first_line += len(chunk)


def last_event(store: Store, trace: ProcessTrace) -> Event | None:
    """The newest event in the lines of a process, without reading them all."""
    for path in reversed(trace.sources):
        for line in reversed(_tail(store, path).splitlines()):
            if (event := parsed(line)) is not None:
                return event
    return None


def of_every_process(store: Store, layout: RunLayout, read: Callable[[ProcessTrace], T]) -> list[T]:
    """`read(trace)` for each process. One that is compacted at this moment is looked up and read again."""
    results: dict[str, T] = {}
    for attempt in range(_TRIES):
        try:
            for trace in process_traces(store, layout):
                if trace.process not in results:
                    results[trace.process] = read(trace)
        except NotFound:
            if attempt + 1 == _TRIES:
                raise
        else:
            break
    return list(results.values())


def _tail(store: Store, path: str) -> bytes:
    local = store.local_path(path)
    if local is None:
        return store.read(path)
    with local.open("rb") as file:
        file.seek(max(0, local.stat().st_size - _TAIL_BYTES))
        return file.read()


def _lines(store: Store, path: str) -> Iterator[bytes]:
    """Lines of a file, those of a local one without reading it whole."""
    local = store.local_path(path)
    if local is None:
        yield from io.BytesIO(store.read(path))
        return
    try:
        with local.open("rb") as file:
            yield from file
    except FileNotFoundError as error:
        raise NotFound(f"store {store.url}: {path} is not there") from error
