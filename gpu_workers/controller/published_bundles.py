"""One run's bundles in its store: publish with retention, read back verified. Blocking; called from threads."""

import threading
from collections.abc import Mapping

from gpu_workers.controller.considerate import considerate
from storage.checkpoint_metrics import put_metrics, score_of
from storage.checkpointing_config import CheckpointingConfig
from storage.checkpoints import CheckpointFiles
from storage.filesystem import Store
from storage.layout import RunLayout
from storage.manifests import FileEntry, Manifest, ManifestLog, decode_manifest
from storage.retention import Keep, retain
from storage.run_config import RolloutCheckpointingConfig
from storage.snapshot_reader import RestoredBundle, read_bundle
from storage.snapshot_writer import CapturedBundle, SnapshotWriter


class PublishedBundles:
    """The only writer of its run: it has claimed the manifest log, so that an older controller is fenced."""

    def __init__(
        self,
        store: Store,
        layout: RunLayout,
        log: ManifestLog,
        *,
        checkpointing: CheckpointingConfig,
        snapshots: RolloutCheckpointingConfig,
    ) -> None:
        self._store = store
        self._layout = layout
        self._log = log
        self._checkpointing = checkpointing
        self._keep = Keep(
            checkpoints=checkpointing.keep,
            per_anchor=snapshots.keep_per_anchor,
            best=checkpointing.keep_best,
            score=self._score,
        )
        self._scores: dict[int, float | None] = {}
        self._newest_prefix: str | None = None
        self._writer = SnapshotWriter(store, layout, log)
        self._lock = threading.Lock()
        self._prefixes = 0

    def publish(self, bundle: CapturedBundle) -> Manifest:
        """Parts and state tables, then the manifest, then retention (never without a publication)."""
        with self._lock, considerate():
            manifest = self._writer.write(bundle)
            retain(
                self._store,
                self._layout,
                self._log,
                keep=self._keep,
                pinned=self._writer.pinned_parts(),
                being_written=self._newest_prefix,
            )
            return manifest

    def put_metrics(self, prefix: str, step: int, metrics: Mapping[str, float]) -> FileEntry:
        """Write the metrics of a step beside its model files; retention may choose by them."""
        return put_metrics(CheckpointFiles(self._store, prefix), step, metrics)

    def _score(self, checkpoint: Manifest) -> float | None:
        """What the best checkpoints are chosen by. It is read once."""
        if checkpoint.sequence not in self._scores:
            self._scores[checkpoint.sequence] = score_of(self._store, checkpoint, self._checkpointing)
        return self._scores[checkpoint.sequence]

    def checkpoint_prefix(self, step: int) -> str:
        """Where the model files of a trainer checkpoint go. Unique: the checkpoint of a try whose outcome is unknown
        may be published, and its files must not be overwritten by the next try.
        """
        self._prefixes += 1
        self._newest_prefix = self._layout.checkpoint(step, f"{self._log.writer}-{self._prefixes}")
        return self._newest_prefix

    def manifest(self, sequence: int) -> Manifest:
        """The manifest in one slot of the log."""
        path = self._layout.manifest(sequence)
        return decode_manifest(self._store.read(path), path)

    def read(self, sequence: int) -> RestoredBundle:
        """Records and rows of one bundle, every byte verified."""
        return read_bundle(self._store, self._layout, self.manifest(sequence))

    def adopt(self, bundle: RestoredBundle) -> None:
        """Restored rows lie in published parts already: they are referred to, not written again."""
        with self._lock:
            self._writer.adopt(bundle.placements)

    def follows_silent_life(self, target: int | None) -> bool:
        """Whether an earlier controller took the run over after bundle `target` and published nothing."""
        since = -1 if target is None else target
        claims = [slot for slot in self._log.read() if isinstance(slot, Manifest) and slot.kind == "claim"]
        return any(claim.sequence > since and claim.writer != self._log.writer for claim in claims)
