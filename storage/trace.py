"""Writes the rollout trace: one JSON line per event. Recording returns at once and never fails a step.

Events lie a few milliseconds in a queue, then in one file per process (local stores), or for a second, then in
numbered segments (stores that can't append). A kill loses what is in the queue.
"""

import json
import logging
import os
import queue
import threading
import time
from pathlib import Path
from typing import IO, Any, Protocol

from storage.errors import StoreError
from storage.fault_points import planned_faults
from storage.filesystem import Store
from storage.layout import RunLayout

logger = logging.getLogger(__name__)

# Long enough that events that follow each other share a write: waking the thread costs more than writing a line.
_FILE_INTERVAL_S = 0.01
_LOOKS_BEFORE_WAITING = 5
_SEGMENT_INTERVAL_S = 1.0
_MAX_WAITING = 200_000
_CLOSE_TIMEOUT_S = 10.0
# One encoder for all lines: `json.dumps` makes another one at each call.
_encode = json.JSONEncoder(separators=(",", ":"), default=str).encode

_Item = tuple[float, str, dict[str, Any]] | None


class NoTrace:
    """Records nothing."""

    def record(self, event: str, **fields: Any) -> None:
        """Forget the event."""

    def close(self) -> bool:
        """Nothing to write."""
        return True


class TraceWriter:
    """The trace of one process. `process` names its file; `run_process` is new for each process and in every line.

    The background thread is a daemon; `close` writes what is left. Events beyond `_MAX_WAITING` that the store did
    not take are dropped and counted in a `trace_lost` event.
    """

    def __init__(self, store: Store, layout: RunLayout, *, process: str, run_process: str) -> None:
        self._run_process = run_process
        self._waiting: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._lost = 0
        path = store.local_path(layout.trace(process))
        self._sink: _Sink = _Segments(store, layout, process) if path is None else _File(path)
        self._thread = threading.Thread(target=self._write_all, name="midflight-trace", daemon=True)
        self._thread.start()
        if (faults := planned_faults(layout.run)) is not None:
            self.record("faults_planned", faults={str(number): fault for number, fault in enumerate(faults)})

    def record(self, event: str, **fields: Any) -> None:
        """Append one event with the wall-clock time of this call."""
        if self._waiting.qsize() >= _MAX_WAITING:
            self._lost += 1
            return
        self._waiting.put((time.time(), event, fields))

    def close(self) -> bool:
        """Write what is left and stop; gives up on a store that hangs. Whether nothing will be written any more."""
        self._waiting.put(None)
        self._closing.set()
        self._thread.join(_CLOSE_TIMEOUT_S)
        return not self._thread.is_alive()

    def _write_all(self) -> None:
        lines: list[str] = []
        ended = False
        while not ended:
            burst = self._take_burst()
            ended = burst[-1] is None
            lines += [self._line(*item) for item in burst if item is not None]
            if self._lost:
                lost, self._lost = self._lost, 0
                lines.append(self._line(time.time(), "trace_lost", {"events": lost}))
            lines = self._flush(lines)
        self._sink.close()

    def _take_burst(self) -> list[_Item]:
        """The events of one interval; None is the last one of all.

        Where events come one after the other, looking once in an interval is cheaper than being woken by each.
        """
        for _ in range(_LOOKS_BEFORE_WAITING):
            self._pause()
            if burst := self._drain():
                return burst
        first = self._waiting.get()
        if first is None:
            return [None]
        self._pause()
        return [first, *self._drain()]

    def _pause(self) -> None:
        if self._sink.interval_s > _FILE_INTERVAL_S:
            self._closing.wait(self._sink.interval_s)
        else:
            time.sleep(self._sink.interval_s)  # short enough for `close`, and half the price of a wait

    def _drain(self) -> list[_Item]:
        burst: list[_Item] = []
        while not self._waiting.empty() and (not burst or burst[-1] is not None):
            burst.append(self._waiting.get())
        return burst

    def _flush(self, lines: list[str]) -> list[str]:
        """Write the lines; returns those that are left for the next try."""
        try:
            self._sink.write("".join(lines).encode())
        except (OSError, StoreError) as error:
            logger.warning("the rollout trace could not be written and is kept for the next try: %s", error)
            self._lost += len(lines[_MAX_WAITING:])
            return lines[:_MAX_WAITING]
        return []

    def _line(self, t: float, event: str, fields: dict[str, Any]) -> str:
        head = {"t": t, "run_process": self._run_process, "event": event}
        try:
            line = _encode({**head, **fields, **head})
        except (TypeError, ValueError):
            line = _encode({**head, "fields": repr(fields)})
        return line + "\n"


class _Sink(Protocol):
    interval_s: float

    def write(self, data: bytes) -> None: ...

    def close(self) -> None: ...


class _File:
    """A file that grows. Each write reaches the kernel at once, so that a kill of the process loses none of it."""

    interval_s = _FILE_INTERVAL_S

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._size = 0

    def write(self, data: bytes) -> None:
        file, size = self._open(), self._size
        try:
            while data:
                written = file.write(data)
                size, data = size + written, data[written:]
        except OSError:
            # What was half written would become a torn line in the middle.
            file.truncate(self._size)
            raise
        self._size = size

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _open(self) -> IO[bytes]:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a+b", buffering=0)
            if self._file.seek(0, os.SEEK_END):
                self._file.seek(-1, os.SEEK_END)
                if self._file.read(1) != b"\n":
                    self._file.write(b"\n")
            self._size = self._file.seek(0, os.SEEK_END)
        return self._file


class _Segments:
    """Numbered objects; a segment that could not be written is tried again under its number."""

    interval_s = _SEGMENT_INTERVAL_S

    def __init__(self, store: Store, layout: RunLayout, process: str) -> None:
        self._store = store
        self._layout = layout
        self._process = process
        self._number = 0

    def write(self, data: bytes) -> None:
        if data:
            self._store.write(self._layout.trace_segment(self._process, self._number), data)
            self._number += 1

    def close(self) -> None:
        return
