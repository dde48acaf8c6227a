"""What tests of several packages share: a store whose chosen calls fail or wait."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from storage.filesystem import Store

CHANGES = ("write", "create_exclusive", "delete")


class Hold:
    """A store call that waits: `reached` once it was made, goes on after `release`."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._go = threading.Event()

    def strike(self) -> None:
        self.reached.set()
        assert self._go.wait(20), "a held store call was never released"

    def release(self) -> None:
        self._go.set()


@dataclass
class Trouble:
    """What befalls one call of `operation` whose path holds `path_part`, after `passing` such calls went well."""

    operation: str
    path_part: str
    effect: Exception | Hold
    passing: int
    late: bool

    def befalls(self, operation: str, path: str) -> bool:
        kinds = CHANGES if self.operation == "change" else (self.operation,)
        if operation not in kinds or self.path_part not in path:
            return False
        self.passing -= 1
        return self.passing < 0

    def strike(self) -> None:
        if isinstance(self.effect, Exception):
            raise self.effect
        self.effect.strike()


class TroubledStore:
    """A store whose chosen calls fail or wait, each once; all others go to the real one."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.troubles: list[Trouble] = []
        self.calls: list[tuple[str, str]] = []

    def fail(self, operation: str, path_part: str, error: Exception, *, passing: int = 0, late: bool = False) -> None:
        """Let one such call fail, if `late` after it has happened. Operation "change" is any that writes or deletes."""
        self.troubles.append(Trouble(operation, path_part, error, passing, late))

    def hold(self, operation: str, path_part: str) -> Hold:
        """Let the next such call wait."""
        hold = Hold()
        self.troubles.append(Trouble(operation, path_part, hold, passing=0, late=False))
        return hold

    def changes(self) -> list[tuple[str, str]]:
        """The calls so far that wrote or deleted something."""
        return [call for call in self.calls if call[0] in CHANGES]

    def __getattr__(self, operation: str) -> Any:
        member = getattr(self._inner, operation)
        if not callable(member):
            return member

        def call(path: str, *rest: Any) -> Any:
            self.calls.append((operation, path))
            trouble = next((t for t in self.troubles if t.befalls(operation, path)), None)
            if trouble is None:
                return member(path, *rest)
            self.troubles.remove(trouble)
            if trouble.late:
                member(path, *rest)
            trouble.strike()
            return member(path, *rest)

        return call


@pytest.fixture
def troubled() -> Callable[[Store], TroubledStore]:
    """Wraps a store, so that calls can be made to fail or to wait."""
    return TroubledStore
