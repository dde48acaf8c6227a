"""The trace: recording never waits and never fails, a kill tears at most the last line, reading tells damage."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from storage.errors import SnapshotCorrupt, StoreUnavailable
from storage.filesystem import Store, open_store
from storage.layout import RunLayout
from storage.trace import NoTrace, TraceWriter
from storage.trace_reader import read_events, read_trace

LAYOUT = RunLayout("demo")


def _writer(store: Any, process: str = "controller-1", run_process: str = "one") -> TraceWriter:
    return TraceWriter(store, LAYOUT, process=process, run_process=run_process)


def test_events_are_read_back_with_time_and_process(store: Store) -> None:
    before = time.time()
    trace = _writer(store)
    trace.record("train_step", step=1, group_ids=["a", "b"], metrics={"loss": 0.5})
    trace.record("weight_sync", version=1, seconds=0.25)
    trace.close()
    first, second = read_events(store, LAYOUT)
    assert first["event"] == "train_step"
    assert (first["step"], first["group_ids"], first["metrics"]) == (1, ["a", "b"], {"loss": 0.5})
    assert first["run_process"] == second["run_process"] == "one"
    assert before <= first["t"] <= second["t"] <= time.time()


def test_a_local_event_reaches_the_file_within_moments_and_without_closing(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    trace = _writer(store)
    trace.record("group_sealed", group_id="e0-p1")
    deadline = time.monotonic() + 5
    while not read_events(store, LAYOUT) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert [event["group_id"] for event in read_events(store, LAYOUT)] == ["e0-p1"]
    trace.close()


KILLED = """
import os, signal, sys, time
from storage.filesystem import open_store
from storage.layout import RunLayout
from storage.trace import TraceWriter
trace = TraceWriter(open_store(sys.argv[1]), RunLayout("demo"), process="p", run_process="one")
for number in range(500):
    trace.record("group_sealed", number=number)
time.sleep(0.5)
trace.record("group_sealed", number=-1)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_loses_only_the_last_moments(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    numbers = [event["number"] for event in read_events(open_store(str(tmp_path)), LAYOUT)]
    assert numbers[:500] == list(range(500))


def test_recording_from_many_threads_loses_nothing(store: Store) -> None:
    trace = _writer(store)

    def record() -> None:
        for number in range(200):
            trace.record("group_sealed", number=number)

    threads = [threading.Thread(target=record) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trace.close()
    assert len(read_events(store, LAYOUT)) == 1600


class Dead:
    """A store that refuses every write."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.dead = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def write(self, path: str, data: bytes) -> None:
        if self.dead:
            raise StoreUnavailable(f"write {path}")
        self._store.write(path, data)


def test_a_dead_store_neither_fails_nor_delays_a_recording_and_events_come_later(memory_store: Store) -> None:
    dead = Dead(memory_store)
    trace = _writer(dead)
    started = time.monotonic()
    trace.record("group_sealed", number=1)
    assert time.monotonic() - started < 0.1
    time.sleep(1.2)
    dead.dead = False
    trace.record("group_sealed", number=2)
    trace.close()
    assert [event["number"] for event in read_events(memory_store, LAYOUT)] == [1, 2]


def test_a_field_that_is_no_json_is_written_as_text(store: Store) -> None:
    trace = _writer(store)
    trace.record("odd", path=Path("/a"), keys={("a", 1): 2})
    trace.close()
    (event,) = read_events(store, LAYOUT)
    assert "('a', 1)" in json.dumps(event)


def test_a_torn_last_line_is_left_out(store: Store) -> None:
    trace = _writer(store)
    for number in range(3):
        trace.record("group_sealed", number=number)
    trace.close()
    (path,) = store.list(LAYOUT.traces)
    store.write(path, store.read(path)[:-9])
    assert [event["number"] for event in read_events(store, LAYOUT)] == [0, 1]


def test_a_process_that_goes_on_in_a_torn_file_starts_a_new_line(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    first = _writer(store, run_process="one")
    for number in range(2):
        first.record("group_sealed", number=number)
    first.close()
    path = tmp_path / LAYOUT.trace("controller-1")
    path.write_bytes(path.read_bytes()[:-9])
    second = _writer(store, run_process="two")
    second.record("group_sealed", number=7)
    second.close()
    assert [event["number"] for event in read_events(store, LAYOUT)] == [0, 7]


def test_a_damaged_line_in_the_middle_is_told_by_file_and_line(store: Store) -> None:
    trace = _writer(store)
    for number in range(3):
        trace.record("group_sealed", number=number)
    trace.close()
    (path,) = store.list(LAYOUT.traces)
    lines = store.read(path).split(b"\n")
    store.write(path, b"\n".join([lines[0], lines[1][:-3], *lines[2:]]))
    with pytest.raises(SnapshotCorrupt, match=f"{path}: line 2 is no trace event"):
        read_events(store, LAYOUT)


def test_traces_of_several_processes_are_one_sequence(store: Store) -> None:
    one, two = _writer(store, "a", "one"), _writer(store, "b", "two")
    for number in range(4):
        (one, two)[number % 2].record("group_sealed", number=number)
        time.sleep(0.002)
    one.close()
    two.close()
    assert [event["number"] for event in read_events(store, LAYOUT)] == [0, 1, 2, 3]


def test_the_trace_is_a_frame_with_a_column_per_field(store: Store) -> None:
    trace = _writer(store)
    trace.record("train_step", step=1, rewards_mean=1, group_ids=["a"])
    trace.record("train_step", step=2, rewards_mean=0.5, group_ids=["b", "c"])
    trace.close()
    frame = read_trace(store, LAYOUT).select("event", "step", "rewards_mean", "group_ids")
    assert frame.rows() == [("train_step", 1, 1.0, ["a"]), ("train_step", 2, 0.5, ["b", "c"])]


def test_a_run_without_a_trace_has_no_events(store: Store) -> None:
    assert read_events(store, LAYOUT) == []
    assert read_trace(store, LAYOUT).is_empty()
    NoTrace().record("anything", at=1)
    NoTrace().close()
    assert store.list("") == []
