"""A store that is switched off in the middle of what is written to it."""

from collections.abc import Callable
from typing import Any

from storage.errors import StoreOutcomeUnknown, StoreUnavailable
from storage.filesystem import Store


class StoppingStore:
    """A store whose power fails at the change after `allowed`: from then on nothing is written, read or deleted.

    `lands`: the change during which it fails still happens, but nobody is told.
    """

    def __init__(self, store: Store, *, allowed: int, lands: bool) -> None:
        self._store = store
        self.allowed = allowed
        self._lands = lands
        self.writes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def write(self, path: str, data: bytes) -> None:
        self._write(lambda: self._store.write(path, data), StoreUnavailable(f"write {path}: power failed"))

    def create_exclusive(self, path: str, data: bytes) -> None:
        unknown = StoreOutcomeUnknown(f"create {path}: power failed")
        self._write(lambda: self._store.create_exclusive(path, data), unknown)

    def read(self, path: str) -> bytes:
        if self.writes > self.allowed:
            raise StoreUnavailable(f"read {path}: power failed")
        return self._store.read(path)

    def delete(self, path: str) -> None:
        self._write(lambda: self._store.delete(path), StoreUnavailable(f"delete {path}: power failed"))

    def _write(self, action: Callable[[], None], error: Exception) -> None:
        self.writes += 1
        if self.writes <= self.allowed:
            action()
            return
        if self._lands and self.writes == self.allowed + 1:
            action()
        raise error
