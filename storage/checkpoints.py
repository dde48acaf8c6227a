"""The model files of one trainer checkpoint: written below one prefix, read back only if they are unchanged."""

from storage.canonical import sha256
from storage.filesystem import Store
from storage.manifests import FileEntry
from storage.snapshot_reader import read_verified


class CheckpointFiles:
    """Files below `prefix` (see `RunLayout.checkpoint`). They count once a manifest lists their entries."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def put(self, name: str, data: bytes, role: str) -> FileEntry:
        """Write one file durably; its entry goes into the manifest. Raises StoreUnavailable."""
        path = f"{self._prefix}/{name}"
        self._store.write(path, data)
        return FileEntry(path=path, bytes=len(data), sha256=sha256(data), role=role)

    def fetch(self, entry: FileEntry) -> bytes:
        """Read one file. Raises SnapshotCorrupt when size or sha256 differ, StoreUnavailable."""
        return read_verified(self._store, entry)
