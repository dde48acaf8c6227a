"""Verification of a run that a real controller wrote: what it finds, what it keeps, and what is offered afterwards."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from storage.canonical import sha256
from storage.catalog import select
from storage.errors import NoRestorableState, NotFound, SnapshotCorrupt, StoreUnavailable
from storage.filesystem import open_store
from storage.forking import fork
from storage.layout import RunLayout
from storage.logical_digest import logical_digest
from storage.manifests import ManifestDraft, ManifestLog, decode_manifest, encode_manifest
from storage.pruning import plan_prune
from storage.retention import Keep, retain
from storage.snapshot_reader import read_bundle
from storage.snapshot_writer import state_counts
from storage.state_schemas import STATE_SCHEMA_VERSION
from storage.state_tables import RowPlace, encode_state
from storage.verdicts import Verdicts, decode_verdict, encode_verdict
from tasks.bundle_checks import corruption_of, runs_of, verify_run
from tasks.restore_drill import Drill

STORE = Path(__file__).resolve().parents[1] / "storage/formats/trained-run"
LAYOUT = RunLayout("demo")
CHECKPOINT, SNAPSHOT = 1, 2


@pytest.fixture
def store(tmp_path):
    shutil.copytree(STORE, tmp_path / "store")
    return open_store(str(tmp_path / "store"))


def manifest_of(store, sequence):
    path = LAYOUT.manifest(sequence)
    return decode_manifest(store.read(path), path)


def forge(store, sequence, change, places=lambda places: places):
    """A bundle with another state, and every checksum, count and digest made to match."""
    manifest = manifest_of(store, sequence)
    bundle = read_bundle(store, LAYOUT, manifest)
    state = replace(bundle.state, **change(bundle.state))
    wanted = state.row_ids()
    held = [
        RowPlace(row, bundle.rows[row].kind.value, place.part.path, place.offset, place.digest)
        for row, place in bundle.placements.items()
        if row in wanted
    ]
    files = [entry for entry in manifest.files if entry.role not in ("state", "part")]
    files += [entry for entry in manifest.files if entry.path in {place.part for place in held}]
    for file in encode_state(state, places(held), writer="forger"):
        digest = sha256(file.data)
        entry = next((e for e in manifest.files if e.kind == file.kind), manifest.files[-1])
        path = LAYOUT.state(file.kind, digest)
        promise = {"path": path, "bytes": len(file.data), "sha256": digest, "rows": file.rows, "role": "state"}
        promise["kind"] = file.kind
        files.append(entry.model_copy(update={**promise, "schema_version": STATE_SCHEMA_VERSION}))
        store.write(path, file.data)
    rows = {row: bundle.rows[row] for row in wanted if row in bundle.rows}
    promise = {"files": tuple(files), "counts": state_counts(state), "logical_digest": logical_digest(state, rows)}
    store.write(LAYOUT.manifest(sequence), encode_manifest(manifest.model_copy(update=promise)))


def flip(store, sequence, role):
    """One bit of a file of a bundle; the way back."""
    path = next(entry.path for entry in manifest_of(store, sequence).files if entry.role == role)
    data = store.read(path)
    store.write(path, bytes([data[0] ^ 1]) + data[1:])
    return lambda: store.write(path, data)


def problems(store, **how):
    return {check.sequence: check.problem for check in verify_run(store, LAYOUT, **how).checks}


def test_a_whole_run_is_as_published_and_a_drill_restores_every_bundle(store):
    report = verify_run(store, LAYOUT, drill=Drill())
    assert [(c.sequence, c.problem, c.note, c.drilled) for c in report.checks] == [(1, "", "", True), (2, "", "", True)]
    assert (report.warnings, corruption_of([report])) == ([], None)
    verdict = Verdicts(store, LAYOUT).of(manifest_of(store, SNAPSHOT))
    assert (verdict.drill, verdict.problem, verdict.model_problem) == (True, None, None)


FORGERIES = {
    "I1: a prompt is lost": (lambda s: {"ledger": s.ledger[:-1]}, "I1: 1 prompts"),
    "I1: a dropped prompt is forgotten": (lambda s: {"dropped": ()}, "I1: 1 prompts"),
    "I2: two owners": (lambda s: {"spares": (s.ledger[0].prompt,)}, "has 2 owners: ledger, spare prompts"),
    "I4: a stamp twice": (
        lambda s: {"buffer": tuple(replace(group, target_step=4) for group in s.buffer)},
        "I4: step 4 has 4 groups",
    ),
    "I4: a cursor behind": (lambda s: {"progress": replace(s.progress, sampler_cursor=3)}, "I4: stamps [4]"),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_broken_invariant_is_found_although_every_checksum_matches(store, forgery):
    change, says = FORGERIES[forgery]
    forge(store, SNAPSHOT, change)
    found = problems(store)
    assert (found[CHECKPOINT], says in found[SNAPSHOT]) == ("", True), found


@pytest.mark.parametrize(
    ("places", "says"),
    [
        (lambda held: held[1:], "the index refers to 1 rows that are not there"),
        (lambda held: [*held, replace(held[0], row_id="e0-p20_g7")], "1 rows are there that the index does not"),
        (lambda held: [replace(held[0], row_id=held[1].row_id), *held[1:]], "is listed more than once"),
    ],
)
def test_i3_rows_without_index_and_index_without_rows_are_found_although_every_checksum_matches(store, places, says):
    forge(store, SNAPSHOT, lambda state: {}, places)
    assert says in problems(store)[SNAPSHOT]


def test_a_bundle_that_is_known_to_be_bad_is_passed_over_until_it_is_found_good(store):
    heal = flip(store, SNAPSHOT, "state")
    assert "manifest says sha256" in problems(store)[SNAPSHOT]
    heal()
    chosen = select(store, LAYOUT)
    assert (chosen.target.sequence, chosen.anchor.sequence) == (CHECKPOINT, CHECKPOINT)
    ((sequence, reason),) = chosen.passed_over
    assert sequence == SNAPSHOT
    assert "known to be bad since the verification of" in reason
    assert "`midflight verify demo`" in reason
    with pytest.raises(NoRestorableState, match="known to be bad"):
        select(store, LAYOUT, allow_older=False)
    with pytest.raises(SnapshotCorrupt, match="known to be bad"):
        fork(store, LAYOUT, SNAPSHOT, "second")
    assert problems(store) == {CHECKPOINT: "", SNAPSHOT: ""}
    assert select(store, LAYOUT).target.sequence == SNAPSHOT


def test_a_checkpoint_whose_model_is_bad_takes_its_snapshots_along_and_one_with_bad_rollout_state_does_not(store):
    heal = flip(store, CHECKPOINT, "weights")
    found = problems(store)
    assert "weights.txt" in found[CHECKPOINT]
    assert found[SNAPSHOT].startswith(f"its anchor {CHECKPOINT:08d} is not whole")
    heal()
    with pytest.raises(NoRestorableState, match="known to be bad"):
        select(store, LAYOUT)
    verify_run(store, LAYOUT)
    flip(store, CHECKPOINT, "state")
    assert [bool(problem) for problem in problems(store).values()] == [True, False]
    assert select(store, LAYOUT).target.sequence == SNAPSHOT


@pytest.mark.parametrize("damage", ["another manifest", "moved", "garbage", "a flipped bit", "a newer version"])
def test_a_verdict_that_is_not_about_the_bundle_hides_nothing_and_is_named(store, damage):
    heal = flip(store, SNAPSHOT, "state")
    verify_run(store, LAYOUT)
    heal()
    path = LAYOUT.verification(SNAPSHOT)
    verdict = decode_verdict(store.read(path), path)
    data = store.read(path)
    if damage == "another manifest":
        data = encode_verdict(verdict.model_copy(update={"manifest_sha256": "0" * 64}))
    elif damage == "moved":
        data = encode_verdict(verdict.model_copy(update={"run": "other"}))
    elif damage == "garbage":
        data = b"\0"
    elif damage == "a flipped bit":
        data = data.replace(b"verified_at", b"verified_au")
    else:
        body = {**verdict.model_dump(), "format_version": 2}
        data = json.dumps({"verification": body, "sha256": sha256(json.dumps(body).encode())}).encode()
    store.write(path, data)
    chosen = select(store, LAYOUT)
    assert (chosen.target.sequence, chosen.passed_over) == (SNAPSHOT, ())
    (warning,) = chosen.warnings
    assert warning.startswith(path)
    assert "it is ignored; `midflight verify demo` writes it anew" in warning
    assert verify_run(store, LAYOUT).warnings == [warning]
    assert verify_run(store, LAYOUT).warnings == []


def test_without_recording_nothing_is_written(store):
    before = store.list("")
    flip(store, SNAPSHOT, "state")
    assert problems(store, record=False)[SNAPSHOT]
    assert store.list("") == before


def test_a_store_that_cannot_be_written_reports_and_warns(store, troubled):
    flip(store, SNAPSHOT, "state")
    closed = troubled(store)
    closed.fail("write", "/verifications/", StoreUnavailable("write demo/verifications: read-only"))
    report = verify_run(closed, LAYOUT)
    assert [bool(check.problem) for check in report.checks] == [False, True]
    assert report.warnings == ["results are shown, but not kept: write demo/verifications: read-only"]
    assert store.list(LAYOUT.verifications) == []


def test_a_store_that_fails_while_it_is_read_is_no_verdict(store, troubled):
    failing = troubled(store)
    failing.fail("read", "/state/ledger", StoreUnavailable("read: no answer within 60 s"), passing=1)
    with pytest.raises(StoreUnavailable):
        verify_run(failing, LAYOUT)
    assert store.list(LAYOUT.verifications) == [LAYOUT.verification(CHECKPOINT)]


def test_what_this_midflight_cannot_read_is_told_but_no_verdict(store):
    manifest = manifest_of(store, SNAPSHOT)
    files = tuple(e.model_copy(update={"schema_version": 9}) if e.kind == "ledger" else e for e in manifest.files)
    store.write(LAYOUT.manifest(SNAPSHOT), encode_manifest(manifest.model_copy(update={"files": files})))
    assert "schema version 9" in problems(store)[SNAPSHOT]
    assert Verdicts(store, LAYOUT).of(manifest_of(store, SNAPSHOT)) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"novelty": {}}, "prompts, rows and stamps were not compared"),
        ({"data": {"task": "ours"}}, "prompts were not compared with the dataset: data.task is 'ours'"),
    ],
)
def test_what_cannot_be_compared_here_is_told_and_no_defect(store, change, says):
    manifest = manifest_of(store, SNAPSHOT)
    config = {**manifest.config, **{key: {**manifest.config.get(key, {}), **value} for key, value in change.items()}}
    for sequence in (CHECKPOINT, SNAPSHOT):
        changed = manifest_of(store, sequence).model_copy(update={"config": config})
        store.write(LAYOUT.manifest(sequence), encode_manifest(changed))
    checks = verify_run(store, LAYOUT).checks
    assert [(check.problem, says in check.note) for check in checks] == [("", True), ("", True)]
    drilled = verify_run(store, LAYOUT, drill=Drill()).checks
    assert all("it can't be restored here" in check.problem and not check.judged for check in drilled)


def test_times_of_a_wrong_clock_are_told_and_change_nothing(store):
    checkpoint, snapshot = manifest_of(store, CHECKPOINT), manifest_of(store, SNAPSHOT)
    ahead = checkpoint.model_copy(update={"created_at": 1e17, "cut_time": 1e17})
    store.write(LAYOUT.manifest(CHECKPOINT), encode_manifest(ahead))
    report = verify_run(store, LAYOUT, drill=Drill())
    assert [check.problem for check in report.checks] == ["", ""]
    assert "which is in the future here: a machine's clock is or was wrong" in report.checks[0].note
    assert "before the slots before it: a machine's clock is or was wrong" in report.checks[1].note
    chosen = select(store, LAYOUT)
    assert (chosen.target, chosen.anchor) == (snapshot, ahead)


def test_a_whole_store_is_its_runs_and_one_without_any_is_an_error(store, tmp_path):
    fork(store, LAYOUT, SNAPSHOT, "second")
    store.write("begun/run.json", b"{}")
    assert runs_of(store) == ["demo", "second"]
    assert corruption_of([verify_run(store, RunLayout(name), drill=Drill()) for name in runs_of(store)]) is None
    for path in (tmp_path / "nothing", tmp_path / "store" / "demo"):
        with pytest.raises(NotFound, match="holds no run at all"):
            runs_of(open_store(str(path)))


def test_verdicts_of_retired_bundles_go_with_them(store):
    verify_run(store, LAYOUT)
    log = ManifestLog(store, LAYOUT, "next")
    log.claim()
    retired = log.append(ManifestDraft(kind="retired", retires=(SNAPSHOT,)))
    planned = {file.path: file.reason for file in plan_prune(store, LAYOUT).files}
    assert planned[LAYOUT.verification(SNAPSHOT)] == "retired"
    assert LAYOUT.verification(CHECKPOINT) not in planned
    done = retain(store, LAYOUT, log, keep=Keep(1, 1))
    assert LAYOUT.verification(SNAPSHOT) in done.deleted
    assert log.last_seen == retired.sequence
    assert store.list(LAYOUT.verifications) == [LAYOUT.verification(CHECKPOINT)]


def test_a_bundle_that_was_retired_meanwhile_gets_no_verdict(store, troubled):
    flip(store, SNAPSHOT, "state")
    log = ManifestLog(store, LAYOUT, "next")

    class RetiringStore:
        """A live run's retention takes the snapshot while its tables are read."""

        def __getattr__(self, name):
            return getattr(store, name)

        def read(self, path):
            if "/state/replay_index" in path and log.last_seen is None and store.list(LAYOUT.verifications):
                log.claim()
                log.append(ManifestDraft(kind="retired", retires=(SNAPSHOT,)))
            return store.read(path)

    report = verify_run(RetiringStore(), LAYOUT)
    assert [check.sequence for check in report.checks] == [CHECKPOINT]
    assert store.list(LAYOUT.verifications) == [LAYOUT.verification(CHECKPOINT)]
