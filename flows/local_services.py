"""Joining, starting and leaving the local services: a Prefect server and worker, and a Ray head, per home.

What is configured by PREFECT_API_URL or RAY_ADDRESS is used as it is; the rest is started on free loopback ports. All
processes of one home share one set; the last one to leave ends it, and so does the set's supervisor when they die.
"""

import os
import secrets
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from flows.failures import ServicesFailed
from flows.home import Home
from flows.processes import ProcessId, end_processes, start_detached, tail
from flows.service_state import (
    MARKER_VARIABLE,
    ServiceState,
    is_kept,
    keep_running,
    living_users,
    new_marker,
    read_state,
    register_user,
    unregister_user,
    updating,
    write_state,
)
from flows.service_supervisor import READY_DEADLINE_S, end_leftovers

POLL_S = 0.1
STOP_DEADLINE_S = 60.0


@contextmanager
def local_services(home: Home, configured: Mapping[str, str]) -> Iterator[ServiceState]:
    """Services for as long as the block runs. `configured` is the environment that may name existing ones.

    Raises ServicesFailed, with the end of the log, when one of them does not start.
    """
    user = ProcessId.of_this()
    state = _join(home, configured, user)
    try:
        yield _await_ready(home, state)
    finally:
        _leave(home, user)


def start_and_keep(home: Home, configured: Mapping[str, str]) -> ServiceState:
    """Start the services and leave them running after this process ends (`midflight up`)."""
    with local_services(home, configured) as state:
        keep_running(home, keep=True)
        return state


def stop(home: Home) -> bool:
    """End the services of this home now, whoever uses them; False when there are none."""
    keep_running(home, keep=False)
    state = read_state(home)
    if state is None:
        return False
    supervisor = ProcessId.from_json(state.supervisor).process() if state.supervisor else None
    if supervisor is not None:
        end_processes([supervisor], grace_s=STOP_DEADLINE_S)
    end_leftovers(state, home)
    return True


def require_services(home: Home) -> None:
    """Raises ServicesFailed, with the end of its log, when a service that ran has ended."""
    state = read_state(home)
    if state is None or state.status == "failed" or not state.is_supervised():
        raise ServicesFailed(
            state.detail if state is not None and state.detail else f"the services of {home.root} ended"
        )


def _join(home: Home, configured: Mapping[str, str], user: ProcessId) -> ServiceState:
    """Register as a user of the running set, or of a new one."""
    deadline = time.monotonic() + STOP_DEADLINE_S
    while True:
        with updating(home):
            state = read_state(home)
            supervised = state is not None and state.is_supervised()
            if state is not None and supervised and state.status in {"starting", "ready"}:
                register_user(home, user)
                return state
            if not supervised:
                if state is not None:  # its supervisor was killed
                    end_leftovers(state, home)
                register_user(home, user)
                return _start_supervisor(home, configured)
        if time.monotonic() > deadline:
            assert state is not None
            raise ServicesFailed(
                f"the services of {home.root} are {state.status} and did not end within {STOP_DEADLINE_S:.0f} s: "
                "run `midflight down`, then try again"
            )
        time.sleep(POLL_S)


def _start_supervisor(home: Home, configured: Mapping[str, str]) -> ServiceState:
    home.logs.mkdir(parents=True, exist_ok=True)
    home.prefect.mkdir(parents=True, exist_ok=True)
    _write_token(home)
    state = ServiceState(
        marker=new_marker(),
        owns_prefect=not configured.get("PREFECT_API_URL"),
        owns_ray=not configured.get("RAY_ADDRESS"),
        prefect_api_url=configured.get("PREFECT_API_URL", ""),
        ray_address=configured.get("RAY_ADDRESS", ""),
    )
    write_state(home, state)
    supervisor = start_detached(
        [sys.executable, "-m", "flows.service_supervisor", str(home.root)],
        environment={**os.environ, MARKER_VARIABLE: state.marker},
        log=home.logs / "supervisor.log",
        cwd=home.root,
    )
    # Recorded before the lock is released, so that nobody takes the set for an abandoned one.
    return write_state(home, replace(state, supervisor=supervisor.to_json()))


def _write_token(home: Home) -> None:
    """A new secret for the Ray cluster, readable by this user only."""
    home.ray_token.unlink(missing_ok=True)
    with os.fdopen(os.open(home.ray_token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))


def _await_ready(home: Home, joined: ServiceState) -> ServiceState:
    deadline = time.monotonic() + READY_DEADLINE_S
    while time.monotonic() < deadline:
        state = read_state(home)
        if state is None or state.marker != joined.marker or not state.is_supervised():
            log = home.logs / "supervisor.log"
            raise ServicesFailed(f"the local services ended while they started; {log}:\n{tail(log)}")
        if state.status == "ready":
            return state
        if state.status != "starting":
            raise ServicesFailed(f"the local services did not start: {state.detail}")
        time.sleep(POLL_S)
    raise ServicesFailed(f"the local services were not ready after {READY_DEADLINE_S:.0f} s; logs: {home.logs}")


def _leave(home: Home, user: ProcessId) -> None:
    """Stop being a user; the last one waits until everything has ended."""
    unregister_user(home, user)
    deadline = time.monotonic() + STOP_DEADLINE_S
    while time.monotonic() < deadline:
        state = read_state(home)
        if state is None or living_users(home) or is_kept(home):
            return
        if not state.is_supervised():
            end_leftovers(state, home)
            return
        time.sleep(POLL_S)
    stop(home)
