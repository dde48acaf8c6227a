"""A fork shares no file with its source, says where it came from, and counts only when it is whole."""

import json
from typing import Any

import pytest

from storage.catalog import select
from storage.errors import ConfigurationError, NotFound, SnapshotCorrupt, StoreError
from storage.forking import fork
from storage.identity import identity
from storage.layout import RunLayout
from storage.manifests import Manifest, read_log
from storage.records import Progress
from storage.retention import Keep, retain
from storage.run_record import read_run_record
from storage.snapshot_reader import read_bundle, verify_model_files
from storage.trace_reader import read_events

NEW = RunLayout("second")


def _events(run: Any) -> None:
    lines = []
    for step in (1, 2, 3):
        lines.append({"event": "group_published", "group_id": f"e0-p{step}", "rewards": [1.0], "version_tokens": []})
        lines.append({"event": "train_step", "step": step, "version": step, "group_ids": [f"e0-p{step}"]})
    text = "".join(json.dumps({"t": t + 1.0, "run_process": "first", **e}) + "\n" for t, e in enumerate(lines))
    run.store.write(run.layout.trace("controller"), text.encode())


def _pair(run: Any) -> tuple[Manifest, Manifest]:
    checkpoint = run.checkpoint(2, buffered=(7,))
    progress = Progress(train_steps=2)
    return checkpoint, run.snapshot(buffered=(7, 8), anchor=checkpoint, progress=progress)


def test_a_fork_holds_the_same_state_and_model_under_its_own_name(run: Any) -> None:
    checkpoint, snapshot = _pair(run)
    run.checkpoint(3)
    made = fork(run.store, run.layout, snapshot.sequence, "second")
    chosen = select(run.store, NEW)
    assert (chosen.target, chosen.anchor, chosen.passed_over) == (made.target, made.anchor, ())
    assert made.anchor is not None
    verify_model_files(run.store, made.anchor)
    copied, original = read_bundle(run.store, NEW, made.target), run.read(snapshot)
    assert (copied.state, copied.rows) == (original.state, original.rows)
    assert made.target.logical_digest == snapshot.logical_digest
    assert made.target.config["name"] == "second"
    assert made.target.identity == snapshot.identity == identity(run.config).fingerprint
    read = {path.rpartition("/")[2]: run.store.read(path) for path in run.store.list(NEW.checkpoints)}
    assert read == {e.path.rpartition("/")[2]: run.store.read(e.path) for e in checkpoint.files if "/checkp" in e.path}


def test_the_record_of_a_fork_says_where_it_came_from(run: Any) -> None:
    checkpoint, snapshot = _pair(run)
    fork(run.store, run.layout, snapshot.sequence, "second")
    origin = read_run_record(run.store, NEW).forked_from
    assert origin is not None
    assert (origin["run"], origin["sequence"], origin["anchor_sequence"]) == ("demo", 2, checkpoint.sequence)
    slots = [slot for slot in read_log(run.store, NEW) if isinstance(slot, Manifest)]
    assert {slot.writer.split("-of-")[1] for slot in slots} == {"demo-00000002"}


def test_neither_run_loses_anything_when_the_other_is_pruned(run: Any) -> None:
    _, snapshot = _pair(run)
    made = fork(run.store, run.layout, snapshot.sequence, "second")
    assert not {e.path for e in made.target.files} & {e.path for e in snapshot.files}
    run.snapshot(buffered=(9,), anchor=run.checkpoint(3))
    retained = retain(run.store, run.layout, run.log, keep=Keep(1, 1))
    assert snapshot.sequence in retained.retired
    read_bundle(run.store, NEW, made.target)
    assert all(path.startswith("demo/") for path in retained.deleted)


def test_the_trace_up_to_the_cut_goes_along(run: Any) -> None:
    _events(run)
    _, snapshot = _pair(run)
    fork(run.store, run.layout, snapshot.sequence, "second")
    events = read_events(run.store, NEW)
    assert [e["step"] for e in events if e["event"] == "train_step"] == [1, 2]
    assert [e["group_id"] for e in events if e["event"] == "group_published"] == ["e0-p1", "e0-p2"]


def test_a_bundle_that_is_not_whole_is_not_forked(run: Any) -> None:
    checkpoint, snapshot = _pair(run)
    weights = next(entry for entry in checkpoint.files if entry.role == "weights")
    data = run.store.read(weights.path)
    run.store.write(weights.path, data[:-1])
    with pytest.raises(SnapshotCorrupt, match=r"model\.safetensors: manifest says"):
        fork(run.store, run.layout, snapshot.sequence, "second")
    assert read_log(run.store, NEW) == ()
    run.store.write(weights.path, data)
    part = next(entry for entry in snapshot.files if entry.role == "part")
    run.store.delete(part.path)
    with pytest.raises(SnapshotCorrupt, match="missing from store"):
        fork(run.store, run.layout, snapshot.sequence, "third")
    assert run.store.list("third") == []


def test_what_cannot_be_forked_is_refused_by_name(run: Any) -> None:
    old, _ = _pair(run)
    anchor = run.checkpoint(3)
    newest = run.snapshot(buffered=(9,), anchor=anchor)
    retain(run.store, run.layout, run.log, keep=Keep(1, 1))
    held = run.store.list("")
    with pytest.raises(NotFound, match=f"99 is not there; its snapshots and checkpoints are 3, {newest.sequence} "):
        fork(run.store, run.layout, 99, "second")
    with pytest.raises(NotFound, match="0 is a claim of the log"):
        fork(run.store, run.layout, 0, "second")
    with pytest.raises(NotFound, match="retired by 00000005, its files are freed"):
        fork(run.store, run.layout, old.sequence, "second")
    with pytest.raises(NotFound, match="holds no run 'nobody': it holds demo"):
        fork(run.store, RunLayout("nobody"), 1, "second")
    with pytest.raises(ConfigurationError, match="'a/b' is no name of a run"):
        fork(run.store, run.layout, newest.sequence, "a/b")
    assert run.store.list("") == held


def test_an_interrupted_fork_is_nothing_or_a_run_that_restores(run: Any, stopping: Any) -> None:
    """Power fails at each write in turn; what is there then is empty, the anchor alone, or the whole fork."""
    _events(run)
    _, snapshot = _pair(run)
    seen = set()
    for allowed in range(100):
        power, layout = stopping(run.store, allowed=allowed, lands=False), RunLayout(f"try-{allowed}")
        try:
            fork(power, run.layout, snapshot.sequence, layout.run)
        except StoreError:
            chosen = select(run.store, layout)
            seen.add("nothing" if chosen.target is None else chosen.target.kind)
            assert chosen.passed_over == ()
            continue
        break
    assert seen == {"nothing", "trainer_checkpoint", "rollout_snapshot"}
