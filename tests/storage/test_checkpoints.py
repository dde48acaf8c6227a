"""Model files of a trainer checkpoint: read back only as they were written."""

import pytest

from storage.checkpoints import CheckpointFiles
from storage.errors import SnapshotCorrupt
from storage.filesystem import Store
from storage.layout import RunLayout


def test_a_model_file_is_fetched_as_it_was_put(store: Store) -> None:
    files = CheckpointFiles(store, RunLayout("demo").checkpoint(12, "first"))
    entry = files.put("model.safetensors", b"weights", "weights")
    assert entry.path == "demo/checkpoints/step_000012-first/model.safetensors"
    assert (entry.bytes, entry.role) == (7, "weights")
    assert files.fetch(entry) == b"weights"


def test_two_incarnations_never_share_a_folder() -> None:
    layout = RunLayout("demo")
    assert layout.checkpoint(12, "first") != layout.checkpoint(12, "second")


@pytest.mark.parametrize("damage", [b"weightz", b"weight", b""])
def test_a_damaged_model_file_is_refused_by_name(store: Store, damage: bytes) -> None:
    files = CheckpointFiles(store, "demo/checkpoints/step_000012-first")
    entry = files.put("model.safetensors", b"weights", "weights")
    store.write(entry.path, damage)
    with pytest.raises(SnapshotCorrupt, match="step_000012-first/model.safetensors"):
        files.fetch(entry)
    store.delete(entry.path)
    with pytest.raises(SnapshotCorrupt, match="missing from store"):
        files.fetch(entry)
