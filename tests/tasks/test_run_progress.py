"""A run's progress is read from its trace alone."""

import json

import pytest

from storage.filesystem import open_store
from storage.layout import RunLayout
from storage.trace import TraceWriter
from storage.trace_compaction import compact_process
from tasks.run_progress import RunProgress, TraceFollower, progress_of

LAYOUT = RunLayout("run")


def step(number, reward, t=0.0):
    return {"t": t, "run_process": "p1", "event": "train_step", "step": number, "rewards_mean": reward}


@pytest.fixture(params=["local", "memory"])
def store(request, tmp_path):
    return open_store(str(tmp_path) if request.param == "local" else f"memory://{tmp_path.name}")


def test_a_follower_sees_each_event_once(store):
    writer = TraceWriter(store, LAYOUT, process="p1", run_process="p1")
    follower = TraceFollower(store, LAYOUT)
    writer.record("train_step", step=1, rewards_mean=0.5)
    writer.close()
    assert [event["step"] for event in follower.poll()] == [1]
    second = TraceWriter(store, LAYOUT, process="p2", run_process="p2")
    second.record("train_step", step=2, rewards_mean=0.6)
    second.close()
    assert [event["step"] for event in follower.poll()] == [2]
    assert follower.poll() == []


def test_a_line_that_is_still_being_written_waits(tmp_path):
    store = open_store(str(tmp_path))
    path = tmp_path / LAYOUT.trace("p1")
    path.parent.mkdir(parents=True)
    line = json.dumps(step(1, 0.5))
    path.write_text(line[:10])
    follower = TraceFollower(store, LAYOUT)
    assert follower.poll() == []
    path.write_text(line + "\n")
    assert [event["step"] for event in follower.poll()] == [1]


def test_a_trace_that_is_compacted_while_it_is_followed_is_seen_once(store):
    writer = TraceWriter(store, LAYOUT, process="p1", run_process="p1")
    follower = TraceFollower(store, LAYOUT)
    writer.record("train_step", step=1, rewards_mean=0.5)
    writer.record("train_step", step=2, rewards_mean=0.6)
    writer.close()
    early = follower.poll()
    assert compact_process(store, LAYOUT, "p1", part_events=1) is not None
    assert [event["step"] for event in [*early, *follower.poll()]] == [1, 2]
    assert follower.poll() == []
    assert [event["step"] for event in TraceFollower(store, LAYOUT).poll()] == [1, 2]


def test_what_was_written_after_the_last_look_is_read_from_the_compacted_trace(store):
    lines = [json.dumps(step(number, 0.5, t=float(number))) + "\n" for number in range(1, 5)]
    store.write(LAYOUT.trace_segment("p1", 0), "".join(lines[:1]).encode())
    follower = TraceFollower(store, LAYOUT)
    assert len(follower.poll()) == 1
    store.write(LAYOUT.trace_segment("p1", 1), "".join(lines[1:]).encode())
    compact_process(store, LAYOUT, "p1", part_events=2)
    assert [event["step"] for event in follower.poll()] == [2, 3, 4]


def test_a_run_without_a_trace_has_made_no_step(tmp_path):
    assert progress_of(open_store(str(tmp_path)), "run").step == 0


def test_steps_that_a_restore_undid_are_forgotten():
    progress = RunProgress()
    progress.add([step(1, 0.1), step(2, 0.2), step(3, 0.3)])
    progress.add([{"t": 4.0, "event": "checkpoint_restored", "step": 1}, step(2, 0.25)])
    assert progress.rewards == {1: 0.1, 2: 0.25}
    assert (progress.step, progress.reward) == (2, 0.25)


def test_steps_that_are_trained_again_from_their_batches_are_counted():
    progress = RunProgress()
    progress.add([step(1, 0.1), step(2, 0.2), step(3, 0.3)])
    progress.add([{"t": 4.0, "event": "checkpoint_restored", "step": 2, "model_step": 0}])
    progress.add([{**step(n, n / 10), "replayed": n < 3} for n in (1, 2, 3)])
    assert (progress.rewards, progress.replayed) == ({1: 0.1, 2: 0.2, 3: 0.3}, 2)


def test_only_completed_attempts_count_as_snapshots():
    attempt = {"t": 1.0, "event": "snapshot_attempt"}
    progress = RunProgress()
    progress.add([{**attempt, "outcome": "skipped"}, {**attempt, "outcome": "completed"}])
    assert progress.snapshots == 1
