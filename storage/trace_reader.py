"""Reads the traces of all processes of a run, or of several runs: as events, or as one lazy frame."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import polars as pl

from storage.filesystem import Store
from storage.layout import RunLayout
from storage.trace_files import (
    PART_EVENTS,
    ProcessTrace,
    events_of_process,
    frames_of_process,
    of_every_process,
    scan_parts,
)
from storage.trace_lines import Event
from storage.trace_schema import COLUMNS

__all__ = ["Event", "open_trace", "read_events", "read_trace"]


def read_events(store: Store, layout: RunLayout) -> list[Event]:
    """Every event of every process, by wall-clock time. Each has `t`, `run_process` and `event`.

    The last line of a process may be torn by a kill and is left out.

    Raises: SnapshotCorrupt naming file and line for any other line that is no event; StoreUnavailable.
    """
    found = of_every_process(store, layout, lambda trace: list(events_of_process(store, trace)))
    return sorted((event for events in found for event in events), key=lambda event: float(event["t"]))


@contextmanager
def open_trace(store: Store, layouts: Sequence[RunLayout], *, part_events: int = PART_EVENTS) -> Iterator[pl.LazyFrame]:
    """The events of these runs as one lazy frame: `run`, and `storage.trace_schema.COLUMNS`. It lives in the block.

    Rows of one process are in their order. Compacted traces of a local store are scanned where they lie; everything
    else is first written to a temporary folder as Parquet, a part at a time, so that a trace of any length takes the
    memory of one part. Raises: as `read_events`.
    """
    with tempfile.TemporaryDirectory(prefix="midflight-trace-") as folder:
        frames = []
        for number, layout in enumerate(layouts):
            spool = _Spool(store, Path(folder) / f"{number:04d}", part_events)
            parts = [path for paths in of_every_process(store, layout, spool.parts) for path in paths]
            frame = scan_parts(parts) if parts else pl.LazyFrame(schema=COLUMNS)
            frames.append(frame.select(pl.lit(layout.run).alias("run"), pl.all()))
        yield pl.concat(frames) if frames else pl.LazyFrame(schema={"run": pl.String(), **COLUMNS})


def read_trace(store: Store, layout: RunLayout) -> pl.DataFrame:
    """The events of one run in memory, by time."""
    with open_trace(store, [layout]) as trace:
        return trace.drop("run").sort("t", maintain_order=True).collect()


class _Spool:
    """Local Parquet files of traces; those that are none yet are written to a folder."""

    def __init__(self, store: Store, folder: Path, part_events: int) -> None:
        self._store = store
        self._folder = folder
        self._part_events = part_events

    def parts(self, trace: ProcessTrace) -> list[Path]:
        """Files that hold the events of a process, in order."""
        if trace.index is not None:
            local = [self._store.local_path(part.path) for part in trace.index.parts]
            if all(path is not None and path.exists() for path in local):
                return [path for path in local if path is not None]
        paths = []
        self._folder.mkdir(parents=True, exist_ok=True)
        for number, frame in enumerate(frames_of_process(self._store, trace, part_events=self._part_events)):
            paths.append(self._folder / f"{trace.process}.{number:08d}.parquet")
            frame.write_parquet(paths[-1])
        return paths
