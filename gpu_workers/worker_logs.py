"""Logs of a run's processes, gathered by its controller for whoever drives it, in bounded volume.

A worker keeps its newest records and hands them over now and then; the controller keeps the newest of all. Midflight's
own loggers count from INFO, all others (vLLM, torch, Ray) from WARNING.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray

from gpu_workers.runtime_names import CONTROLLER, namespace_of

OWN_LOGGERS = ("gpu_workers", "storage")
KEPT_RECORDS = 300
LONGEST_MESSAGE = 1000
_HAND_OVER_S = 2.0

Record = Mapping[str, Any]


class LogTail(logging.Handler):
    """The newest records of one process, as plain values: `t` (Unix seconds), `level`, `source`, `message`."""

    def __init__(self, source: str) -> None:
        super().__init__(logging.INFO)
        self._source = source
        self._records: deque[Record] = deque(maxlen=KEPT_RECORDS)
        self._lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it if it counts."""
        own = record.name.split(".", 1)[0] in OWN_LOGGERS
        if record.levelno >= logging.WARNING or own:
            self.add(record.levelname, self.format(record)[:LONGEST_MESSAGE], at=record.created)

    def add(self, level: str, message: str, *, at: float | None = None) -> None:
        """Keep one record; the oldest goes where there is no room."""
        seconds = time.time() if at is None else at
        self.extend([{"t": seconds, "level": level, "source": self._source, "message": message}])

    def extend(self, records: Sequence[Record], lost: int = 0) -> None:
        """Keep records of another process, which had already lost some."""
        with self._exclusive():
            room = KEPT_RECORDS - len(self._records)
            self._lost += lost + max(0, len(records) - room)
            self._records.extend(records)

    def take(self) -> tuple[list[Record], int]:
        """All records by time, and how many were lost since the last call."""
        with self._exclusive():
            records, lost = sorted(self._records, key=lambda record: float(record["t"])), self._lost
            self._records.clear()
            self._lost = 0
        return records, lost

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        self.acquire()
        try:
            yield
        finally:
            self.release()


def keep_logs(source: str) -> LogTail:
    """A tail of everything that this process logs from now on."""
    tail = LogTail(source)
    root = logging.getLogger()
    root.addHandler(tail)
    for name in OWN_LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO)
    return tail


def forward_logs(run: str, source: str) -> None:
    """Hand what this worker logs to the run's controller, from a thread of its own. Outside Ray nothing happens."""
    if not ray.is_initialized():
        return
    tail = keep_logs(source)
    threading.Thread(target=_hand_over, args=(run, tail, time.sleep), name="log forwarder", daemon=True).start()


def _hand_over(run: str, tail: LogTail, sleep: Callable[[float], None]) -> None:
    while True:
        sleep(_HAND_OVER_S)
        records, lost = tail.take()
        if not records and not lost:
            continue
        try:
            controller = ray.get_actor(CONTROLLER, namespace=namespace_of(run))
        except ValueError:  # it is not there yet, or no longer
            tail.extend(records, lost)
            continue
        controller.take_logs.remote(records, lost)
