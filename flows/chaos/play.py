"""Plays one scenario: starts the run, hurts it, starts it again as its owner would, until it has ended.

start -> (the moment: kill) -> flow run ended? -> start again -> ... -> trained to the end
"""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from flows.chaos.drivers import COMPLETED, CRASHED, Drivers
from flows.chaos.environment_server import EnvironmentServer
from flows.chaos.scenario import Kill, Role, Scenario
from flows.chaos.victims import Event, Victims
from flows.config_files import load_config
from flows.home import Home
from storage.errors import StoreError
from storage.fault_plan import FaultPlan
from storage.filesystem import open_store
from storage.layout import RunLayout
from storage.run_config import RunConfig
from tasks.run_progress import TraceFollower

TINY = Path(__file__).resolve().parents[2] / "configs" / "tiny.yaml"
POLL_S = 0.02
# Generous, so that a slow machine is no violation: only what hangs meets them.
DEADLINE_S = 900.0
ENDS_WITHIN_S = 60.0
# Beside one for each fault: a fault may meet a start that an earlier one has caused.
MORE_STARTS = 3


@dataclass(slots=True)
class Played:
    """How it went: when each kill from outside happened (Unix seconds), the exit codes of the flow runs, and what went
    wrong that no look into the store would show.
    """

    kills_at: list[float] = field(default_factory=list)
    exit_codes: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def starts(self) -> int:
        """Flow runs that were started."""
        return len(self.exit_codes)

    @property
    def needed_a_person(self) -> bool:
        """Whether a flow run failed in a way that is not resumed by itself."""
        return any(code not in (COMPLETED, CRASHED, -9) for code in self.exit_codes)


class Player:
    """Plays scenarios in one home, whose services run; several beside each other, each in a thread. `faults` is where
    their plans lie.
    """

    def __init__(self, home: Home, drivers: Drivers, faults: Path) -> None:
        self._home = home
        self._drivers = drivers
        self._given_up = threading.Event()
        self.faults = faults

    def play(self, scenario: Scenario) -> tuple[RunConfig, Played]:
        """The run of a scenario, from its start to its end."""
        with self._served(scenario) as server:
            settings = {**scenario.settings, "name": scenario.run}
            if server is not None:
                settings["environment.servers"] = [server.url]
            config = load_config(TINY, [f"{key}={json.dumps(value)}" for key, value in settings.items()])
            FaultPlan.write(self.faults, scenario.run, () if scenario.kill else scenario.faults)
            return config, self._play(scenario, config, server)

    def give_up(self) -> None:
        """End what is being played as soon as possible."""
        self._given_up.set()

    def _play(self, scenario: Scenario, config: RunConfig, server: EnvironmentServer | None) -> Played:
        played, victims = Played(), Victims()
        moment = None if scenario.kill is None else _Moment(scenario.kill)
        follower = TraceFollower(open_store(config.store.url), RunLayout(config.name))
        deadline = time.monotonic() + DEADLINE_S
        flow = self._start(config, victims)
        while True:
            events = _poll(follower)
            victims.learn(events)
            if moment is not None and moment.has_come(events):
                FaultPlan.write(self.faults, scenario.run, scenario.faults)
                self._strike(moment.kill, victims, server, played)
                moment = None
            if flow.exitcode is not None:
                played.exit_codes.append(flow.exitcode)
                if flow.exitcode == COMPLETED or played.starts > len(scenario.faults) + MORE_STARTS:
                    break
                flow = self._start(config, victims)
            if time.monotonic() > deadline:
                played.problems.append(f"it had not ended after {DEADLINE_S:.0f} s")
                break
            if self._given_up.wait(POLL_S):
                played.problems.append("it was given up")
                break
        if moment is not None:
            played.problems.append(f"the moment of its kill never came: {moment.kill}")
        self._end(flow, victims, played)
        return played

    def _start(self, config: RunConfig, victims: Victims) -> ForkServerProcess:
        flow = self._drivers.start(config, self.log(config.name))
        victims.put(Role.FLOW, flow.pid)
        return flow

    def log(self, run: str) -> Path:
        """What the flow runs and servers of a run have said."""
        self._home.logs.mkdir(parents=True, exist_ok=True)
        return self._home.logs / f"{run}.log"

    def _strike(self, kill: Kill, victims: Victims, server: EnvironmentServer | None, played: Played) -> None:
        if server is not None:
            victims.put(Role.ENVIRONMENT, server.pid)
        if not victims.kill(kill.role):
            played.problems.append(f"there was nobody to kill: {kill}")
        played.kills_at.append(time.time())
        if server is not None and kill.role is Role.ENVIRONMENT:
            while not server.revive():
                time.sleep(POLL_S)

    def _end(self, flow: ForkServerProcess, victims: Victims, played: Played) -> None:
        """Everything has to end by itself after the flow run has; what hangs is killed, and slows no other scenario."""
        if played.exit_codes[-1:] != [COMPLETED]:
            victims.kill_all()
        elif left := victims.left_after(ENDS_WITHIN_S):
            played.problems.append(f"still running {ENDS_WITHIN_S:.0f} s after the end: {left}")
            victims.kill_all()
        flow.join()

    @contextmanager
    def _served(self, scenario: Scenario) -> Iterator[EnvironmentServer | None]:
        if not scenario.served:
            yield None
            return
        with EnvironmentServer(f"of-{scenario.run}", self.log(scenario.run)) as server:
            yield server


class _Moment:
    """Counts the events that a kill waits for, over all lives of the run."""

    def __init__(self, kill: Kill) -> None:
        self.kill = kill
        self._left = kill.count

    def has_come(self, events: list[Event]) -> bool:
        self._left -= sum(event["event"] == self.kill.event for event in events)
        return self._left <= 0


def _poll(follower: TraceFollower) -> list[Event]:
    try:
        return follower.poll()
    except (StoreError, FileNotFoundError):  # the picture can wait
        return []
