"""The named points between writes at which a run can be hurt on purpose; nothing happens at them in production.

They are off unless the environment variable MIDFLIGHT_FAULTS of the process names a folder when it starts, which must
hold a plan for the run (see `FaultPlan`). No configuration and no snapshot can switch them on. Every write, read and
removal of a file of a run passes its point in `FaultyBackend`, which `open_store` then puts around every store; the
other points are calls of `reached`.
"""

import logging
import os
import signal
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from storage.errors import BrokenInvariant
from storage.fault_plan import Action, Fault, FaultPlan

logger = logging.getLogger(__name__)

VARIABLE = "MIDFLIGHT_FAULTS"

_WRITTEN = {
    "run-record": "`run.json`",
    "claim": "the manifest by which a controller takes the run",
    "part": "a part with rows",
    "table": "a table of the rollout state",
    "model-file": "a file of the trainer, or the metrics beside them",
    "checkpoint-manifest": "the manifest that makes a trainer checkpoint exist",
    "snapshot-manifest": "the manifest that makes a rollout snapshot exist",
    "retired-manifest": "the manifest that says what retention frees",
    "sign-of-life": "the record by which a controller shows that it lives",
}
_DELETED = ("part", "table", "model-file", "sign-of-life")
_READ = ("manifest", "part", "table", "model-file")
_REACHED = {
    "restore:weights": "before this link of the restore",
    "restore:replay-buffer": "before this link of the restore",
    "restore:ledger": "before this link of the restore",
    "restore:spare-prompts": "before this link of the restore",
    "restore:cursor": "before this link of the restore",
    "restore:redispatch": "before this link of the restore, which starts the pumps",
    "snapshot:environment-closed": "episodes are exported and stand still for a snapshot",
    "snapshot:cut": "a snapshot has its cut, nothing of it is written",
    "snapshot:published": "a snapshot exists, nobody was told",
    "checkpoint:begun": "the trainer has copied its state and writes it",
    "checkpoint:written": "a trainer checkpoint is written and not published",
    "step:optimizer-moved": "the optimizer has moved, the step is not committed",
    "step:committed": "a step is committed, the generators have older weights",
    "weights:published": "new weights are there, no generator has them",
}


def _points() -> dict[str, str]:
    points = {}
    for kind, what in _WRITTEN.items():
        points[f"{kind}:before-write"] = f"before {what} is written"
        points[f"{kind}:after-write"] = f"after {what} was written"
    for kind in _DELETED:
        points[f"{kind}:before-delete"] = f"before {_WRITTEN[kind]} is removed"
        points[f"{kind}:after-delete"] = f"after {_WRITTEN[kind]} was removed"
    for kind in _READ:
        points[f"{kind}:read"] = f"before {_WRITTEN.get(kind, 'a manifest of the log')} is read"
    return points | _REACHED


# Every point with the moment it stands for.
POINTS = _points()


class FaultInjection:
    """The plans of the runs that this process works for, and what is done at a point."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._plans: dict[str, FaultPlan] = {}
        self._lock = threading.Lock()

    def plan(self, run: str) -> FaultPlan:
        """The plan of a run, read once."""
        with self._lock:
            if run not in self._plans:
                self._plans[run] = FaultPlan(self._folder, run)
                if self._plans[run].faults is not None:
                    logger.warning(
                        "FAULTS ARE INJECTED into run %s, since %s is %s: %s",
                        *(run, VARIABLE, self._folder, self._plans[run].faults),
                    )
            return self._plans[run]

    def reached(self, point: str, run: str) -> None:
        """A point where nothing is written: what is due there is a kill."""
        fault = self.due(point, run)
        if fault is not None:
            kill_this_process()

    def due(self, point: str, run: str, path: str = "") -> Fault | None:
        """The fault that happens at this visit of a point, if any. Raises BrokenInvariant for a point without a name,
        and for a fault that can't happen there.
        """
        if point not in POINTS:
            raise BrokenInvariant(f"fault point '{point}' is not listed in storage.fault_points.POINTS; add it there")
        fault = self.plan(run).due(point, path, pid=os.getpid(), at=time.time())
        if fault is None:
            return None
        if point in _REACHED and fault.action is not Action.KILL:
            raise BrokenInvariant(f"nothing is written at '{point}': plan a kill there, not {fault.action}")
        logger.warning("INJECTED FAULT in run %s at %s: %s %s", run, point, fault.action, path)
        return fault


def kill_this_process() -> None:
    """As the kernel or an operator would: no handler runs, nothing is flushed."""
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()  # the signal is on its way


def _from_environment() -> FaultInjection | None:
    folder = os.environ.get(VARIABLE)
    return FaultInjection(Path(folder)) if folder else None


_injection = _from_environment()


def injection() -> FaultInjection | None:
    """What this process was started with; None in production."""
    return _injection


def reached(point: str, run: str) -> None:
    """The calling process of a run is at a point where nothing is written."""
    if _injection is not None:
        _injection.reached(point, run)


def planned_faults(run: str) -> list[dict[str, Any]] | None:
    """The faults that are planned for a run, for its trace; None when there is no plan."""
    faults = None if _injection is None else _injection.plan(run).faults
    return None if faults is None else [asdict(fault) for fault in faults]
