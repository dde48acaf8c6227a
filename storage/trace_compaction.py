"""Turns the trace of a process that has ended into Parquet, about a ninth of its size, and removes its lines.

    parts --> read back and compared --> index --> lines removed

A trace counts as compacted once its index is there: readers then take the parts and ignore the lines. A kill at any
point loses no event and shows none twice; the next compaction goes on where that one stopped.
"""

import io
import logging
from dataclasses import dataclass

import polars as pl

from storage.canonical import canonical_json
from storage.errors import BrokenInvariant, MidflightError, NotFound
from storage.filesystem import Store
from storage.layout import RunLayout
from storage.ownership import LONG_SILENCE_S, read_owner
from storage.trace_files import (
    PART_EVENTS,
    PartEntry,
    ProcessTrace,
    TraceIndex,
    frames_of_process,
    last_event,
    process_traces,
    read_index,
    read_part,
)

logger = logging.getLogger(__name__)

# Some ten seconds of processor time: a controller that has ended is waited for.
MOST_BYTES_AT_END = 2**28


@dataclass(frozen=True, slots=True)
class Compacted:
    """What became of the trace of one process. Bytes of its lines, and of the Parquet parts that replace them.

    `left_alone`: why nothing was done, empty otherwise.
    """

    process: str
    events: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    left_alone: str = ""


def compact_run(store: Store, layout: RunLayout, *, part_events: int = PART_EVENTS) -> list[Compacted]:
    """Compact every process of a run that writes no more; those that may are left alone.

    Raises: SnapshotCorrupt for a damaged trace; StoreUnavailable. What was compacted before stays so.
    """
    results = []
    for trace in process_traces(store, layout):
        reason = _may_still_write(store, layout, trace)
        if reason:
            results.append(Compacted(trace.process, left_alone=reason))
        else:
            done = compact_process(store, layout, trace.process, part_events=part_events)
            results += [] if done is None else [done]
    return results


def compact_process(
    store: Store, layout: RunLayout, process: str, *, part_events: int = PART_EVENTS
) -> Compacted | None:
    """Compact the trace of a process which the caller knows to write no more; None when there is nothing to do.

    Raises: SnapshotCorrupt for a damaged trace; BrokenInvariant when what was written is not what was read;
    StoreUnavailable. The lines are all there then.
    """
    trace = next((found for found in process_traces(store, layout) if found.process == process), None)
    if trace is None or not trace.sources:
        return None
    index = trace.index or read_index(store, layout, process)
    if index is None:
        index = TraceIndex(parts=_write_parts(store, layout, trace, part_events), sources=trace.sources)
        store.write(layout.trace_index(process), canonical_json(index.model_dump(mode="json")) + b"\n")
    before = sum(_size(store, path) for path in trace.sources)
    for path in trace.sources:
        store.delete(path)
    return Compacted(process, index.events, before, sum(part.bytes for part in index.parts))


def _write_parts(store: Store, layout: RunLayout, trace: ProcessTrace, part_events: int) -> tuple[PartEntry, ...]:
    """The parts, each read back. Their bytes follow from the lines: two that compact one trace write the same."""
    parts = []
    for number, frame in enumerate(frames_of_process(store, trace, part_events=part_events)):
        data = io.BytesIO()
        frame.write_parquet(data, compression="zstd")
        part = PartEntry(path=layout.trace_part(trace.process, number), events=frame.height, bytes=data.tell())
        store.write(part.path, data.getvalue())
        if not read_part(store, part).equals(frame):
            raise BrokenInvariant(
                f"{part.path} does not hold the {frame.height} events that were written to it; the lines of the trace "
                "stay: compact it again, and check the store if this repeats"
            )
        parts.append(part)
    return tuple(parts)


def _may_still_write(store: Store, layout: RunLayout, trace: ProcessTrace) -> str:
    """Why a process may write to its trace again; empty when it can't.

    A controller closes its trace before it takes its sign of life away. One whose record is gone without a last word
    was killed, or has failed and is still to say so.
    """
    if trace.index is not None or not trace.sources:
        return ""
    last = last_event(store, trace)
    writer = "" if last is None else str(last["run_process"])
    owner = read_owner(store, layout, writer) if writer else None
    if owner is not None and not owner.is_dead():
        age_s = store.age_s(layout.owner(writer))
        return "" if age_s >= LONG_SILENCE_S and _quiet_s(store, trace) >= LONG_SILENCE_S else f"{owner} may be alive"
    if owner is not None or (last is not None and last["event"] == "run_ended"):
        return ""
    quiet_s = _quiet_s(store, trace)
    if quiet_s >= LONG_SILENCE_S:
        return ""
    return f"it wrote {quiet_s:.0f} s ago and did not say that it ended: wait until {LONG_SILENCE_S:.0f} s have passed"


def _quiet_s(store: Store, trace: ProcessTrace) -> float:
    return min((store.age_s(path) for path in trace.sources), default=LONG_SILENCE_S)


def _size(store: Store, path: str) -> int:
    try:
        return store.size(path)
    except NotFound:
        return 0


def compact_at_end(store: Store, layout: RunLayout, process: str, *, most_bytes: int = MOST_BYTES_AT_END) -> None:
    """For a process that has closed its own trace: compact it, unless it is long; a failure is logged and costs nothing
    else.
    """
    try:
        sources = [
            path for trace in process_traces(store, layout) if trace.process == process for path in trace.sources
        ]
        size = sum(_size(store, path) for path in sources)
        if size <= most_bytes:
            compact_process(store, layout, process)
        else:
            logger.info("the trace of %s has %d bytes: `midflight trace %s --compact`", process, size, layout.run)
    except (MidflightError, OSError, pl.exceptions.PolarsError) as error:
        logger.warning("the trace of %s was not compacted and stays as it is: %s", process, error)
