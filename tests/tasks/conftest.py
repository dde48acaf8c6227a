"""A runtime that lives in the test, and a run that lies in a store."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage.filesystem import Store, open_store
from storage.layout import RunLayout
from storage.manifests import Anchor, Manifest, ManifestDraft, ManifestLog
from storage.records import Progress, RolloutState
from storage.run_config import RunConfig
from storage.snapshot_writer import CapturedBundle, SnapshotWriter


class EmptyRun:
    """A run with published snapshots of nothing: whole bundles that are cheap to make."""

    def __init__(self, store: Store, config: RunConfig) -> None:
        self.store = store
        self.config = config
        self.layout = RunLayout(config.name)
        self._log = ManifestLog(store, self.layout, "writer-1")
        self._log.claim()
        self._writer = SnapshotWriter(store, self.layout, self._log)

    def publish(self, **progress: Any) -> Manifest:
        """One more rollout snapshot on the initial model."""
        return self._writer.write(
            CapturedBundle(
                kind="rollout_snapshot",
                step=0,
                anchor=Anchor(kind="bootstrap", step=0, sequence=None, identity="anchor"),
                state=RolloutState(Progress(**progress)),
                rows={},
                cut_time=1.0,
                files=(),
                config=self.config,
                dataset_fingerprint="f" * 64,
            )
        )

    def retire(self, manifest: Manifest) -> None:
        """What retention does: first it says so, then it deletes."""
        self._log.append(ManifestDraft(kind="retired", retires=(manifest.sequence,)))
        for entry in manifest.files:
            self.store.delete(entry.path)

    def damage(self, manifest: Manifest, kind: str) -> str:
        """Flip one bit of a state file; its path."""
        path = next(entry.path for entry in manifest.files if entry.kind == kind)
        data = bytearray(self.store.read(path))
        data[len(data) // 2] ^= 1
        self.store.write(path, bytes(data))
        return path


@pytest.fixture
def empty_run(tmp_path: Path) -> EmptyRun:
    """A run without data in a local store."""
    config = RunConfig.model_validate({"name": "empty", "store": {"url": str(tmp_path / "store")}})
    return EmptyRun(open_store(config.store.url), config)


@pytest.fixture
def config() -> Callable[..., RunConfig]:
    """A configuration named `run`, with sections replaced."""
    return lambda **sections: RunConfig.model_validate({"name": "run", **sections})
