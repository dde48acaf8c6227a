"""Compaction: the same events in Parquet, whatever interrupts it, and never of a process that may still write."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage.canonical import canonical_json
from storage.errors import SnapshotCorrupt, StoreUnavailable
from storage.filesystem import Store, open_store
from storage.layout import RunLayout
from storage.manifests import ManifestLog
from storage.ownership import LONG_SILENCE_S, Owner, SignOfLife
from storage.trace import TraceWriter
from storage.trace_compaction import compact_at_end, compact_process, compact_run
from storage.trace_files import process_traces
from storage.trace_reader import open_trace, read_events, read_trace

LAYOUT = RunLayout("demo")


def _write(store: Store, process: str, numbers: range, *, ended: bool = False) -> None:
    trace = TraceWriter(store, LAYOUT, process=process, run_process=process)
    for number in numbers:
        trace.record("attempt_sealed", rollout_id=f"e0-p{number}_g0", num_tokens=number, target_step=None)
    if ended:
        trace.record("run_ended", reason="over")
    assert trace.close()


def test_a_compacted_trace_is_the_same_trace(store: Store) -> None:
    _write(store, "one", range(10), ended=True)
    _write(store, "two", range(5))
    before, table = read_events(store, LAYOUT), read_trace(store, LAYOUT)
    done = compact_process(store, LAYOUT, "one", part_events=4)
    assert done is not None
    assert (done.process, done.events, done.left_alone) == ("one", 11, "")
    assert [path for path in store.list(LAYOUT.traces) if "one" in path and path.endswith(".jsonl")] == []
    assert read_events(store, LAYOUT) == before
    assert read_trace(store, LAYOUT).equals(table)
    assert compact_process(store, LAYOUT, "one") is None


def test_a_frame_of_several_runs_names_them_and_keeps_the_order_of_each_process(store: Store) -> None:
    other = RunLayout("other")
    _write(store, "one", range(10), ended=True)
    lines = [{"t": 5.0 - n, "run_process": "p", "event": "group_sealed", "group_id": str(n)} for n in range(3)]
    store.write(other.trace("p"), b"\n".join(map(canonical_json, lines)) + b"\n")
    compact_run(store, LAYOUT, part_events=3)
    with open_trace(store, [LAYOUT, other], part_events=2) as trace:
        counts = dict(trace.group_by("run").len().collect().rows())
        groups = trace.filter(run="other").select("group_id", "line").collect().rows()
    assert counts == {"demo": 11, "other": 3}
    assert groups == [("0", 0), ("1", 1), ("2", 2)]


@pytest.mark.parametrize("passing", range(12))
def test_a_kill_at_any_point_loses_no_event_and_shows_none_twice(
    memory_store: Store, troubled: Callable[[Store], Any], passing: int
) -> None:
    """Every call that changes the store may be the last one."""
    _write(memory_store, "one", range(6), ended=True)
    before = read_events(memory_store, LAYOUT)
    (source,) = memory_store.list(LAYOUT.traces)
    whole = memory_store.read(source)
    middle = whole.index(b"\n", len(whole) // 2) + 1
    memory_store.write(LAYOUT.trace_segment("one", 0), whole[:middle])
    memory_store.write(LAYOUT.trace_segment("one", 1), whole[middle:])
    killed = troubled(memory_store)
    killed.fail("change", "trace/", StoreUnavailable("killed"), passing=passing)
    try:
        compact_run(killed, LAYOUT, part_events=3)
    except StoreUnavailable:
        assert read_events(memory_store, LAYOUT) == before
        assert read_trace(memory_store, LAYOUT).height == len(before)
    else:
        assert passing >= 6  # three parts, the index, two deletions
    compact_run(memory_store, LAYOUT, part_events=3)
    assert read_events(memory_store, LAYOUT) == before
    assert [path for path in memory_store.list(LAYOUT.traces) if path.endswith(".jsonl")] == []


def test_a_torn_last_line_stays_left_out(store: Store) -> None:
    _write(store, "one", range(3))
    (path,) = store.list(LAYOUT.traces)
    store.write(path, store.read(path)[:-9])
    compact_process(store, LAYOUT, "one")
    assert [event["num_tokens"] for event in read_events(store, LAYOUT)] == [0, 1]


def test_a_damaged_trace_is_not_compacted_and_stays_whole(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    _write(store, "one", range(3))
    (path,) = store.list(LAYOUT.traces)
    damaged = store.read(path).replace(b"\n", b"?\n", 1)
    store.write(path, damaged)
    with pytest.raises(SnapshotCorrupt, match="line 1 is no trace event"):
        compact_process(store, LAYOUT, "one")
    compact_at_end(store, LAYOUT, "one")
    assert "the trace of one was not compacted and stays as it is" in caplog.text
    assert store.read(path) == damaged
    assert [trace.index for trace in process_traces(store, LAYOUT)] == [None]


def test_at_the_end_of_a_process_only_what_is_quickly_done_is_compacted(store: Store) -> None:
    _write(store, "one", range(3), ended=True)
    compact_at_end(store, LAYOUT, "one", most_bytes=100)
    assert [trace.index for trace in process_traces(store, LAYOUT)] == [None]
    compact_at_end(store, LAYOUT, "one")
    ((index, sources),) = [(trace.index, trace.sources) for trace in process_traces(store, LAYOUT)]
    assert index is not None
    assert (index.events, sources) == (4, ())


def test_a_process_without_a_last_word_is_left_alone_until_it_was_silent_for_long(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    _write(store, "one", range(3))
    (left,) = compact_run(store, LAYOUT)
    assert "did not say that it ended" in left.left_alone
    path = tmp_path / LAYOUT.trace("one")
    long_ago = path.stat().st_mtime - LONG_SILENCE_S
    os.utime(path, (long_ago, long_ago))
    (done,) = compact_run(store, LAYOUT)
    assert (done.left_alone, done.events) == ("", 3)


def test_a_controller_that_lives_keeps_its_trace_even_after_its_last_word(store: Store) -> None:
    _write(store, "one", range(3), ended=True)
    sign = SignOfLife(store, LAYOUT, ManifestLog(store, LAYOUT, "one"), driver=lambda: None, on_fenced=lambda _: None)
    sign.begin()
    (left,) = compact_run(store, LAYOUT)
    assert "may be alive" in left.left_alone
    sign.close()
    (done,) = compact_run(store, LAYOUT)
    assert done.left_alone == ""


def test_a_killed_controller_is_known_to_be_over(store: Store) -> None:
    _write(store, "one", range(3))
    mine = Owner.this_process("one")
    dead = {**{name: getattr(mine, name) for name in ("writer", "host", "machine", "pid")}, "started": 1.0}
    store.write(LAYOUT.owner("one"), json.dumps({**dead, "driver": None, "beat": 1}).encode())
    (done,) = compact_run(store, LAYOUT)
    assert (done.left_alone, done.events) == ("", 3)
