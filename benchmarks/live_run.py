"""A real tiny run in a home of its own, with its own services: started, watched by its trace, killed."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from flows.home import HOME_VARIABLE, Home
from flows.processes import end_processes, marked_processes
from flows.service_state import MARKER_VARIABLE, ServiceState, read_state
from storage.filesystem import open_store
from storage.layout import RunLayout
from storage.trace_reader import read_events

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 900.0
POLL_S = 0.02
MOST_COMMANDS = 3

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Life:
    """One runtime of a run: its events so far, and its processes."""

    name: str
    events: list[Event]
    pids: list[int]


class LiveRun:
    """A run of configs/tiny.yaml with settings such as `{"algorithm.max_steps": 100}`."""

    def __init__(self, home: Home, name: str, settings: Mapping[str, Any]) -> None:
        self.home = home
        self.name = name
        self.layout = RunLayout(name)
        self._settings = {"name": name, **settings}
        self._commands: list[subprocess.Popen[bytes]] = []

    @property
    def services(self) -> ServiceState:
        """The services of the home."""
        state = read_state(self.home)
        assert state is not None
        return state

    def train(self) -> "subprocess.Popen[bytes]":
        """`midflight train` in the background."""
        sets = [part for key, value in self._settings.items() for part in ("--set", f"{key}={json.dumps(value)}")]
        self._commands.append(start(self.home, "train", str(ROOT / "configs" / "tiny.yaml"), *sets))
        return self._commands[-1]

    def events(self) -> list[Event]:
        """The trace up to now."""
        return list(read_events(open_store(str(self.home.store)), self.layout))

    def life(self) -> Life | None:
        """The newest runtime, if there is one yet."""
        events = self.events()
        started = [event for event in events if event["event"] == "run_started"]
        if not started:
            return None
        name, pids = str(started[-1]["run_process"]), started[-1]["pids"]
        generators = [pid for generator in pids["generators"] for pid in (generator["pid"], *generator["engine_pids"])]
        workers = [*generators, *(trainer["pid"] for trainer in pids["trainers"])]
        own = [event for event in events if event["run_process"] == name]
        return Life(name, own, [int(pids["controller"]), *map(int, workers)])

    def wait_for(self, moment: Callable[[Sequence[Event]], bool], *, after: str = "") -> Life:
        """The newest life other than `after` as soon as its events fulfil a condition.

        After a kill the command ends, or follows the flow run that Prefect resumes: it is started again only if it
        ended.
        """
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            life = self.life()
            if life is not None and life.name != after and moment(life.events):
                return life
            is_new = life is not None and life.name != after
            if not is_new and self._commands[-1].poll() is not None:
                if not after or len(self._commands) > MOST_COMMANDS:
                    break
                self.train()
            time.sleep(POLL_S)
        raise RuntimeError(f"run {self.name}: waited in vain\n{self.output()}")

    def kill(self, life: Life) -> float:
        """SIGKILL controller, workers and flow processes; the moment, in Unix seconds."""
        marked = marked_processes(MARKER_VARIABLE, self.services.marker)
        flows = [process for process in marked if "prefect.engine" in _command(process)]
        at = time.time()
        for process in [*(psutil.Process(pid) for pid in life.pids if psutil.pid_exists(pid)), *flows]:
            process.kill()
        return at

    def stop(self) -> None:
        """End its commands as Ctrl-C does."""
        running = [command for command in self._commands if command.poll() is None]
        end_processes([psutil.Process(command.pid) for command in running], grace_s=60)
        for command in self._commands:
            command.wait()

    def output(self) -> str:
        """The last lines of its commands."""
        return (self.home.root / "commands.log").read_text()[-3000:]


def start(home: Home, *arguments: str) -> "subprocess.Popen[bytes]":
    """A `midflight` command of this home in the background."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "RAY_", "MIDFLIGHT_"))}
    with (home.root / "commands.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "flows.cli", *arguments],
            env={**inherited, HOME_VARIABLE: str(home.root)},
            cwd=home.root,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


@contextmanager
def services() -> Iterator[Home]:
    """A home whose services run; ended afterwards with everything in them, also on SIGTERM."""
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder).resolve())
        if start(home, "up").wait() != 0:
            raise RuntimeError(f"`midflight up` failed:\n{(home.root / 'commands.log').read_text()[-3000:]}")
        try:
            yield home
        finally:
            start(home, "down").wait()


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []
