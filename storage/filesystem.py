"""One small interface to every store: atomic writes, exclusive creation, a deadline on every call."""

import re
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import fsspec

from storage.backends import Backend, LocalBackend, MemoryBackend, ObjectBackend
from storage.deadline import DeadlinePassed, call_within
from storage.errors import (
    AlreadyExists,
    ConfigurationError,
    NotFound,
    StoreError,
    StoreOutcomeUnknown,
    StoreUnavailable,
    StoreUnsuitable,
)
from storage.fault_points import injection
from storage.faulty_backend import FaultyBackend
from storage.store_refusals import refusal

T = TypeVar("T")

_PATH = re.compile(r"[^/\\\0]+(/[^/\\\0]+)*")
_MEMORY: dict[str, MemoryBackend] = {}
_MEMORY_LOCK = threading.Lock()


class Store(Protocol):
    """Blocking calls on paths relative to the store, with `/`. Every error is a `StoreError`."""

    @property
    def url(self) -> str:
        """Where the store is."""
        ...

    def read(self, path: str) -> bytes:
        """All bytes of a file. Raises NotFound, StoreUnavailable."""
        ...

    def write(self, path: str, data: bytes) -> None:
        """Create or replace, atomically and durably. Raises StoreUnavailable."""
        ...

    def create_exclusive(self, path: str, data: bytes) -> None:
        """Create durably; of several callers exactly one succeeds.

        Raises AlreadyExists, StoreUnavailable (nothing was created), StoreOutcomeUnknown (read it back).
        """
        ...

    def list(self, prefix: str) -> list[str]:
        """Sorted paths of all files below the folder `prefix`; "" is the whole store."""
        ...

    def exists(self, path: str) -> bool:
        """Whether the file is there."""
        ...

    def size(self, path: str) -> int:
        """Bytes of a file. Raises NotFound."""
        ...

    def age_s(self, path: str) -> float:
        """Seconds since a file was last written. Raises NotFound."""
        ...

    def delete(self, path: str) -> None:
        """Remove a file; one that is absent already is fine."""
        ...

    def local_path(self, path: str) -> Path | None:
        """The path in the local file system, or None."""
        ...

    def probe(self) -> None:
        """Prove that the store can be written and refuses a second creation. Raises StoreUnsuitable."""
        ...


class GuardedStore:
    """A backend with checked paths, deadlines and errors that name operation, path and size."""

    def __init__(self, url: str, backend: Backend, *, deadline_s: float) -> None:
        self._url = url
        self._backend = backend
        self._deadline_s = deadline_s

    @property
    def url(self) -> str:
        """Where the store is."""
        return self._url

    def read(self, path: str) -> bytes:
        """All bytes of a file."""
        return self._call("read", path, None, lambda: self._backend.read(path))

    def write(self, path: str, data: bytes) -> None:
        """Create or replace, atomically and durably."""
        self._call("write", path, len(data), lambda: self._backend.write(path, data))

    def create_exclusive(self, path: str, data: bytes) -> None:
        """Create durably; of several callers exactly one succeeds."""
        what = self._describe("create", path, len(data))
        _check_path(path)
        try:
            call_within(self._deadline_s, lambda: self._backend.create(path, data))
        except FileExistsError as error:
            raise AlreadyExists(f"{what}: it exists already") from error
        except (FileNotFoundError, NotADirectoryError) as error:
            raise StoreUnavailable(f"{what}: {error}; check the store and its permissions") from error
        except Exception as error:
            if (reason := refusal(error)) is not None:
                raise StoreUnavailable(f"{what}: {reason}") from error
            raise StoreOutcomeUnknown(f"{what}: {error!r}; read it back before writing again") from error

    def list(self, prefix: str) -> list[str]:
        """Sorted paths of all files below the folder `prefix`."""
        folder = prefix.rstrip("/")
        return sorted(self._call("list", folder, None, lambda: self._backend.list(folder)))

    def exists(self, path: str) -> bool:
        """Whether the file is there."""
        try:
            self.size(path)
        except NotFound:
            return False
        return True

    def size(self, path: str) -> int:
        """Bytes of a file."""
        return self._call("size", path, None, lambda: self._backend.size(path))

    def age_s(self, path: str) -> float:
        """Seconds since a file was last written."""
        return self._call("age", path, None, lambda: self._backend.age_s(path))

    def delete(self, path: str) -> None:
        """Remove a file; one that is absent already is fine."""
        try:
            self._call("delete", path, None, lambda: self._backend.delete(path))
        except NotFound:
            return

    def local_path(self, path: str) -> Path | None:
        """The path in the local file system, or None."""
        _check_path(path)
        return self._backend.local_path(path)

    def probe(self) -> None:
        """Create one object twice: the first must succeed and the second must be refused."""
        path = f"probe-{uuid.uuid4().hex}"
        try:
            self._create_probe(path)
            self._refuse_probe(path)
            self.delete(path)
            self._call("tidy", "", None, self._backend.tidy)
        except StoreUnsuitable:
            raise
        except StoreError as error:
            raise StoreUnsuitable(f"store {self._url} can't be written: {error}; choose another store.url") from error

    def _create_probe(self, path: str) -> None:
        try:
            self.create_exclusive(path, path.encode())
        except AlreadyExists:
            # A client that repeated its own request meets the object it has just created.
            if self.read(path) != path.encode():
                raise

    def _refuse_probe(self, path: str) -> None:
        try:
            self.create_exclusive(path, b"second")
        except AlreadyExists:
            return
        self.delete(path)
        raise StoreUnsuitable(
            f"store {self._url} created {path} twice: it has no exclusive creation, so two controllers could "
            "both publish to one run; choose a store.url with conditional writes"
        )

    def _call(self, operation: str, path: str, size: int | None, action: Callable[[], T]) -> T:
        what = self._describe(operation, path, size)
        if path or operation not in ("list", "tidy"):
            _check_path(path)
        try:
            return call_within(self._deadline_s, action)
        except FileNotFoundError as error:
            raise NotFound(f"{what}: it is not there") from error
        except DeadlinePassed as error:
            raise StoreUnavailable(f"{what}: {error} (store.deadline_s); try again") from error
        except Exception as error:
            reason = refusal(error) or f"{error!r}; try again when the store answers"
            raise StoreUnavailable(f"{what}: {reason}") from error

    def _describe(self, operation: str, path: str, size: int | None) -> str:
        amount = "" if size is None else f" ({size} bytes)"
        return f"store {self._url}: {operation} {path or '/'}{amount}"


def open_store(url: str, *, deadline_s: float = 60) -> Store:
    """The store at a folder or an fsspec URL (`s3://bucket/prefix`, `memory://name`). Touches nothing yet.

    Credentials and endpoints come from the environment (`AWS_ENDPOINT_URL`, fsspec's own configuration).
    Raises ConfigurationError for a protocol that isn't known or not installed.
    """
    shown, backend = _backend_at(url, deadline_s)
    faults = injection()
    return GuardedStore(shown, backend if faults is None else FaultyBackend(backend, faults), deadline_s=deadline_s)


def _backend_at(url: str, deadline_s: float) -> tuple[str, Backend]:
    """The URL as it is shown, and the backend there."""
    protocol, separator, rest = url.partition("://")
    if not separator or protocol in ("file", "local"):
        root = Path(rest if separator else url).expanduser().absolute()
        return str(root), LocalBackend(root)
    if protocol == "memory":
        with _MEMORY_LOCK:
            return url, _MEMORY.setdefault(rest, MemoryBackend())
    try:
        filesystem, root_path = fsspec.core.url_to_fs(url, **_options(protocol, deadline_s))
    except (ImportError, ValueError) as error:
        raise ConfigurationError(f"store.url {url}: {error}; install the fsspec driver or correct the URL") from error
    return url, ObjectBackend(filesystem, root_path)


def _options(protocol: str, deadline_s: float) -> dict[str, Any]:
    """Listings are never cached: another controller's manifests must be seen."""
    options: dict[str, Any] = {"use_listings_cache": False}
    if protocol in ("s3", "s3a"):
        # The client gives up with us, so that few requests land after their caller has gone.
        timeouts = {"connect_timeout": min(deadline_s, 10.0), "read_timeout": deadline_s}
        options["config_kwargs"] = {**timeouts, "retries": {"max_attempts": 2}}
    return options


def _check_path(path: str) -> None:
    """A path from a manifest is data: it must not leave the store."""
    if not _PATH.fullmatch(path) or any(name in (".", "..") for name in path.split("/")):
        raise StoreError(f"path {path!r} is not a relative path inside the store; it was not touched")
