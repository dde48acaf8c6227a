"""Chooses what a run resumes from. Reads only, verifies anew each time, and never falls back in silence.

A bundle that a verification found bad is passed over by that record, until a later verification finds it good.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from storage.errors import FormatUnsupported, NoRestorableState, SnapshotCorrupt
from storage.filesystem import Store
from storage.layout import RunLayout
from storage.manifests import BrokenSlot, Manifest, read_log
from storage.snapshot_reader import read_bundle, verify_model_files
from storage.verdicts import Verdicts, known_bad

RestoreMode = Literal["latest", "trainer_checkpoint"]


@dataclass(frozen=True, slots=True)
class Selection:
    """What to restore. Both None: the run has nothing yet.

    `target` holds the rollout state: a snapshot, or the checkpoint itself. `anchor` holds the model: a
    trainer checkpoint, or None for the initial model. `passed_over` lists newer candidates with the reason.
    `warnings` are results of verifications that were not believed.
    """

    target: Manifest | None
    anchor: Manifest | None
    passed_over: tuple[tuple[int, str], ...] = ()
    warnings: tuple[str, ...] = ()


def select(store: Store, layout: RunLayout, *, mode: RestoreMode = "latest", allow_older: bool = True) -> Selection:
    """The newest durable trainer checkpoint and (mode `latest`) the newest valid snapshot anchored to it.

    Snapshots anchored to the initial model count only while the run has no trainer checkpoint. A snapshot that was cut
    after the newest checkpoint, which was published late, is newer than that, whatever its anchor.

    Raises: NoRestorableState when candidates exist and none is valid, or when one would be passed over
    although `allow_older` is false; StoreUnavailable.
    """
    log = read_log(store, layout)
    selection = _Selector(store, layout, log, mode).choose()
    if selection.passed_over and (selection.target is None or not allow_older):
        reasons = "\n".join(f"  {sequence:08d}: {reason}" for sequence, reason in selection.passed_over)
        hint = "start under another run name, or repair the store"
        if selection.target is not None:
            older = f"{selection.target.sequence:08d}"
            hint = f"set checkpointing.allow_older to restore {older}, or repair the store"
        raise NoRestorableState(
            f"run {layout.run} in {store.url} has candidates that are not valid; {hint}:\n{reasons}"
        )
    return selection


def live_bundles(log: Iterable[Manifest | BrokenSlot]) -> tuple[list[Manifest], list[Manifest]]:
    """Trainer checkpoints and rollout snapshots that were not retired, each oldest first."""
    manifests = [slot for slot in log if isinstance(slot, Manifest)]
    retired = {sequence for manifest in manifests for sequence in manifest.retires}
    live = [manifest for manifest in manifests if manifest.sequence not in retired]
    checkpoints = [manifest for manifest in live if manifest.kind == "trainer_checkpoint"]
    return checkpoints, [manifest for manifest in live if manifest.kind == "rollout_snapshot"]


def anchored_to(checkpoint: Manifest | None, snapshots: Iterable[Manifest]) -> list[Manifest]:
    """Snapshots that name this checkpoint (None: the initial model) as their anchor, in their order."""
    sequence = None if checkpoint is None else checkpoint.sequence
    return [s for s in snapshots if s.anchor is not None and s.anchor.sequence == sequence]


class _Selector:
    def __init__(
        self, store: Store, layout: RunLayout, log: Sequence[Manifest | BrokenSlot], mode: RestoreMode
    ) -> None:
        self._store = store
        self._layout = layout
        self._log = log
        self._checkpoints, snapshots = live_bundles(log)
        self._snapshots = snapshots if mode == "latest" else []
        self._passed_over: list[tuple[int, str]] = []
        self._verdicts = Verdicts(store, layout)

    def choose(self) -> Selection:
        if not self._checkpoints:
            return self._result(self._newest_snapshot(None), None)
        for checkpoint in reversed(self._checkpoints):
            if not self._model_is_whole(checkpoint):
                continue
            anchor: Manifest | None = checkpoint
            target = self._newest_snapshot(checkpoint)
            if target is None:
                target, anchor = self._newest_overtaking(checkpoint)
            if target is None and self._is_whole(checkpoint):
                target, anchor = checkpoint, checkpoint
            if target is not None:
                return self._result(target, anchor)
        return self._result(None, None)

    def _newest_overtaking(self, checkpoint: Manifest) -> tuple[Manifest | None, Manifest | None]:
        """A snapshot that was cut after this checkpoint, but published while that was still being written in the
        background. It stands on an older model and holds more; its anchor goes with it.
        """
        anchors = {older.sequence: older for older in self._checkpoints}
        for snapshot in reversed(self._snapshots):
            if snapshot.anchor is None or not _overtook(snapshot, checkpoint):
                continue
            anchor = anchors.get(snapshot.anchor.sequence if snapshot.anchor.sequence is not None else -1)
            fits = anchor_mismatch(snapshot, anchor) is None and (anchor is None or self._model_is_whole(anchor))
            if fits and self._is_whole(snapshot):
                return snapshot, anchor
        return None, checkpoint

    def _newest_snapshot(self, checkpoint: Manifest | None) -> Manifest | None:
        for snapshot in reversed(anchored_to(checkpoint, self._snapshots)):
            if (mismatch := anchor_mismatch(snapshot, checkpoint)) is not None:
                self._passed_over.append((snapshot.sequence, mismatch))
            elif self._is_whole(snapshot):
                return snapshot
        return None

    def _model_is_whole(self, checkpoint: Manifest) -> bool:
        verdict = self._verdicts.of(checkpoint)
        try:
            if verdict is not None and verdict.model_problem is not None:
                raise SnapshotCorrupt(known_bad(verdict, verdict.model_problem))
            verify_model_files(self._store, checkpoint)
        except (SnapshotCorrupt, FormatUnsupported) as error:
            self._passed_over.append((checkpoint.sequence, str(error)))
            self._passed_over.extend(
                (snapshot.sequence, f"its anchor {checkpoint.sequence:08d} is not valid")
                for snapshot in anchored_to(checkpoint, self._snapshots)
            )
            return False
        return True

    def _is_whole(self, bundle: Manifest) -> bool:
        try:
            if (verdict := self._verdicts.bad(bundle)) is not None:
                raise SnapshotCorrupt(known_bad(verdict))
            read_bundle(self._store, self._layout, bundle)
        except (SnapshotCorrupt, FormatUnsupported) as error:
            self._passed_over.append((bundle.sequence, str(error)))
            return False
        return True

    def _result(self, target: Manifest | None, anchor: Manifest | None) -> Selection:
        oldest = -1 if target is None else target.sequence
        lost = {(slot.sequence, slot.reason) for slot in self._log if isinstance(slot, BrokenSlot)}
        anchors = {None, *(checkpoint.sequence for checkpoint in self._checkpoints)}
        for snapshot in self._snapshots:
            if snapshot.anchor is None or snapshot.anchor.sequence not in anchors:
                lost.add((snapshot.sequence, f"its anchor {snapshot.anchor} is no trainer checkpoint of the log"))
        newer = {(sequence, reason) for sequence, reason in lost if sequence > oldest}
        passed_over = tuple(sorted({*self._passed_over, *newer}, reverse=True))
        return Selection(target, anchor, passed_over, self._verdicts.warnings)


def _overtook(snapshot: Manifest, checkpoint: Manifest) -> bool:
    """Cut later, published earlier. Times of one writer can be compared, unless its clock was set back meanwhile: then
    the earlier cut belongs to an earlier step.
    """
    if snapshot.writer != checkpoint.writer or snapshot.cut_time is None or checkpoint.cut_time is None:
        return False
    if snapshot.step < checkpoint.step:
        return False
    return snapshot.sequence < checkpoint.sequence and snapshot.cut_time > checkpoint.cut_time


def anchor_mismatch(snapshot: Manifest, checkpoint: Manifest | None) -> str | None:
    """Why a snapshot does not belong to the anchor it names; None when it does."""
    anchor = snapshot.anchor
    if anchor is None:
        return "has no anchor"
    if checkpoint is None:
        if anchor.kind != "bootstrap" or anchor.step != 0:
            return f"is anchored to a {anchor.kind} at step {anchor.step} that the log does not hold"
        return None
    if (anchor.kind, anchor.step, anchor.identity) != ("checkpoint", checkpoint.step, checkpoint.identity):
        return (
            f"says its anchor is a {anchor.kind} at step {anchor.step} with identity {anchor.identity[:12]}, "
            f"but manifest {checkpoint.sequence:08d} is step {checkpoint.step} with identity "
            f"{checkpoint.identity[:12]}"
        )
    return None
