"""Where bytes lie: local folders, memory and fsspec object stores, as raw calls without deadlines.

A backend raises `FileNotFoundError` for what is absent, `FileExistsError` from `create` for a taken name, and
any other exception when it failed. `storage.filesystem` adds deadlines, path checks and our own errors.
"""

import contextlib
import os
import threading
import time
import uuid
from pathlib import Path
from typing import Any, Protocol

_TEMPORARY_SUFFIX = ".midflight-tmp"
_TEMPORARY_LIFETIME_S = 24 * 3600.0


class Backend(Protocol):
    """Raw, blocking calls on paths that are relative to the backend's root."""

    def read(self, path: str) -> bytes:
        """All bytes of a file."""
        ...

    def write(self, path: str, data: bytes) -> None:
        """Create or replace atomically and durably."""
        ...

    def create(self, path: str, data: bytes) -> None:
        """Create durably, or `FileExistsError`: of several callers exactly one succeeds."""
        ...

    def list(self, prefix: str) -> list[str]:
        """All files below the folder `prefix` ("" is everything)."""
        ...

    def size(self, path: str) -> int:
        """Bytes of a file."""
        ...

    def age_s(self, path: str) -> float:
        """Seconds since the file was last written."""
        ...

    def delete(self, path: str) -> None:
        """Remove a file; `FileNotFoundError` when it is absent."""
        ...

    def local_path(self, path: str) -> Path | None:
        """The path in the local file system, or None for a store that has none."""
        ...

    def tidy(self) -> None:
        """Remove what interrupted writes left behind."""
        ...


class LocalBackend:
    """A folder. Files and the folders that hold them are synced before a call returns."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, path: str) -> bytes:
        """All bytes of a file."""
        return self.local_path(path).read_bytes()

    def write(self, path: str, data: bytes) -> None:
        """Temporary file, fsync, rename, folder fsync."""
        target = self.local_path(path)
        with self._synced_temporary(target, data) as temporary:
            os.replace(temporary, target)
        _sync_folder(target.parent)

    def create(self, path: str, data: bytes) -> None:
        """Temporary file, fsync, `link` (which refuses a taken name atomically), folder fsync."""
        target = self.local_path(path)
        with self._synced_temporary(target, data) as temporary:
            os.link(temporary, target)
        _sync_folder(target.parent)

    def list(self, prefix: str) -> list[str]:
        """All files below a folder, without temporary ones."""
        found: list[str] = []
        for folder, _, names in os.walk(self.local_path(prefix)):
            base = Path(folder).relative_to(self._root)
            found.extend((base / name).as_posix() for name in names if not name.endswith(_TEMPORARY_SUFFIX))
        return found

    def size(self, path: str) -> int:
        """Bytes of a file."""
        return self.local_path(path).stat().st_size

    def age_s(self, path: str) -> float:
        """Seconds since the file was last written."""
        return time.time() - self.local_path(path).stat().st_mtime

    def delete(self, path: str) -> None:
        """Remove a file."""
        target = self.local_path(path)
        target.unlink()
        _sync_folder(target.parent)

    def local_path(self, path: str) -> Path:
        """The path in the local file system."""
        return self._root / path

    def tidy(self) -> None:
        """Remove temporary files that a killed process left a day ago or earlier."""
        oldest = time.time() - _TEMPORARY_LIFETIME_S
        for temporary in self._root.rglob(f".*{_TEMPORARY_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                if temporary.stat().st_mtime < oldest:
                    temporary.unlink()

    @contextlib.contextmanager
    def _synced_temporary(self, target: Path, data: bytes) -> Any:
        _make_folder(target.parent)
        temporary = target.parent / f".{target.name}.{uuid.uuid4().hex}{_TEMPORARY_SUFFIX}"
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)


def _make_folder(folder: Path) -> None:
    """Create a folder and make its name durable in its parent."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class MemoryBackend:
    """A dictionary, for tests. Gone with the process."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[bytes, float]] = {}
        self._lock = threading.Lock()

    def read(self, path: str) -> bytes:
        """All bytes of a file."""
        return self._entry(path)[0]

    def write(self, path: str, data: bytes) -> None:
        """Replace the entry."""
        with self._lock:
            self._files[path] = (bytes(data), time.monotonic())

    def create(self, path: str, data: bytes) -> None:
        """Add the entry under the lock."""
        with self._lock:
            if path in self._files:
                raise FileExistsError(path)
            self._files[path] = (bytes(data), time.monotonic())

    def list(self, prefix: str) -> list[str]:
        """All entries below a folder."""
        folder = f"{prefix}/" if prefix else ""
        with self._lock:
            return [path for path in self._files if path.startswith(folder)]

    def size(self, path: str) -> int:
        """Bytes of an entry."""
        return len(self._entry(path)[0])

    def age_s(self, path: str) -> float:
        """Seconds since the entry was last written."""
        return time.monotonic() - self._entry(path)[1]

    def delete(self, path: str) -> None:
        """Remove an entry."""
        with self._lock:
            if path not in self._files:
                raise FileNotFoundError(path)
            del self._files[path]

    def local_path(self, path: str) -> None:
        """Memory has no path."""

    def tidy(self) -> None:
        """Nothing can be left behind."""

    def _entry(self, path: str) -> tuple[bytes, float]:
        with self._lock:
            try:
                return self._files[path]
            except KeyError:
                raise FileNotFoundError(path) from None


class ObjectBackend:
    """Any fsspec file system whose `pipe_file(mode="create")` is a conditional put: S3, GCS, Azure."""

    def __init__(self, filesystem: Any, root: str) -> None:
        self._filesystem = filesystem
        self._root = root.rstrip("/")

    def read(self, path: str) -> bytes:
        """All bytes of an object."""
        return bytes(self._filesystem.cat_file(self._full(path)))

    def write(self, path: str, data: bytes) -> None:
        """Put the object; object stores replace atomically."""
        self._filesystem.pipe_file(self._full(path), data)

    def create(self, path: str, data: bytes) -> None:
        """Conditional put (`If-None-Match: *`)."""
        try:
            self._filesystem.pipe_file(self._full(path), data, mode="create")
        except Exception as error:
            if _says_taken(error):
                raise FileExistsError(path) from error
            raise

    def list(self, prefix: str) -> list[str]:
        """All objects below a folder, listed anew."""
        self._filesystem.invalidate_cache()
        folder = self._full(prefix) if prefix else self._root
        try:
            found = self._filesystem.find(folder)
        except FileNotFoundError:
            return []
        start = len(self._root) + 1
        return [str(path)[start:] for path in found if str(path).startswith(f"{folder}/")]

    def size(self, path: str) -> int:
        """Bytes of an object."""
        return int(self._filesystem.size(self._full(path)))

    def age_s(self, path: str) -> float:
        """Seconds since the object was last written."""
        return time.time() - float(self._filesystem.modified(self._full(path)).timestamp())

    def delete(self, path: str) -> None:
        """Remove an object (stores that do not tell an absent object from a removed one stay silent)."""
        self._filesystem.rm_file(self._full(path))

    def local_path(self, path: str) -> None:
        """Objects have no local path."""

    def tidy(self) -> None:
        """A put that did not finish leaves no object."""

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}"


def _says_taken(error: BaseException) -> bool:
    """Whether an error, or what caused it, is a store's answer that the name is taken."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, FileExistsError):
            return True
        response = getattr(cause, "response", None)
        if isinstance(response, dict) and response.get("Error", {}).get("Code") in (
            "PreconditionFailed",
            "412",
        ):
            return True
        cause = cause.__cause__
    return False
