"""Verification reads everything and names what differs."""

import pytest

from storage.errors import NotFound
from storage.layout import RunLayout
from tasks.bundle_checks import check_run, corruption, log_of


def test_whole_bundles_have_no_problem(empty_run):
    published = [empty_run.publish(), empty_run.publish(next_batch=1)]
    checks = list(check_run(empty_run.store, empty_run.layout))
    assert [check.sequence for check in checks] == [manifest.sequence for manifest in published]
    assert corruption("empty", checks) is None


def test_a_flipped_bit_is_found_and_its_file_named(empty_run):
    empty_run.publish()
    damaged = empty_run.damage(empty_run.publish(next_batch=1), "progress")
    checks = list(check_run(empty_run.store, empty_run.layout))
    assert [bool(check.problem) for check in checks] == [False, True]
    error = corruption("empty", checks)
    assert error is not None
    assert damaged in str(error)


def test_a_bundle_that_retention_removes_meanwhile_is_no_defect(empty_run):
    retired, kept = empty_run.publish(), empty_run.publish(next_batch=1)
    checks = check_run(empty_run.store, empty_run.layout)  # the log is read with the first check
    first = next(checks)
    assert first.sequence == retired.sequence
    empty_run.retire(kept)
    assert list(checks) == []


def test_a_slot_that_cannot_be_read_is_reported(empty_run):
    manifest = empty_run.publish()
    empty_run.store.write(empty_run.layout.manifest(manifest.sequence), b"{}")
    checks = list(check_run(empty_run.store, empty_run.layout))
    assert [check.kind for check in checks] == ["unreadable"]


def test_an_unknown_run_is_answered_with_the_runs_there_are(empty_run):
    with pytest.raises(NotFound, match="'other': it holds empty"):
        log_of(empty_run.store, RunLayout("other"))
