"""Faults that one run is to meet, in order: read from a file, counted, and noted where a killed process can't forget.

    planned --its point was visited often enough--> happens (noted first) --`times` times--> spent, the next is armed

Visits are counted in each process from zero; what has happened counts for all processes of the run.
"""

import json
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any


class Action(StrEnum):
    """What happens at a point. Only `kill` makes sense where nothing is written.

    kill   SIGKILL to the process that is there
    fail   the store answers with an input/output error; after a write: it was done all the same
    full   the store answers that it is full
    slow   the store answers `seconds` later
    tear   half of the bytes get their final name, then SIGKILL
    flip   one bit of the written file is turned over, and nobody is told
    """

    KILL = "kill"
    FAIL = "fail"
    FULL = "full"
    SLOW = "slow"
    TEAR = "tear"
    FLIP = "flip"


@dataclass(frozen=True, slots=True)
class Fault:
    """`action` at a point (a name, or a pattern with `*`): at its `visit`-th visit in one process, then at each of the
    next until it has happened `times` times. Counting begins when the faults before it are spent.
    """

    point: str
    action: Action
    visit: int = 1
    times: int = 1
    seconds: float = 0.0

    @staticmethod
    def from_json(value: dict[str, Any]) -> "Fault":
        """From its fields."""
        return Fault(**{**value, "action": Action(value["action"])})


@dataclass(frozen=True, slots=True)
class Happened:
    """One fault that happened: its number in the plan, where, and to which file (empty: none)."""

    number: int
    point: str
    action: Action
    path: str
    pid: int
    at: float


class FaultPlan:
    """The plan of one run in a folder: `<run>.json`, beside it what has happened and which points were visited."""

    def __init__(self, folder: Path, run: str) -> None:
        self._folder = folder
        self._run = run
        self._lock = threading.Lock()
        self._visits: Counter[int] = Counter()
        self._seen: set[str] = set()
        try:
            planned = json.loads((folder / f"{run}.json").read_text())
        except FileNotFoundError:
            self.faults: tuple[Fault, ...] | None = None
        else:
            self.faults = tuple(Fault.from_json(fault) for fault in planned)

    @staticmethod
    def write(folder: Path, run: str, faults: Sequence[Fault]) -> None:
        """Plan these faults for a run that is not started yet. None at all: its visits are noted."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{run}.json").write_text(json.dumps([asdict(fault) for fault in faults]))

    def due(self, point: str, path: str, *, pid: int, at: float) -> Fault | None:
        """Visit a point; the fault that happens there now, which is noted already."""
        if self.faults is None:
            return None
        with self._lock:
            self._note_visit(point)
            number = self._armed()
            if number is None or not fnmatchcase(point, self.faults[number].point):
                return None
            self._visits[number] += 1
            fault = self.faults[number]
            if self._visits[number] < fault.visit:
                return None
            happened = Happened(number, point, fault.action, path, pid, at)
            return fault if self._claim(number, happened) else None

    def happened(self) -> list[Happened]:
        """What has happened so far, in order."""
        found = [Happened(**json.loads(path.read_text())) for path in self._folder.glob(f"{self._run}.happened-*")]
        return sorted(found, key=lambda happened: (happened.at, happened.number))

    def visited(self) -> frozenset[str]:
        """The points that any process of the run has visited."""
        try:
            return frozenset((self._folder / f"{self._run}.visited").read_text().split())
        except FileNotFoundError:
            return frozenset()

    def spent(self, number: int) -> bool:
        """Whether a fault of the plan has happened as often as it was to."""
        assert self.faults is not None
        return all(self._mark(number, time).exists() for time in range(self.faults[number].times))

    def _armed(self) -> int | None:
        assert self.faults is not None
        return next((number for number in range(len(self.faults)) if not self.spent(number)), None)

    def _claim(self, number: int, happened: Happened) -> bool:
        """Take the next of its times; another process may be quicker."""
        assert self.faults is not None
        for time in range(self.faults[number].times):
            with suppress(FileExistsError), self._mark(number, time).open("x") as mark:
                mark.write(json.dumps(asdict(happened)))
                return True
        return False

    def _mark(self, number: int, time: int) -> Path:
        return self._folder / f"{self._run}.happened-{number}-{time}"

    def _note_visit(self, point: str) -> None:
        if point not in self._seen:
            self._seen.add(point)
            with (self._folder / f"{self._run}.visited").open("a") as file:
                file.write(f"{point}\n")
