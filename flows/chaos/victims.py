"""The processes of one run by role, as its trace names them; each is remembered until it has ended."""

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from flows.chaos.scenario import Role
from flows.processes import POLL_S, ProcessId, kill

Event = Mapping[str, Any]

_OF_THE_RUNTIME = (Role.CONTROLLER, Role.GENERATOR, Role.ENGINE, Role.TRAINER)


class Victims:
    """The newest process of each role, and all there ever were."""

    def __init__(self) -> None:
        self._newest: dict[Role, ProcessId] = {}
        self._all: set[ProcessId] = set()

    def put(self, role: Role, pid: int | None) -> None:
        """A process took this role; one that has ended already is nobody."""
        found = None if pid is None else ProcessId.of(pid)
        if found is None:
            self._newest.pop(role, None)
            return
        self._newest[role] = found
        self._all.add(found)

    def learn(self, events: Iterable[Event]) -> None:
        """Whom the trace names."""
        for event in events:
            for role, pid in _named(event):
                self.put(role, pid)

    def kill(self, role: Role) -> list[Role]:
        """SIGKILL; of everything the controller first, so that it publishes nothing more. Returns those that lived."""
        roles = [*_OF_THE_RUNTIME, Role.FLOW] if role is Role.EVERYTHING else [role]
        return [found for found in roles if found in self._newest and kill(self._newest[found])]

    def kill_all(self) -> list[ProcessId]:
        """SIGKILL to all that are left; returns them."""
        return [process for process in self._all if kill(process)]

    def left_after(self, seconds: float) -> list[ProcessId]:
        """Those that still run after so long, at most."""
        deadline = time.monotonic() + seconds
        while (living := [process for process in self._all if process.is_alive()]) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return living


def _named(event: Event) -> Iterator[tuple[Role, int]]:
    """Roles and process ids in an event; the tiny runs have one generator and one trainer."""
    if event["event"] == "run_started":
        pids = event["pids"]
        yield Role.CONTROLLER, int(pids["controller"])
        yield from ((Role.TRAINER, int(trainer["pid"])) for trainer in pids["trainers"])
        generators = pids["generators"]
    elif event["event"] == "generator_restarted":
        generators = [event["pids"]]
    else:
        return
    for generator in generators:
        yield Role.GENERATOR, int(generator["pid"])
        yield from ((Role.ENGINE, int(pid)) for pid in generator["engine_pids"])
