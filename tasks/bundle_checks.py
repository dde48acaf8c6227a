"""Reads every published bundle of a run and compares it with its manifest."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from storage.catalog import anchor_mismatch, live_bundles
from storage.errors import FormatUnsupported, SnapshotCorrupt
from storage.filesystem import Store
from storage.layout import RunLayout
from storage.manifests import BrokenSlot, Manifest, read_log
from storage.runs import log_of_run
from storage.snapshot_reader import read_bundle, verify_model_files


@dataclass(frozen=True, slots=True)
class BundleCheck:
    """What became of one slot of the manifest log. `problem` is empty when everything is as promised."""

    sequence: int
    kind: str
    step: int | None
    rows: int
    bytes: int
    problem: str = ""


def log_of(store: Store, layout: RunLayout) -> Sequence[Manifest | BrokenSlot]:
    """The manifest log of a run that exists. Raises NotFound naming the runs there are."""
    return log_of_run(store, layout)


def check_run(store: Store, layout: RunLayout) -> Iterator[BundleCheck]:
    """Every bundle that can be selected, and every slot that can't be read, oldest first. The run may be live.

    Raises NotFound when the store holds no such run.
    """
    log = log_of(store, layout)
    checkpoints, snapshots = live_bundles(log)
    live = {manifest.sequence for manifest in (*checkpoints, *snapshots)}
    for slot in log:
        if isinstance(slot, BrokenSlot):
            yield BundleCheck(slot.sequence, "unreadable", None, 0, 0, slot.reason)
        elif slot.sequence in live:
            check = check_bundle(store, layout, slot)
            if not check.problem and slot.kind == "rollout_snapshot":
                check = replace(check, problem=_anchor_problem(slot, checkpoints))
            if not check.problem or not _was_retired(store, layout, slot.sequence):
                yield check


def _anchor_problem(snapshot: Manifest, checkpoints: Iterable[Manifest]) -> str:
    """What is wrong between a snapshot and the checkpoint it names; empty when nothing is. That one's own files are
    checked with it.
    """
    sequence = None if snapshot.anchor is None else snapshot.anchor.sequence
    anchor = next((checkpoint for checkpoint in checkpoints if checkpoint.sequence == sequence), None)
    if sequence is not None and anchor is None:
        return f"its anchor {sequence:08d} is no trainer checkpoint that can be restored"
    return anchor_mismatch(snapshot, anchor) or ""


def _was_retired(store: Store, layout: RunLayout, sequence: int) -> bool:
    """Whether a live run's retention removed a bundle while it was being read; it says so before it deletes."""
    return any(isinstance(slot, Manifest) and sequence in slot.retires for slot in read_log(store, layout))


def check_bundle(store: Store, layout: RunLayout, manifest: Manifest) -> BundleCheck:
    """Read one bundle with its model files."""
    total = sum(entry.bytes for entry in manifest.files)
    try:
        verify_model_files(store, manifest)
        rows = len(read_bundle(store, layout, manifest).rows)
    except (SnapshotCorrupt, FormatUnsupported) as error:
        return BundleCheck(manifest.sequence, manifest.kind, manifest.step, 0, total, str(error))
    return BundleCheck(manifest.sequence, manifest.kind, manifest.step, rows, total)


def corruption(run: str, checks: Sequence[BundleCheck]) -> SnapshotCorrupt | None:
    """The error that names every bundle that is not as promised; None when all are."""
    bad = [check for check in checks if check.problem]
    if not bad:
        return None
    details = "\n".join(f"  {check.sequence:08d} ({check.kind}): {check.problem}" for check in bad)
    return SnapshotCorrupt(f"run {run}: {len(bad)} of {len(checks)} bundles are not what was published:\n{details}")
