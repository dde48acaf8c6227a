"""The manifest log: slots are taken once and in order, writers are fenced, damage is told and never skipped."""

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from storage.canonical import canonical_json, sha256
from storage.errors import (
    BrokenInvariant,
    Fenced,
    FormatUnsupported,
    SnapshotCorrupt,
    StoreOutcomeUnknown,
    StoreUnavailable,
)
from storage.filesystem import Store
from storage.layout import RunLayout
from storage.manifests import (
    BrokenSlot,
    FileEntry,
    Manifest,
    ManifestDraft,
    ManifestLog,
    decode_manifest,
    encode_manifest,
    read_log,
)

LAYOUT = RunLayout("demo")


def _log(store: Store, writer: str = "first") -> ManifestLog:
    return ManifestLog(store, LAYOUT, writer)


def _draft(step: int = 0) -> ManifestDraft:
    entry = FileEntry(path="demo/parts/x.parquet", bytes=3, sha256="0" * 64, role="part", kind="staged_calls", rows=1)
    return ManifestDraft(kind="rollout_snapshot", step=step, files=(entry,), counts={"rows": 1}, cut_time=1.5)


def _signed(body: dict[str, Any]) -> bytes:
    return canonical_json({"manifest": body, "sha256": sha256(canonical_json(body))}) + b"\n"


def test_a_claim_takes_the_first_slot_and_publications_follow_it(store: Store) -> None:
    log = _log(store)
    assert log.claim().sequence == 0
    assert [log.append(_draft(step)).sequence for step in (1, 2)] == [1, 2]
    slots = read_log(store, LAYOUT)
    assert [slot.sequence for slot in slots] == [0, 1, 2]
    assert slots == log.read()
    assert [slot.writer for slot in slots if isinstance(slot, Manifest)] == ["first"] * 3


def test_a_manifest_is_read_as_it_was_written(store: Store) -> None:
    log = _log(store)
    log.claim()
    written = log.append(_draft(7))
    assert read_log(store, LAYOUT)[1] == written


def test_nothing_is_published_before_a_claim(memory_store: Store) -> None:
    with pytest.raises(BrokenInvariant, match="before it has claimed"):
        _log(memory_store).append(_draft())


def test_a_writer_whose_run_was_taken_over_is_fenced_for_ever(store: Store) -> None:
    stale, new = _log(store, "stale"), _log(store, "new")
    stale.claim()
    new.claim()
    for _ in range(2):
        with pytest.raises(Fenced, match=r"'stale' was fenced by 'new' in demo/manifests/00000001.json"):
            stale.append(_draft())
    assert new.append(_draft()).sequence == 2
    with pytest.raises(Fenced):
        stale.append(_draft())
    assert len(read_log(store, LAYOUT)) == 3


def test_of_eight_writers_that_claim_at_once_only_the_last_publishes(store: Store) -> None:
    logs = [_log(store, f"writer {number}") for number in range(8)]
    racers = [threading.Thread(target=log.claim) for log in logs]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    published = []
    for log in logs:
        try:
            published.append(log.append(_draft()))
        except Fenced:
            continue
    assert len(published) == 1
    assert published[0].sequence == 8


class Ambiguous:
    """A store whose exclusive creation ends without an answer, after or without having happened."""

    def __init__(self, store: Store, *, happens: bool, readable: bool = True) -> None:
        self._store = store
        self.happens = happens
        self.readable = readable
        self.silent = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def create_exclusive(self, path: str, data: bytes) -> None:
        if self.happens or not self.silent:
            self._store.create_exclusive(path, data)
        if self.silent:
            raise StoreOutcomeUnknown(f"create {path}: no answer")

    def read(self, path: str) -> bytes:
        if not self.readable:
            raise StoreUnavailable(f"read {path}: no answer")
        return self._store.read(path)


def _claimed(store: Store, ambiguous: Ambiguous) -> ManifestLog:
    ambiguous.silent = False
    log = _log(ambiguous)
    log.claim()
    ambiguous.silent = True
    return log


def test_a_publication_without_an_answer_is_read_back(store: Store) -> None:
    log = _claimed(store, Ambiguous(store, happens=True))
    assert log.append(_draft()).sequence == 1
    assert log.append(_draft()).sequence == 2


def test_a_publication_that_did_not_happen_can_be_tried_again(store: Store) -> None:
    ambiguous = Ambiguous(store, happens=False)
    log = _claimed(store, ambiguous)
    with pytest.raises(StoreUnavailable, match="was not written"):
        log.append(_draft())
    ambiguous.silent = False
    assert log.append(_draft()).sequence == 1


def test_a_publication_that_turns_out_late_to_have_happened_is_recognized_as_our_own(store: Store) -> None:
    ambiguous = Ambiguous(store, happens=True, readable=False)
    log = _claimed(store, ambiguous)
    with pytest.raises(StoreOutcomeUnknown, match="reading it back failed too"):
        log.append(_draft(1))
    ambiguous.silent, ambiguous.readable = False, True
    assert log.append(_draft(2)).sequence == 2
    assert [slot.step for slot in read_log(store, LAYOUT) if isinstance(slot, Manifest)] == [0, 1, 2]


def test_a_writer_that_loses_an_ambiguous_slot_is_fenced(store: Store) -> None:
    ambiguous = Ambiguous(store, happens=False)
    log = _claimed(store, ambiguous)
    _log(store, "other").claim()
    with pytest.raises(Fenced, match="'other'"):
        log.append(_draft())


def test_a_flipped_bit_anywhere_in_a_manifest_is_found(memory_store: Store) -> None:
    log = _log(memory_store)
    log.claim()
    data = encode_manifest(log.append(_draft()))
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << (place % 8)
        with pytest.raises((SnapshotCorrupt, FormatUnsupported), match="slot"):
            decode_manifest(bytes(flipped), "slot")


def test_a_damaged_missing_or_moved_slot_is_told_in_its_place(store: Store) -> None:
    log = _log(store)
    log.claim()
    for step in (1, 2, 3):
        log.append(_draft(step))
    store.write(LAYOUT.manifest(1), store.read(LAYOUT.manifest(1))[:-40])
    store.delete(LAYOUT.manifest(2))
    store.write(LAYOUT.manifest(3), store.read(LAYOUT.manifest(0)))
    whole, truncated, missing, moved = read_log(store, LAYOUT)
    assert isinstance(whole, Manifest)
    assert isinstance(truncated, BrokenSlot)
    assert isinstance(missing, BrokenSlot)
    assert isinstance(moved, BrokenSlot)
    assert "not a manifest" in truncated.reason
    assert "missing although later manifests exist" in missing.reason
    assert "holds manifest 0 of run demo" in moved.reason


def test_a_broken_newest_slot_is_not_written_again(store: Store) -> None:
    _log(store).claim()
    store.write(LAYOUT.manifest(0), b"garbage")
    assert _log(store, "second").claim().sequence == 1
    assert store.read(LAYOUT.manifest(0)) == b"garbage"


def test_other_files_beside_the_slots_are_no_slots(store: Store) -> None:
    _log(store).claim()
    store.write(f"{LAYOUT.manifests}/00000001.json.bak", b"")
    store.write(f"{LAYOUT.manifests}/notes.txt", b"")
    assert len(read_log(store, LAYOUT)) == 1


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"format_version": 2}, FormatUnsupported, "format_version is 2"),
        ({"new_field": 1}, FormatUnsupported, "new_field"),
        ({"kind": "backup"}, SnapshotCorrupt, "kind"),
        ({"sequence": -1}, SnapshotCorrupt, "sequence"),
        ({"sequence": "1"}, SnapshotCorrupt, "sequence"),
        ({"files": None}, SnapshotCorrupt, "files"),
        ({"files": [{"path": "../x", "bytes": 1, "sha256": "0" * 64, "role": "part"}]}, SnapshotCorrupt, "path"),
        ({"files": [{"path": "x", "bytes": 1, "sha256": "0" * 63, "role": "part"}]}, SnapshotCorrupt, "sha256"),
        ({"files": [{"path": "x", "bytes": -1, "sha256": "0" * 64, "role": "part"}]}, SnapshotCorrupt, "bytes"),
    ],
)
def test_a_manifest_with_unknown_or_wrong_fields_is_refused_by_name(
    memory_store: Store, change: dict[str, Any], error: type[Exception], says: str
) -> None:
    body = json.loads(encode_manifest(_log(memory_store).claim()))["manifest"]
    with pytest.raises(error, match=says):
        decode_manifest(_signed({**body, **change}), "slot")
    del body["writer"]
    with pytest.raises(SnapshotCorrupt, match="writer"):
        decode_manifest(_signed(body), "slot")


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"\xff", b'{"manifest":[],"sha256":"x"}', b"[" * 100_000])
def test_what_is_no_manifest_at_all_is_refused(data: bytes) -> None:
    with pytest.raises(SnapshotCorrupt, match="slot"):
        decode_manifest(data, "slot")


def test_a_store_that_fails_is_no_broken_slot(store: Store, stopping: Callable[..., Any]) -> None:
    _log(store).claim()
    dead = stopping(store, allowed=-1, lands=False)
    with pytest.raises(StoreUnavailable):
        read_log(dead, LAYOUT)
