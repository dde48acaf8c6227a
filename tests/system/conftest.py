"""The real `midflight` command in a home of its own, with services that all system tests share."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows.home import HOME_VARIABLE, Home
from flows.processes import marked_processes
from flows.service_state import MARKER_VARIABLE, ServiceState, read_state
from gpu_workers.environments.http_messages import TOKEN_VARIABLE
from storage.filesystem import Store, open_store
from storage.layout import RunLayout
from storage.trace_reader import read_events

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "configs" / "tiny.yaml"
COMMAND_DEADLINE_S = 280.0
ENVIRONMENT_TOKEN = "a-token-of-the-tests"


@dataclass(frozen=True, slots=True)
class Done:
    """A command that has ended: its exit code, and what it said without the frame of a panel."""

    code: int
    text: str


@dataclass(frozen=True, slots=True)
class RunProcesses:
    """What a live run consists of: controller; engines, generators and trainers; flows."""

    controller: psutil.Process
    workers: list[psutil.Process]
    flows: list[psutil.Process]

    @property
    def all(self) -> list[psutil.Process]:
        """Every one of them, the controller first."""
        return [self.controller, *self.workers, *self.flows]


class Midflight:
    """The command line in one home. Nothing of the test process's environment leads to other services."""

    def __init__(self, home: Home) -> None:
        self.home = home

    @property
    def config(self) -> Path:
        """The configuration that tests start from."""
        return TINY

    @property
    def store(self) -> Store:
        """The store of this home."""
        return open_store(str(self.home.store))

    def environment(self) -> dict[str, str]:
        """What a command of this home sees."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "RAY_", "MIDFLIGHT_"))}
        return {**inherited, HOME_VARIABLE: str(self.home.root)}

    def start(self, *arguments: str, also: Mapping[str, str] | None = None) -> "subprocess.Popen[str]":
        """A command in the background, as the leader of its own process group; `also` is added to its environment."""
        return subprocess.Popen(
            [sys.executable, "-m", "flows.cli", *arguments],
            env={**self.environment(), **(also or {})},
            cwd=self.home.root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str, also: Mapping[str, str] | None = None) -> Done:
        """A command to its end."""
        return self.wait(self.start(*arguments, also=also))

    def wait(self, process: "subprocess.Popen[str]") -> Done:
        """The end of a command started before."""
        try:
            text, _ = process.communicate(timeout=COMMAND_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            text, _ = process.communicate()
            pytest.fail(f"the command did not end within {COMMAND_DEADLINE_S} s:\n{text}")
        return Done(process.returncode, " ".join(text.replace("│", " ").split()))

    def train(self, name: str, **settings: Any) -> Done:
        """`midflight train configs/tiny.yaml` under this name; `algorithm__max_steps=3` sets algorithm.max_steps."""
        return self.run(*train_arguments(name, settings))

    def events(self, run: str) -> list[dict[str, Any]]:
        """The trace of a run up to now."""
        return read_events(self.store, RunLayout(run))

    def wait_for(self, run: str, condition: Callable[[Sequence[Mapping[str, Any]]], bool]) -> None:
        """Wait until a run's trace fulfils the condition."""
        wait_until(lambda: condition(self.events(run)), seconds=COMMAND_DEADLINE_S)

    def state(self) -> ServiceState | None:
        """The services that run in this home."""
        return read_state(self.home)

    def processes_of(self, run: str) -> "RunProcesses":
        """The processes of a run's newest life, by the ids in its trace, and those of flow runs in this home."""
        state = self.state()
        assert state is not None
        pids = [event["pids"] for event in self.events(run) if event["event"] == "run_started"][-1]
        engines = [pid for generator in pids["generators"] for pid in generator["engine_pids"]]
        workers = [*engines, *(worker["pid"] for worker in (*pids["generators"], *pids["trainers"]))]
        marked = marked_processes(MARKER_VARIABLE, state.marker)
        flows = [process for process in marked if "prefect.engine" in command_of(process)]
        return RunProcesses(psutil.Process(pids["controller"]), [psutil.Process(pid) for pid in workers], flows)

    def files(self, run: str) -> dict[str, bytes]:
        """Every file of a run."""
        return {path: self.store.read(path) for path in self.store.list(run)}


def command_of(process: psutil.Process) -> list[str]:
    """Its command line; empty if it has ended meanwhile."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def train_arguments(name: str, settings: Mapping[str, Any], config: Path = TINY) -> list[str]:
    """Arguments of `midflight` that train a run under this name."""
    values = {"name": name, **{key.replace("__", "."): value for key, value in settings.items()}}
    return ["train", str(config), *(part for k, v in values.items() for part in ("--set", f"{k}={json.dumps(v)}"))]


def wait_until(condition: Callable[[], bool], *, seconds: float) -> None:
    """Poll until the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain"
        time.sleep(0.1)


def leftovers(marker: str) -> list[str]:
    """The processes that still belong to a set of services."""
    return [str(process) for process in marked_processes(MARKER_VARIABLE, marker)]


@pytest.fixture
def new_home(tmp_path: Path) -> Iterator[Callable[[str], Midflight]]:
    """Homes without services; whatever a test starts in them is ended and must leave nothing."""
    homes: list[Midflight] = []

    def make(name: str = "home") -> Midflight:
        root = tmp_path / name
        root.mkdir()
        homes.append(Midflight(Home(root)))
        return homes[-1]

    yield make
    for midflight in homes:
        midflight.run("down")


@pytest.fixture(scope="session")
def midflight_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Midflight]:
    """A home whose services run for the whole session; it leaves no process behind. Flows and workers know the token of
    the tests' environment servers.
    """
    midflight = Midflight(Home(tmp_path_factory.mktemp("midflight")))
    up = midflight.run("up", also={TOKEN_VARIABLE: ENVIRONMENT_TOKEN})
    assert up.code == 0, up.text
    state = midflight.state()
    assert state is not None
    yield midflight
    assert midflight.run("down").code == 0
    assert leftovers(state.marker) == []


@pytest.fixture
def new_user() -> Iterator[Callable[[Midflight, str], "subprocess.Popen[str]"]]:
    """Starts Python programs in a home; its root is their argument. Those that still run are killed afterwards."""
    started: list[subprocess.Popen[str]] = []

    def start(midflight: Midflight, program: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(midflight.home.root)],
            env=midflight.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.fixture
def train_command() -> Callable[[str, Mapping[str, Any]], list[str]]:
    """Arguments of `midflight` that train a tiny run under a name, with settings such as `algorithm__max_steps`."""
    return train_arguments


@pytest.fixture(name="wait_until")
def _wait_until() -> Callable[..., None]:
    """Polls until a condition holds."""
    return wait_until


@pytest.fixture
def leftovers_of() -> Callable[[ServiceState], list[str]]:
    """The processes that still belong to a set of services."""
    return lambda state: leftovers(state.marker)
