"""Retention frees only what no kept bundle needs, and never the log."""

from typing import Any

import pytest

from storage.canonical import sha256
from storage.errors import Fenced
from storage.manifests import Manifest
from storage.retention import Keep, Retained, retain
from storage.verdicts import judge, put_verdict


def _retain(run: Any, *, checkpoints: int = 1, per_anchor: int = 1, grace_s: float = 3600.0) -> Retained:
    return retain(
        run.store,
        run.layout,
        run.log,
        keep=Keep(checkpoints, per_anchor),
        pinned=run.writer.pinned_parts(),
        grace_s=grace_s,
    )


def _whole(run: Any, *manifests: Manifest) -> bool:
    return all(run.store.exists(entry.path) for manifest in manifests for entry in manifest.files)


def _own(manifest: Manifest, *others: Manifest) -> set[str]:
    """Files of a bundle that no other one has; empty tables of one writer are one file."""
    return {entry.path for entry in manifest.files} - {entry.path for m in others for entry in m.files}


def test_each_kept_checkpoint_keeps_its_newest_snapshots(run: Any) -> None:
    kept, freed = [], []
    for step in (1, 2, 3):
        checkpoint = run.checkpoint(step)
        snapshots = [run.snapshot(buffered=(10 * step + n,), anchor=checkpoint) for n in range(3)]
        kept += [checkpoint, *snapshots[1:]] if step > 1 else []
        freed += [snapshots[0]] if step > 1 else [checkpoint, *snapshots]
    retained = _retain(run, checkpoints=2, per_anchor=2)
    assert set(retained.retired) == {manifest.sequence for manifest in freed}
    assert _whole(run, *kept)
    for manifest in kept:
        run.read(manifest)
    for manifest in freed:
        assert not any(run.store.exists(path) for path in _own(manifest, *kept))


def test_retiring_is_published_before_anything_is_deleted(run: Any, open_run: Any, stopping: Any) -> None:
    power = stopping(run.store, allowed=10_000, lands=False)
    second = open_run(power, writer="second").claim()
    old, new = second.checkpoint(1), second.checkpoint(2)
    power.allowed = power.writes + 1
    retained = _retain(second)
    assert retained.retired == (old.sequence,)
    assert retained.deleted == ()
    assert len(retained.problems) == len(_own(old, new))
    assert run.select().target == new


def test_what_could_not_be_deleted_is_deleted_by_the_next_retention(run: Any, open_run: Any, stopping: Any) -> None:
    power = stopping(run.store, allowed=10_000, lands=False)
    second = open_run(power, writer="second").claim()
    old, new = second.checkpoint(1), second.checkpoint(2)
    power.allowed = power.writes + 2
    _retain(second)
    power.allowed = 10_000
    assert _retain(second).retired == ()
    assert not any(run.store.exists(path) for path in _own(old, new))


def test_the_log_is_never_deleted(run: Any) -> None:
    for step in range(1, 6):
        run.checkpoint(step)
        _retain(run, grace_s=0)
    slots = run.log.read()
    assert [slot.sequence for slot in slots] == list(range(len(slots)))
    assert all(isinstance(slot, Manifest) for slot in slots)


def test_a_part_that_a_kept_snapshot_refers_to_stays(run: Any) -> None:
    first = run.snapshot(buffered=(1, 2))
    second = run.snapshot(buffered=(1, 2, 3))
    shared = next(entry.path for entry in first.files if entry.role == "part")
    retained = _retain(run)
    assert retained.retired == (first.sequence,)
    assert run.store.exists(shared)
    assert run.read(second).rows.keys() >= {"e0-p1_g0"}


def test_the_anchor_of_the_newest_snapshot_stays_although_newer_checkpoints_exist(run: Any) -> None:
    old = run.checkpoint(1)
    run.checkpoint(2)
    newest = run.checkpoint(3)
    snapshot = run.snapshot(buffered=(1,), anchor=old)
    _retain(run)
    assert _whole(run, old, newest, snapshot)


def test_the_newest_checkpoint_stays_even_if_none_are_to_be_kept(run: Any) -> None:
    checkpoint = run.checkpoint(1)
    assert _retain(run, checkpoints=0, per_anchor=0) == Retained()
    assert _whole(run, checkpoint)


def test_the_best_checkpoints_stay_without_their_snapshots(run: Any) -> None:
    scores = {1: 0.5, 2: 0.9, 3: None, 4: 0.9, 5: 0.1, 6: 0.2}
    made = {step: run.checkpoint(step) for step in (1, 2)}
    snapshot = run.snapshot(buffered=(1,), anchor=made[2])
    made |= {step: run.checkpoint(step) for step in (3, 4, 5, 6)}
    run.snapshot(buffered=(1,), anchor=made[6])
    keep = Keep(1, 1, best=2, score=lambda checkpoint: scores[checkpoint.step])
    retained = retain(run.store, run.layout, run.log, keep=keep, pinned=run.writer.pinned_parts())
    assert set(retained.retired) == {made[step].sequence for step in (1, 3, 5)} | {snapshot.sequence}
    assert _whole(run, made[2], made[4], made[6])


def test_a_checkpoint_that_is_being_written_is_no_debris_however_long_it_takes(run: Any) -> None:
    run.snapshot(buffered=(1,))
    folder = run.layout.checkpoint(3, "first-1")
    run.store.write(f"{folder}/model.safetensors", b"half of it")
    keep = {"keep": Keep(1, 1), "grace_s": -1}
    assert retain(run.store, run.layout, run.log, being_written=folder, **keep).deleted == ()
    assert retain(run.store, run.layout, run.log, being_written=f"{folder}0", **keep).deleted != ()


def test_an_unpublished_file_is_debris_only_after_its_grace_period(run: Any) -> None:
    run.snapshot(buffered=(1,))
    path = run.layout.part(sha256(b"debris"))
    run.store.write(path, b"debris")
    assert _retain(run).deleted == ()
    assert _retain(run, grace_s=-1).deleted == (path,)


class Skewed:
    """A store seen from a machine whose clock is ahead."""

    def __init__(self, store: Any, ahead_s: float) -> None:
        self._store = store
        self._ahead_s = ahead_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def age_s(self, path: str) -> float:
        return float(self._store.age_s(path)) + self._ahead_s


def test_a_file_is_as_old_as_the_stores_clock_says_whatever_this_machines_clock_says(run: Any, open_run: Any) -> None:
    path = run.layout.part(sha256(b"debris"))
    for writer, ahead_s in (("ahead", 7200.0), ("behind", -7200.0)):
        skewed = open_run(Skewed(run.store, ahead_s), writer=writer).claim()
        skewed.snapshot(buffered=(1,))
        run.store.write(path, b"another controller writes this now")
        assert path not in _retain(skewed).deleted
        assert path in _retain(skewed, grace_s=-1).deleted


def _judge(run: Any, bundle: Manifest, *, model: bool = False) -> None:
    found = judge(bundle, problem="flipped", model_problem="flipped" if model else "", drill=False)
    put_verdict(run.store, run.layout, found)


def test_bundles_that_are_known_to_be_bad_do_not_count_and_never_displace_the_good_ones(run: Any) -> None:
    good = run.checkpoint(1)
    good_snapshot = run.snapshot(buffered=(1,), anchor=good)
    bad = [run.checkpoint(step) for step in (2, 3)]
    for checkpoint in bad:
        _judge(run, checkpoint, model=True)
    bad_snapshots = [run.snapshot(buffered=(1, n), anchor=good) for n in (2, 3)]
    for snapshot in bad_snapshots:
        _judge(run, snapshot)
    retained = _retain(run)
    assert set(retained.retired) == {bad[0].sequence, bad_snapshots[0].sequence}
    assert _whole(run, good, good_snapshot)
    assert (run.select().target, run.select().anchor) == (good_snapshot, good)
    newer = run.snapshot(buffered=(1,), anchor=run.checkpoint(4))
    assert good.sequence in _retain(run).retired
    assert run.select().target == newer


def test_verdicts_go_with_the_bundles_they_are_about(run: Any) -> None:
    old = run.checkpoint(1)
    _judge(run, old)
    newest = run.checkpoint(2)
    _judge(run, newest)
    _retain(run)
    assert run.store.list(run.layout.verifications) == [run.layout.verification(newest.sequence)]


def test_parts_of_the_writers_next_bundle_are_no_debris(run: Any, open_run: Any, stopping: Any) -> None:
    power = stopping(run.store, allowed=10_000, lands=False)
    second = open_run(power, writer="second").claim()
    second.snapshot(buffered=(1,))
    power.allowed = power.writes + 1
    with pytest.raises(Exception, match="power failed"):
        second.snapshot(buffered=(1, 2, 3))
    power.allowed = 10_000
    _retain(second, grace_s=-1)
    assert all(run.store.exists(path) for path in second.writer.pinned_parts())
    run.read(second.snapshot(buffered=(1, 2, 3)))


def test_beside_an_unreadable_manifest_no_debris_is_deleted(run: Any) -> None:
    lost = run.snapshot(buffered=(1,))
    run.store.write(run.layout.manifest(lost.sequence), b"{}")
    run.snapshot(buffered=(2,))
    _retain(run, grace_s=-1)
    assert _whole(run, lost)


def test_a_fenced_writer_deletes_nothing(run: Any, open_run: Any) -> None:
    old = run.checkpoint(1)
    run.checkpoint(2)
    open_run(run.store, writer="second").claim()
    with pytest.raises(Fenced, match="deletes nothing"):
        _retain(run, grace_s=-1)
    assert _whole(run, old)


def test_a_store_that_fails_is_reported_and_the_publication_stands(run: Any, open_run: Any, stopping: Any) -> None:
    power = stopping(run.store, allowed=10_000, lands=False)
    second = open_run(power, writer="second").claim()
    second.checkpoint(1)
    newest = second.checkpoint(2)
    power.allowed = power.writes
    retained = _retain(second)
    assert retained.deleted == ()
    assert len(retained.problems) == 1
    assert run.select().target == newest
