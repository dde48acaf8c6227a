"""The demo's kill: when (found in the trace and the store) and of which processes (told by the controller)."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flows.driver import Driver
from flows.failures import DemoFailed
from flows.processes import ProcessId, kill
from tasks.runtime import RuntimeStatus

Event = Mapping[str, Any]


@dataclass(slots=True)
class KillMoment:
    """Waits for a published snapshot, taken from step `after_step` on, whose unfinished groups hold sealed siblings
    while others still run, and which no train step has overtaken yet: the run is then in the middle of a step."""

    after_step: int

    def find(self, events: Iterable[Event]) -> Event | None:
        """The snapshot event to kill on, if it is the newest thing that happened to the run's steps."""
        chosen: Event | None = None
        for event in events:
            if event["event"] == "train_step":
                chosen = None
            elif self._fits(event):
                chosen = event
        return chosen

    def _fits(self, event: Event) -> bool:
        return (
            event["event"] == "snapshot_attempt"
            and event["outcome"] == "completed"
            and int(event["step"]) >= self.after_step
            and int(event["sealed_siblings"]) > 0
            and int(event["running_attempts"]) > 0
        )


def victims_of(status: RuntimeStatus) -> dict[str, ProcessId]:
    """The living processes of a run by role: flow, controller, generators, trainers. Raises DemoFailed."""
    driver = Driver.parse(status.driver or "")
    if driver is None:
        raise DemoFailed(f"run {status.run} has no flow run as its driver, but {status.driver!r}")
    found = {"flow": driver.process}
    for role, pid in _pids("", status.pids):
        identity = ProcessId.of(pid)
        if identity is not None:
            found[role] = identity
    return found


def kill_all(victims: Mapping[str, ProcessId]) -> list[str]:
    """SIGKILL them, the controller first, so that it can't publish anything more. Returns the roles that lived."""
    roles = sorted(victims, key=lambda role: (not role.startswith("controller"), role))
    return [role for role in roles if kill(victims[role])]


def _pids(role: str, value: Any) -> Iterator[tuple[str, int]]:
    """Every process id in the controller's (nested) answer, with a name for it."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _pids(f"{role} {key}".strip(), inner)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _pids(f"{role} {number}", inner)
    elif isinstance(value, int) and (role == "controller" or "pid" in role):
        yield role, value
