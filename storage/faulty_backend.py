"""A backend that meets the faults of a plan: every write, removal and read of a run's file passes its fault point."""

import errno
import json
import time
from collections.abc import Callable
from pathlib import Path

from storage.backends import Backend
from storage.fault_plan import Action, Fault
from storage.fault_points import POINTS, FaultInjection, kill_this_process
from storage.layout import run_and_kind

_SLOT_KINDS = {
    "claim": "claim",
    "trainer_checkpoint": "checkpoint-manifest",
    "rollout_snapshot": "snapshot-manifest",
    "retired": "retired-manifest",
}


class FaultyBackend:
    """The calls of another backend, in the way of which a fault may come."""

    def __init__(self, inner: Backend, injection: FaultInjection) -> None:
        self._inner = inner
        self._injection = injection

    def read(self, path: str) -> bytes:
        """All bytes of a file."""
        self._trouble(self._due(path, "read"))
        return self._inner.read(path)

    def write(self, path: str, data: bytes) -> None:
        """Create or replace."""
        self._change(path, data, self._inner.write)

    def create(self, path: str, data: bytes) -> None:
        """Create, or `FileExistsError`."""
        self._change(path, data, self._inner.create)

    def list(self, prefix: str) -> list[str]:
        """All files below a folder."""
        return self._inner.list(prefix)

    def size(self, path: str) -> int:
        """Bytes of a file."""
        return self._inner.size(path)

    def age_s(self, path: str) -> float:
        """Seconds since the file was last written."""
        return self._inner.age_s(path)

    def delete(self, path: str) -> None:
        """Remove a file."""
        self._trouble(self._due(path, "before-delete"))
        self._inner.delete(path)
        self._trouble(self._due(path, "after-delete"))

    def local_path(self, path: str) -> Path | None:
        """The path in the local file system, or None."""
        return self._inner.local_path(path)

    def tidy(self) -> None:
        """Remove what interrupted writes left behind."""
        self._inner.tidy()

    def _change(self, path: str, data: bytes, change: Callable[[str, bytes], None]) -> None:
        before = self._due(path, "before-write", data)
        if before is not None and before.action is Action.TEAR:
            change(path, data[: len(data) // 2])
            kill_this_process()
        self._trouble(before)
        change(path, data)
        after = self._due(path, "after-write", data)
        if after is not None and after.action is Action.FLIP:
            self._inner.write(path, flipped(data))
            return
        self._trouble(after)

    def _due(self, path: str, moment: str, data: bytes = b"") -> Fault | None:
        run, kind = run_and_kind(path)
        if kind == "manifest" and data:
            kind = _SLOT_KINDS[json.loads(data)["manifest"]["kind"]]
        point = f"{kind}:{moment}"
        return self._injection.due(point, run, path) if point in POINTS else None

    def _trouble(self, fault: Fault | None) -> None:
        match None if fault is None else fault.action:
            case Action.KILL:
                kill_this_process()
            case Action.FAIL:
                raise OSError(errno.EIO, "injected: input/output error")
            case Action.FULL:
                raise OSError(errno.ENOSPC, "injected: no space left on device")
            case Action.SLOW if fault is not None:
                time.sleep(fault.seconds)


def flipped(data: bytes) -> bytes:
    """The same bytes but for one bit in their middle."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
