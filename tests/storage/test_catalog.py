"""Selection: the newest durable checkpoint and its newest valid snapshot; nothing falls back in silence."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from storage.errors import NoRestorableState, StoreOutcomeUnknown, StoreUnavailable
from storage.manifests import Anchor, Manifest
from storage.records import Progress
from storage.retention import Keep, retain


def _damage(run: Any, manifest: Manifest, role: str = "state") -> None:
    path = next(entry.path for entry in manifest.files if entry.role == role)
    data = bytearray(run.store.read(path))
    data[len(data) // 2] ^= 1
    run.store.write(path, bytes(data))


def test_a_run_with_nothing_yet_has_no_target(run: Any) -> None:
    selection = run.select()
    assert (selection.target, selection.anchor, selection.passed_over) == (None, None, ())


def test_a_snapshot_is_not_listed_until_its_manifest_is_written(run: Any, open_run: Any, stopping: Any) -> None:
    before = run.snapshot(buffered=(1,))
    power = stopping(run.store, allowed=10_000, lands=False)
    dying = open_run(power, writer="second").claim()
    power.allowed = power.writes + 10  # a part and nine tables
    with pytest.raises(StoreOutcomeUnknown):
        dying.snapshot(buffered=(1, 2))
    assert len(run.store.list(run.layout.states)) > sum(entry.role == "state" for entry in before.files)
    assert run.select().target == before


def test_the_newest_snapshot_of_the_newest_checkpoint_is_chosen(run: Any) -> None:
    first = run.checkpoint(1)
    run.snapshot(buffered=(1,), anchor=first)
    second = run.checkpoint(2)
    run.snapshot(buffered=(1,), anchor=second)
    newest = run.snapshot(buffered=(1, 2), anchor=second)
    selection = run.select()
    assert (selection.target, selection.anchor, selection.passed_over) == (newest, second, ())


def test_a_checkpoint_without_snapshots_is_its_own_target(run: Any) -> None:
    run.snapshot(buffered=(9,), anchor=run.checkpoint(1))
    checkpoint = run.checkpoint(2, buffered=(1,))
    selection = run.select()
    assert (selection.target, selection.anchor) == (checkpoint, checkpoint)


def test_mode_trainer_checkpoint_ignores_snapshots(run: Any) -> None:
    run.snapshot(buffered=(1,))
    assert run.select(mode="trainer_checkpoint").target is None
    checkpoint = run.checkpoint(1)
    run.snapshot(buffered=(1,), anchor=checkpoint)
    assert run.select(mode="trainer_checkpoint").target == checkpoint


def test_bootstrap_snapshots_count_only_while_there_is_no_checkpoint(run: Any) -> None:
    snapshot = run.snapshot(buffered=(1,))
    assert run.select().target == snapshot
    assert run.select().anchor is None
    checkpoint = run.checkpoint(1)
    assert run.select().target == checkpoint
    _damage(run, checkpoint, "weights")
    with pytest.raises(NoRestorableState, match=r"model\.safetensors: manifest says sha256"):
        run.select()


def test_a_corrupt_newest_snapshot_is_passed_over_and_told(run: Any) -> None:
    checkpoint = run.checkpoint(1)
    older = run.snapshot(buffered=(1,), anchor=checkpoint)
    newest = run.snapshot(buffered=(1, 2), anchor=checkpoint)
    _damage(run, newest)
    selection = run.select()
    assert selection.target == older
    ((sequence, reason),) = selection.passed_over
    assert sequence == newest.sequence
    assert "manifest says sha256" in reason


def test_a_corrupt_newest_snapshot_is_an_error_when_older_ones_are_not_allowed(run: Any) -> None:
    checkpoint = run.checkpoint(1)
    older = run.snapshot(buffered=(1,), anchor=checkpoint)
    _damage(run, run.snapshot(buffered=(1, 2), anchor=checkpoint))
    with pytest.raises(NoRestorableState, match=f"allow_older to restore {older.sequence:08d}"):
        run.select(allow_older=False)


def test_from_a_corrupt_checkpoint_selection_goes_to_the_older_one_with_its_snapshots(run: Any) -> None:
    first = run.checkpoint(1)
    kept = run.snapshot(buffered=(1,), anchor=first)
    second = run.checkpoint(2)
    lost = run.snapshot(buffered=(1,), anchor=second)
    _damage(run, second, "weights")
    selection = run.select()
    assert (selection.target, selection.anchor) == (kept, first)
    reasons = dict(selection.passed_over)
    assert "model.safetensors" in reasons[second.sequence]
    assert reasons[lost.sequence] == f"its anchor {second.sequence:08d} is not valid"


def test_a_checkpoint_whose_rollout_state_is_corrupt_still_carries_its_snapshots(run: Any) -> None:
    checkpoint = run.checkpoint(1, buffered=(1,))
    snapshot = run.snapshot(buffered=(1, 2, 3), anchor=checkpoint)
    run.store.delete(next(entry.path for entry in checkpoint.files if entry.kind == "replay_index"))
    selection = run.select()
    assert (selection.target, selection.anchor) == (snapshot, checkpoint)


def test_when_none_is_valid_every_candidate_is_listed_with_its_reason(run: Any) -> None:
    checkpoint = run.checkpoint(1)
    snapshot = run.snapshot(buffered=(1,), anchor=checkpoint)
    _damage(run, checkpoint, "weights")
    with pytest.raises(NoRestorableState) as refused:
        run.select()
    assert f"{checkpoint.sequence:08d}" in str(refused.value)
    assert f"{snapshot.sequence:08d}" in str(refused.value)
    assert "its anchor" in str(refused.value)


def test_a_damaged_manifest_is_never_a_silent_fresh_start(run: Any) -> None:
    snapshot = run.snapshot(buffered=(1,))
    run.store.write(run.layout.manifest(snapshot.sequence), b"{}")
    with pytest.raises(NoRestorableState, match="00000001: demo/manifests/00000001.json: not a manifest"):
        run.select()


def test_a_damaged_manifest_behind_the_target_does_not_matter(run: Any) -> None:
    run.store.write(run.layout.manifest(run.snapshot(buffered=(1,)).sequence), b"{}")
    newest = run.snapshot(buffered=(1, 2))
    assert run.select(allow_older=False).target == newest


@pytest.mark.parametrize("change", [{"step": 7}, {"identity": "another"}, {"kind": "bootstrap"}])
def test_a_snapshot_that_does_not_fit_its_anchor_is_passed_over(run: Any, make: Any, change: dict[str, Any]) -> None:
    checkpoint = run.checkpoint(1)
    state, rows = make.state(progress=Progress(train_steps=1))
    anchor = Anchor(**{**Anchor.at(checkpoint).model_dump(), **change})
    wrong = run.writer.write(replace(run.bundle(state, rows), anchor=anchor))
    selection = run.select()
    assert selection.target == checkpoint
    assert dict(selection.passed_over)[wrong.sequence].startswith("says its anchor is")


def test_a_snapshot_of_a_checkpoint_that_the_log_does_not_hold_is_passed_over(run: Any, make: Any) -> None:
    state, rows = make.state()
    anchor = Anchor(kind="checkpoint", step=0, sequence=99, identity="x")
    run.writer.write(replace(run.bundle(state, rows), anchor=anchor))
    with pytest.raises(NoRestorableState, match="is no trainer checkpoint of the log"):
        run.select()


def _published_late(run: Any, *, step: int, cut_time: float) -> Manifest:
    """A trainer checkpoint that was cut some time ago and is published only now."""
    state, rows = run.make.state(progress=Progress(train_steps=step))
    captured = run.bundle(state, rows, kind="trainer_checkpoint", step=step, cut_time=cut_time)
    return run.writer.write(replace(captured, anchor=None))


@pytest.mark.parametrize("on_a_checkpoint", [False, True])
def test_a_snapshot_cut_after_a_checkpoint_that_was_published_late_is_newer(run: Any, on_a_checkpoint: bool) -> None:
    anchor = run.checkpoint(1) if on_a_checkpoint else None
    before = time.time()
    snapshot = run.snapshot(buffered=(1,), anchor=anchor, progress=Progress(train_steps=2))
    late = _published_late(run, step=2, cut_time=before)
    assert (run.select().target, run.select().anchor, run.select().passed_over) == (snapshot, anchor, ())
    assert run.select(mode="trainer_checkpoint").target == late
    newest = run.snapshot(buffered=(1, 2), anchor=late)
    assert (run.select().target, run.select().anchor) == (newest, late)


def test_times_of_another_controller_say_nothing_about_which_is_newer(run: Any, open_run: Callable[..., Any]) -> None:
    before = time.time()
    run.snapshot(buffered=(1,))
    second = open_run(run.store, writer="second").claim()
    late = _published_late(second, step=2, cut_time=before)
    assert run.select().target == late


def test_a_snapshot_of_an_earlier_step_is_older_than_a_checkpoint_whatever_its_clock_said(run: Any) -> None:
    run.snapshot(buffered=(1,))
    late = _published_late(run, step=2, cut_time=time.time() - 3600)
    assert run.select().target == late


def test_a_damaged_snapshot_that_overtook_a_checkpoint_is_passed_over(run: Any) -> None:
    before = time.time()
    lost = run.snapshot(buffered=(1,), progress=Progress(train_steps=2))
    _damage(run, lost)
    late = _published_late(run, step=2, cut_time=before)
    assert run.select().target == late
    assert [sequence for sequence, _ in run.select().passed_over] == [lost.sequence]


def test_retired_bundles_are_no_candidates(run: Any) -> None:
    for step in (1, 2, 3):
        run.checkpoint(step)
    retain(run.store, run.layout, run.log, keep=Keep(1, 1))
    _damage(run, run.select().target, "weights")
    with pytest.raises(NoRestorableState) as refused:
        run.select()
    assert str(refused.value).count("\n") == 1


def test_a_store_that_does_not_answer_is_no_corruption(run: Any, open_run: Callable[..., Any], stopping: Any) -> None:
    run.snapshot(buffered=(1,))
    dead = open_run(stopping(run.store, allowed=-1, lands=False))
    with pytest.raises(StoreUnavailable):
        dead.select()


def test_selection_changes_nothing(run: Any) -> None:
    run.snapshot(buffered=(1,), anchor=run.checkpoint(1))
    before = {path: run.store.read(path) for path in run.store.list("")}
    run.select()
    assert {path: run.store.read(path) for path in run.store.list("")} == before
