"""Tables and panels, as they look on an 80-column terminal."""

import pytest
from rich.console import Console

from flows.following import facts
from flows.tables import error_panel, shown, size, snapshots_table, verification_table
from storage.errors import SnapshotCorrupt
from storage.manifests import Anchor, BrokenSlot, FileEntry, Manifest
from tasks.bundle_checks import BundleCheck
from tasks.run_progress import RunProgress


def manifest(sequence, kind, **fields):
    return Manifest(format_version=1, sequence=sequence, kind=kind, run="run", writer="w", created_at=1.7e9, **fields)


LOG = [
    manifest(0, "claim"),
    manifest(1, "trainer_checkpoint", step=3),
    manifest(2, "trainer_checkpoint", step=4, counts={"ledger_groups": 12, "buffered_groups": 7}),
    manifest(
        3,
        "rollout_snapshot",
        step=4,
        anchor=Anchor(kind="checkpoint", step=4, sequence=2, identity="i"),
        counts={"ledger_groups": 11, "sealed_siblings": 23},
    ),
    manifest(4, "retired", retires=(1,)),
    BrokenSlot(5, "not a manifest"),
]
LONG = manifest(
    99_999,
    "rollout_snapshot",
    step=99_999,
    anchor=Anchor(kind="checkpoint", step=99_999, sequence=99_998, identity="i"),
    counts={"ledger_groups": 4096, "sealed_siblings": 65_536, "buffered_groups": 4096},
    files=(FileEntry(path="a/b", bytes=1023 << 20, sha256="0" * 64, role="part"),),
)


def rendered(thing) -> list[str]:
    console = Console(width=80, no_color=True)
    with console.capture() as capture:
        console.print(thing)
    return [line.rstrip() for line in capture.get().splitlines()]


def test_the_bundles_that_can_be_restored_are_listed_with_what_they_hold():
    lines = rendered(snapshots_table("run", LOG, everything=False))
    rows = [line.split() for line in lines]
    assert ["2", "checkpoint", "4"] in [row[:3] for row in rows]
    snapshot = next(row for row in rows if row[:1] == ["3"])
    assert snapshot[1] == "snapshot"
    assert snapshot[-6:] == ["2", "11", "23", "0", "0", "B"]
    assert not any(row[:2] == ["1", "checkpoint"] for row in rows)
    assert ["5", "unreadable"] in rows
    assert any("5: not a manifest" in line for line in lines)


def test_everything_includes_claims_and_what_was_retired():
    rows = [line.split()[:2] for line in rendered(snapshots_table("run", LOG, everything=True))]
    assert ["0", "claim"] in rows
    assert ["1", "checkpoint"] in rows
    assert ["4", "retired"] in rows


def test_nothing_is_cut_off_on_a_narrow_terminal():
    assert not any("…" in line for line in rendered(snapshots_table("run", [*LOG, LONG], everything=True)))


def test_a_defect_is_shown_in_the_row_of_its_bundle():
    checks = [BundleCheck(3, "rollout_snapshot", 4, 10, 2048), BundleCheck(4, "rollout_snapshot", 4, 0, 9, "sha256")]
    lines = rendered(verification_table("run", checks))
    assert any("as published" in line and "2.0 KiB" in line for line in lines)
    assert any("sha256" in line and " 4 " in line for line in lines)


def test_an_error_is_one_panel_without_a_workers_colours():
    text = "\n".join(rendered(error_panel(SnapshotCorrupt("\x1b[36mpart [x]\x1b[39m differs"))))
    assert "SnapshotCorrupt" in text
    assert "part [x] differs" in text


@pytest.mark.parametrize(("value", "text"), [(3, "3 B"), (2048, "2.0 KiB"), (3 << 20, "3.0 MiB"), (5 << 30, "5.0 GiB")])
def test_sizes_are_for_people(value, text):
    assert size(value) == text


def test_values_are_for_people():
    assert (shown(12345), shown(0.5), shown(True), shown("x")) == ("12,345", "0.500", "True", "x")


def test_progress_in_a_few_words():
    progress = RunProgress()
    assert "no step yet" in facts(progress)
    progress.add([{"t": 1.0, "event": "train_step", "step": 1, "rewards_mean": 0.5}])
    assert "reward 0.500" in facts(progress)
