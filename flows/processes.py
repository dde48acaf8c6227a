"""Operating-system processes by identity: a pid together with its start time, so that a reused pid is never hit."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom
from typing import Any

import psutil

POLL_S = 0.05
_SAME_START_S = 0.05
_OWN_PORTS = (20_000, 32_000)
_RANDOM = SystemRandom()


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process, also after its pid was given to another one. `start_time` is in seconds since the epoch."""

    pid: int
    start_time: float

    @staticmethod
    def of(pid: int) -> "ProcessId | None":
        """The living process with this pid, or None."""
        try:
            return ProcessId(pid=pid, start_time=psutil.Process(pid).create_time())
        except psutil.Error:
            return None

    @staticmethod
    def of_this() -> "ProcessId":
        """The calling process."""
        return ProcessId(pid=os.getpid(), start_time=psutil.Process().create_time())

    def process(self) -> psutil.Process | None:
        """Its handle while it lives (a zombie does not)."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.start_time) <= _SAME_START_S
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.Error:
            return None

    def lost_its_pid(self) -> bool:
        """Whether its pid names another process by now."""
        found = ProcessId.of(self.pid)
        return found is not None and abs(found.start_time - self.start_time) > _SAME_START_S

    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self.process() is not None

    def to_json(self) -> dict[str, float]:
        """As a JSON object."""
        return {"pid": self.pid, "start_time": self.start_time}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> "ProcessId":
        """From `to_json`."""
        return ProcessId(pid=int(value["pid"]), start_time=float(value["start_time"]))


# Popen warns when its object is dropped while the program runs; these programs are followed by their identity.
_STARTED: list["subprocess.Popen[bytes]"] = []


def start_detached(command: Sequence[str], *, environment: Mapping[str, str], log: Path, cwd: Path) -> ProcessId:
    """Start a program in its own session, its output appended to `log`, nothing read from the terminal."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _STARTED.append(process)
    return ProcessId(pid=process.pid, start_time=psutil.Process(process.pid).create_time())


def tied_to_parent(command: Sequence[str]) -> list[str]:
    """`command` with default signal handling, ended by the kernel when its parent dies (`flows.tied_process`)."""
    return [sys.executable, "-m", "flows.tied_process", str(os.getpid()), *command]


def marked_processes(variable: str, value: str, *, sessions: Iterable[ProcessId] = ()) -> list[psutil.Process]:
    """Processes whose environment holds `variable=value` or whose session one of `sessions` leads, and all below them.

    The mark finds those that left their session and lost their parent; a process that sets its own title (Ray's and
    vLLM's do) overwrites its environment, and is found by its session or its parents.
    """
    leaders = {leader.pid for leader in sessions if not leader.lost_its_pid()}
    roots = [p for p in psutil.process_iter() if _is_marked(p, variable, value) or _session_of(p) in leaders]
    family = {relative for root in roots for relative in _with_children(root)}
    return [process for process in family if process.pid != os.getpid() and _alive(process)]


def session_processes(leader: ProcessId) -> list[psutil.Process]:
    """What a program that was started detached left behind in its session, and all below it."""
    if leader.lost_its_pid():
        return []
    roots = [process for process in psutil.process_iter() if _session_of(process) == leader.pid]
    return [process for process in {r for root in roots for r in _with_children(root)} if _alive(process)]


def end_processes(processes: Iterable[psutil.Process], *, grace_s: float) -> None:
    """Ask each process to end (SIGTERM), wait up to `grace_s`, then kill those that are left and their children."""
    asked = list(processes)
    family = {relative for process in asked for relative in _with_children(process)}
    for process in asked:
        _signal(process, kill=False)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and any(_alive(process) for process in asked):
        time.sleep(POLL_S)
    family |= {relative for process in asked for relative in _with_children(process)}
    for process in family:
        _signal(process, kill=True)
    psutil.wait_procs(list(family), timeout=5)


def kill(identity: ProcessId) -> bool:
    """SIGKILL this very process; False when it is already gone."""
    process = identity.process()
    if process is None:
        return False
    _signal(process, kill=True)
    return True


def free_port() -> int:
    """A loopback TCP port that nobody listens on now. The system gives none of these to connections, so that a server
    which dies finds its port free again; Ray's workers listen below them.
    """
    while True:
        port = _RANDOM.randrange(*_OWN_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port


def listens_on(process: ProcessId, port: int) -> bool:
    """Whether this process, or a child of it, is the one that listens on `port`."""
    root = process.process()
    for relative in _with_children(root) if root else ():
        try:
            connections = relative.net_connections(kind="tcp")
        except psutil.Error:
            continue
        if any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections):
            return True
    return False


def tail(log: Path, *, lines: int = 15) -> str:
    """The last lines of a log file, for error messages."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return "(no log was written)"


def _is_marked(process: psutil.Process, variable: str, value: str) -> bool:
    try:
        return bool(process.environ().get(variable) == value)
    except psutil.Error:
        return False


def _session_of(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except OSError:
        return None


def _with_children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return [process]


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _signal(process: psutil.Process, *, kill: bool) -> None:
    try:
        if kill:
            process.kill()
        else:
            process.terminate()
    except psutil.Error:
        return
