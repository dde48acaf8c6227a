"""`python -m flows.service_supervisor HOME`: starts the local services, watches over them and ends them.

They end when no living process uses them any more and nobody asked to keep them (`midflight up`), or on SIGTERM. The
services die with this process (`flows.tied_process`); what they leave behind is found by the set's marker. One that
ends by itself is started again where it was, a few times.
"""

import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from flows.home import Home
from flows.processes import (
    ProcessId,
    end_processes,
    free_port,
    listens_on,
    marked_processes,
    session_processes,
    start_detached,
    tail,
    tied_to_parent,
)
from flows.service_state import (
    MARKER_VARIABLE,
    MOST_RESTARTS,
    RESTARTS_WITHIN_S,
    WORK_POOL,
    ServiceState,
    forget_state,
    is_kept,
    living_users,
    read_state,
    recent_restarts,
    updating,
    with_restart,
    with_status,
    without_prefect_settings,
    write_state,
)

READY_DEADLINE_S = 180.0
POLL_S = 0.2
_UNFINISHED = ["SCHEDULED", "PENDING", "RUNNING", "CANCELLING", "PAUSED"]
SERVER, WORKER, RAY_HEAD = "prefect-server", "prefect-worker", "ray-head"
# Ray's own variable for the port of a head; a new head is then found where the one before was.
_RAY_PORT = "RAY_GCS_SERVER_PORT"

logger = logging.getLogger(__name__)


class ServiceFailed(Exception):
    """A service ended, or did not become ready in time; the text holds the end of its log."""


class Supervisor:
    """Owns the processes of one set of services and their record: start -> watch -> stop."""

    def __init__(self, home: Home, state: ServiceState) -> None:
        self._home = home
        self._state = state
        self._ended = threading.Event()

    def run(self) -> None:
        """Start, watch until nobody needs the services, end them all."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: self._ended.set())
        try:
            self._start()
            self._save(with_status(self._state, "ready"))
            self._watch()
        except ServiceFailed as error:
            self._save(with_status(self._state, "failed", str(error)))
            self._wait_until_unused()
        finally:
            self._stop()

    def _save(self, state: ServiceState) -> None:
        self._state = write_state(self._home, state)

    def _start(self) -> None:
        if self._state.owns_ray:
            self._spawn_ray_head()
        if self._state.owns_prefect:
            self._start_server()
        # The worker hands its environment to the flows, so that both addresses must be known before it starts.
        if self._state.owns_ray:
            self._await_ray_head()
        self._start_worker()

    def _spawn_ray_head(self) -> None:
        self._home.ray_address.unlink(missing_ok=True)
        # Not below the home: socket paths longer than 107 characters are refused by the kernel.
        folder = tempfile.mkdtemp(prefix="mf-ray-", dir="/tmp")
        self._save(replace(self._state, ray_temp_dir=folder))
        command = [sys.executable, "-m", "flows.ray_head", str(self._home.ray_address), folder]
        self._spawn(RAY_HEAD, command)

    def _await_ray_head(self) -> None:
        self._await(RAY_HEAD, self._home.ray_address.exists)
        self._save(replace(self._state, ray_address=self._home.ray_address.read_text().strip()))

    def _start_server(self) -> None:
        for remaining in (2, 1, 0):  # someone else may take the port between the look and the start
            port = free_port()
            self._save(replace(self._state, prefect_api_url=f"http://127.0.0.1:{port}/api"))
            try:
                self._start_server_at(port)
                break
            except ServiceFailed:
                process = ProcessId.from_json(self._state.processes[SERVER])
                if process.is_alive() or not remaining or self._ended.is_set():
                    raise
        self._request("POST", "/work_pools/", {"name": WORK_POOL, "type": "process"})
        self._end_flow_runs_of_the_past()

    def _start_server_at(self, port: int) -> None:
        options = ["server", "start", "--host", "127.0.0.1", "--port", str(port)]
        process = self._spawn(SERVER, [sys.executable, "-m", "prefect", *options])
        url = f"{self._state.prefect_api_url}/health"
        self._await(SERVER, lambda: _answers(url) and listens_on(process, port))

    def _end_flow_runs_of_the_past(self) -> None:
        """No process of an earlier set lives, so none of its flow runs does; a waiting one must not start by itself."""
        of_the_past = {"state": {"type": {"any_": _UNFINISHED}}, "deployment_id": {"is_null_": False}}
        for run in self._request("POST", "/flow_runs/filter", {"flow_runs": of_the_past}) or ():
            if not run["auto_scheduled"]:
                # Not by the name Crashed, which `resume-guard` waits for: it goes on when a person starts it.
                message = "the local services ended before this flow run did"
                crashed = {"type": "CRASHED", "name": "Abandoned", "message": message}
                self._request("POST", f"/flow_runs/{run['id']}/set_state", {"state": crashed, "force": True})

    def _start_worker(self) -> None:
        # A new name each time: the server takes an old one for online until its heartbeats are missed.
        name = f"midflight-{self._state.marker}-{len(self._state.restarts.get(WORKER, ()))}"
        options = ["worker", "start", "--pool", WORK_POOL, "--type", "process", "--name", name]
        self._spawn(WORKER, [sys.executable, "-m", "prefect", *options])

        def is_ready() -> bool:
            workers = self._request("POST", f"/work_pools/{WORK_POOL}/workers/filter", {})
            return any(w.get("name") == name and w.get("status") == "ONLINE" for w in workers or ())

        if self._state.owns_prefect:  # another server may want credentials that only Prefect's client handles
            self._await(WORKER, is_ready)

    def _spawn(self, name: str, command: list[str]) -> ProcessId:
        inherited: Mapping[str, str] = os.environ
        if self._state.owns_prefect:
            inherited = without_prefect_settings(inherited)
        environment = {**inherited, **self._state.environment(self._home), MARKER_VARIABLE: self._state.marker}
        if name == RAY_HEAD:
            earlier = environment.pop("RAY_ADDRESS", "")
            environment |= {_RAY_PORT: str(urlsplit(f"//{earlier}").port)} if earlier else {}
        identity = start_detached(
            tied_to_parent(command), environment=environment, log=self._log(name), cwd=self._home.root
        )
        self._save(replace(self._state, processes={**self._state.processes, name: identity.to_json()}))
        return identity

    def _await(self, name: str, is_ready: Callable[[], bool]) -> None:
        """Poll until the service answers; ServiceFailed when it ended or the deadline passed."""
        deadline = time.monotonic() + READY_DEADLINE_S
        process = ProcessId.from_json(self._state.processes[name])
        while not is_ready():
            if not process.is_alive():
                raise ServiceFailed(f"{name} ended while it started; {self._log(name)}:\n{tail(self._log(name))}")
            if time.monotonic() > deadline:
                raise ServiceFailed(
                    f"{name} was not ready after {READY_DEADLINE_S:.0f} s; {self._log(name)}:\n{tail(self._log(name))}"
                )
            if self._ended.wait(POLL_S):
                raise ServiceFailed(f"asked to end while {name} started")

    def _watch(self) -> None:
        while not self._ended.wait(POLL_S):
            for name in (SERVER, RAY_HEAD, WORKER):
                identity = self._state.processes.get(name)
                if identity is not None and not ProcessId.from_json(identity).is_alive():
                    self._revive(name)
            if self._close_if_unused():
                return

    def _revive(self, name: str) -> None:
        """Start a service again that has ended, where it was. Raises ServiceFailed when that was done too often."""
        while True:
            now = time.time()
            if recent_restarts(self._state, name, now) >= MOST_RESTARTS:
                raise ServiceFailed(
                    f"{name} ended again after {MOST_RESTARTS} restarts within {RESTARTS_WITHIN_S:.0f} s; "
                    f"{self._log(name)}:\n{tail(self._log(name))}"
                )
            self._save(with_restart(self._state, name, now))
            logger.warning("%s; the end of its log:\n%s", self._state.detail, tail(self._log(name), lines=5))
            try:
                self._start_again(name)
            except ServiceFailed as error:
                if self._ended.is_set():
                    raise
                logger.warning("%s", error)
                continue
            self._save(with_status(self._state, "ready"))
            logger.warning("%s runs again (pid %d)", name, self._state.processes[name]["pid"])
            return

    def _start_again(self, name: str) -> None:
        if name == WORKER:  # the flow runs that it had started go on without it
            self._start_worker()
            return
        dead = ProcessId.from_json(self._state.processes[name])
        end_processes([*session_processes(dead), *self._alive(name)], grace_s=0)
        if name == SERVER:
            self._start_server_at(urlsplit(self._state.prefect_api_url).port or 0)
            return
        folder, address = self._state.ray_temp_dir, self._state.ray_address
        self._spawn_ray_head()
        shutil.rmtree(folder, ignore_errors=True)
        self._await_ray_head()
        if self._state.ray_address != address:  # flows get their addresses from the worker
            end_processes(self._alive(WORKER), grace_s=10)
            self._start_worker()

    def _alive(self, name: str) -> list[psutil.Process]:
        identity = self._state.processes.get(name)
        process = ProcessId.from_json(identity).process() if identity else None
        return [] if process is None else [process]

    def _wait_until_unused(self) -> None:
        while not self._ended.wait(POLL_S) and living_users(self._home):
            pass

    def _close_if_unused(self) -> bool:
        if living_users(self._home) or is_kept(self._home):
            return False
        with updating(self._home):  # whoever joins after this sees that it came too late
            if living_users(self._home) or is_kept(self._home):
                return False
            self._save(with_status(self._state, "stopping"))
        return True

    def _stop(self) -> None:
        self._save(with_status(self._state, "stopping", self._state.detail))
        for name in (WORKER, RAY_HEAD, SERVER):
            end_processes(self._alive(name), grace_s=10)
        end_leftovers(self._state, self._home)

    def _request(self, method: str, path: str, body: Mapping[str, Any]) -> Any:
        try:
            url = self._state.prefect_api_url + path
            response = httpx.request(method, url, json=dict(body), timeout=10, trust_env=False)
        except httpx.HTTPError:
            return None
        return response.json() if response.is_success else None

    def _log(self, name: str) -> Path:
        return self._home.logs / f"{name}.log"


def end_leftovers(state: ServiceState, home: Home) -> None:
    """Kill whatever still carries the set's marker, and forget the set."""
    sessions = [ProcessId.from_json(process) for process in state.processes.values()]
    for _ in range(10):  # a process that is being born while we look is found the next time
        leftovers = marked_processes(MARKER_VARIABLE, state.marker, sessions=sessions)
        if not leftovers:
            break
        end_processes(leftovers, grace_s=0)
    if state.ray_temp_dir:
        shutil.rmtree(state.ray_temp_dir, ignore_errors=True)
    forget_state(home)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2, trust_env=False).is_success
    except httpx.HTTPError:
        return False


def main() -> None:
    """Supervise the services that `HOME/services/services.json` asks for."""
    logging.basicConfig(format="%(asctime)s %(message)s")
    home = Home(Path(sys.argv[1]))
    with updating(home):  # held by whoever started this process until the record is complete
        state = read_state(home)
    if state is None:
        sys.exit(f"{home.state} is missing: nothing was asked for")
    Supervisor(home, replace(state, supervisor=ProcessId.of_this().to_json())).run()


if __name__ == "__main__":
    main()
