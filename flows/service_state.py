"""The record of the local services: which processes run, where they answer, and the environment that leads to them."""

import fcntl
import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from flows.home import HOME_VARIABLE, Home
from flows.processes import ProcessId

# Every process that belongs to one set of services carries this variable with the set's own value.
MARKER_VARIABLE = "MIDFLIGHT_SERVICES"
WORK_POOL = "midflight"
# A service that ends is started again so often; then the whole set fails.
MOST_RESTARTS, RESTARTS_WITHIN_S = 3, 600.0
# Two thirds of what the database grows by are events; flow runs take their task runs, logs and artifacts along.
EVENTS_KEPT_DAYS, FLOW_RUNS_KEPT_DAYS = 1, 30


@dataclass(frozen=True, slots=True)
class ServiceState:
    """`starting` -> `ready` -> `stopping`, or `failed` with a reason. Times are seconds since the epoch.

    A service that ended is started again: the set is `starting` meanwhile, `detail` says which one and why, and
    `restarts` holds when that happened, by service.
    """

    marker: str
    status: str = "starting"
    detail: str = ""
    supervisor: Mapping[str, float] | None = None
    owns_prefect: bool = True
    owns_ray: bool = True
    prefect_api_url: str = ""
    ray_address: str = ""
    ray_temp_dir: str = ""
    processes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    restarts: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def is_supervised(self) -> bool:
        """Whether the process that ends these services still lives."""
        return self.supervisor is not None and ProcessId.from_json(self.supervisor).is_alive()

    def environment(self, home: Home) -> dict[str, str]:
        """The variables by which the flows, the worker and the command line find these services."""
        variables = {"PREFECT_API_URL": self.prefect_api_url, HOME_VARIABLE: str(home.root)}
        variables |= without_proxy_for_loopback(os.environ)
        if self.owns_prefect:
            variables |= prefect_environment(home)
        if self.owns_ray:
            variables |= ray_environment(home) | {"RAY_ADDRESS": self.ray_address}
        return variables


def new_marker() -> str:
    """A value that no other set of services carries."""
    return secrets.token_hex(8)


def prefect_environment(home: Home) -> dict[str, str]:
    """Settings of the local Prefect: a home of its own, loopback only, no usage statistics, a quick worker, a history
    that does not grow for ever (no restart of a run needs it)."""
    return {
        "PREFECT_HOME": str(home.prefect),
        "PREFECT_PROFILES_PATH": str(home.prefect / "profiles.toml"),
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "PREFECT_CLI_PROMPT": "false",
        "PREFECT_SERVER_EVENTS_RETENTION_PERIOD": f"P{EVENTS_KEPT_DAYS}D",
        "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
        "PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD": str(FLOW_RUNS_KEPT_DAYS * 86_400),
        # Prefect runs hooks by a script whose folder holds a storage.py: it must not come before our `storage`.
        "PYTHONSAFEPATH": "1",
        "DO_NOT_TRACK": "1",
    }


def ray_environment(home: Home) -> dict[str, str]:
    """Settings that the Ray head, the drivers and the workers must share: one token, loopback, no statistics."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(home.ray_token),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray's way to say "one machine": its node gets the loopback address instead of one others can reach.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }


def without_proxy_for_loopback(environment: Mapping[str, str]) -> dict[str, str]:
    """NO_PROXY extended by this machine: a configured HTTP proxy can't reach our loopback ports."""
    hosts = [environment.get("NO_PROXY") or environment.get("no_proxy") or "", "127.0.0.1", "localhost"]
    value = ",".join(host for host in hosts if host)
    return {"NO_PROXY": value, "no_proxy": value}


def without_prefect_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without the user's Prefect settings: the local server must not use another one's database."""
    return {name: value for name, value in environment.items() if not name.startswith("PREFECT_")}


def read_state(home: Home) -> ServiceState | None:
    """The recorded services, or None when there are none."""
    try:
        content: dict[str, Any] = json.loads(home.state.read_text())
    except FileNotFoundError:
        return None
    return ServiceState(**content)


def write_state(home: Home, state: ServiceState) -> ServiceState:
    """Record `state`; a reader sees the old or the new record, never a part."""
    home.services.mkdir(parents=True, exist_ok=True)
    partial = home.state.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(asdict(state), indent=1))
    os.replace(partial, home.state)
    return state


def forget_state(home: Home) -> None:
    """Nothing runs any more."""
    home.state.unlink(missing_ok=True)
    home.ray_address.unlink(missing_ok=True)


@contextmanager
def updating(home: Home) -> Iterator[None]:
    """Hold the lock of this home's services (also against other processes)."""
    home.services.mkdir(parents=True, exist_ok=True)
    with home.lock.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def register_user(home: Home, user: ProcessId) -> None:
    """This process needs the services; they end when no living user is left."""
    home.users.mkdir(parents=True, exist_ok=True)
    (home.users / str(user.pid)).write_text(json.dumps(user.to_json()))


def unregister_user(home: Home, user: ProcessId) -> None:
    """This process needs the services no more."""
    (home.users / str(user.pid)).unlink(missing_ok=True)


def keep_running(home: Home, *, keep: bool) -> None:
    """Whether the services stay when no process needs them (`midflight up` and `midflight down`)."""
    kept = home.users / "kept"
    home.users.mkdir(parents=True, exist_ok=True)
    if keep:
        kept.write_text("{}")
    else:
        kept.unlink(missing_ok=True)


def is_kept(home: Home) -> bool:
    """Whether `midflight up` asked for the services to stay."""
    return (home.users / "kept").exists()


def living_users(home: Home) -> list[ProcessId]:
    """The processes that need the services now; files of dead ones are removed."""
    living = []
    for path in sorted(home.users.glob("[0-9]*")) if home.users.exists() else ():
        try:
            user = ProcessId.from_json(json.loads(path.read_text()))
        except (OSError, ValueError, KeyError):
            continue
        if user.is_alive():
            living.append(user)
        else:
            path.unlink(missing_ok=True)
    return living


def recent_restarts(state: ServiceState, name: str, now: float) -> int:
    """How often a service was started again in the last `RESTARTS_WITHIN_S` seconds."""
    return sum(now - at < RESTARTS_WITHIN_S for at in state.restarts.get(name, ()))


def with_restart(state: ServiceState, name: str, now: float) -> ServiceState:
    """The same services while one of them is started again."""
    times = [*state.restarts.get(name, ()), now]
    detail = f"{name} ended and is started again ({recent_restarts(state, name, now) + 1} of {MOST_RESTARTS})"
    return replace(state, status="starting", detail=detail, restarts={**state.restarts, name: times})


def with_status(state: ServiceState, status: str, detail: str = "") -> ServiceState:
    """The same services in another stage of their life."""
    return replace(state, status=status, detail=detail)
