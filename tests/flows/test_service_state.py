"""The record of the local services: who uses them, and which environment leads to them."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from flows.home import Home
from flows.processes import ProcessId, session_processes
from flows.service_state import (
    MOST_RESTARTS,
    RESTARTS_WITHIN_S,
    ServiceState,
    forget_state,
    is_kept,
    keep_running,
    living_users,
    read_state,
    recent_restarts,
    register_user,
    unregister_user,
    with_restart,
    without_prefect_settings,
    without_proxy_for_loopback,
    write_state,
)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def test_a_state_is_read_as_it_was_written(home):
    state = ServiceState(marker="m", status="ready", processes={"worker": {"pid": 1, "start_time": 2.0}})
    write_state(home, state)
    assert read_state(home) == state
    forget_state(home)
    assert read_state(home) is None


def test_a_user_counts_while_its_process_lives(home):
    me = ProcessId.of_this()
    register_user(home, me)
    register_user(home, ProcessId(pid=me.pid + 1_000_000, start_time=1.0))
    assert living_users(home) == [me]
    unregister_user(home, me)
    assert living_users(home) == []


def test_services_can_be_kept_without_a_user(home):
    keep_running(home, keep=True)
    assert is_kept(home)
    assert living_users(home) == []
    keep_running(home, keep=False)
    assert not is_kept(home)


def test_a_set_without_a_living_supervisor_is_not_supervised():
    assert not ServiceState(marker="m").is_supervised()
    assert ServiceState(marker="m", supervisor=ProcessId.of_this().to_json()).is_supervised()
    assert not ServiceState(marker="m", supervisor={"pid": os.getpid(), "start_time": 1.0}).is_supervised()


def test_what_is_configured_by_the_user_is_left_as_it_is(home):
    theirs = ServiceState(marker="m", owns_prefect=False, owns_ray=False, prefect_api_url="http://theirs/api")
    environment = theirs.environment(home)
    assert environment["PREFECT_API_URL"] == "http://theirs/api"
    assert "PREFECT_HOME" not in environment
    assert not any(name.startswith("RAY_") for name in environment)


def test_all_processes_of_a_local_ray_share_one_token(home):
    environment = ServiceState(marker="m", ray_address="127.0.0.1:1").environment(home)
    assert environment["RAY_AUTH_MODE"] == "token"
    assert environment["RAY_AUTH_TOKEN_PATH"] == str(home.ray_token)
    assert environment["RAY_ADDRESS"] == "127.0.0.1:1"


def test_the_token_is_for_its_user_only(home):
    from flows.local_services import _write_token

    home.services.mkdir(parents=True)
    _write_token(home)
    first = home.ray_token.read_text()
    _write_token(home)
    assert home.ray_token.read_text() != first
    assert stat.S_IMODE(home.ray_token.stat().st_mode) == 0o600


def test_a_local_server_does_not_use_the_users_database():
    inherited = {"PREFECT_API_DATABASE_CONNECTION_URL": "postgresql://theirs", "PATH": "/bin"}
    assert without_prefect_settings(inherited) == {"PATH": "/bin"}


def test_loopback_is_never_asked_through_a_proxy():
    assert without_proxy_for_loopback({})["NO_PROXY"] == "127.0.0.1,localhost"
    assert without_proxy_for_loopback({"NO_PROXY": "intranet"})["no_proxy"] == "intranet,127.0.0.1,localhost"


def test_the_home_follows_its_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("MIDFLIGHT_HOME", str(tmp_path / "elsewhere"))
    assert Home.current().root == tmp_path / "elsewhere"
    monkeypatch.delenv("MIDFLIGHT_HOME")
    monkeypatch.chdir(tmp_path)
    assert Home.current().root == tmp_path / ".midflight"


def test_a_service_may_be_started_again_a_few_times_within_a_while():
    state = ServiceState(marker="m", status="ready")
    for number in range(1, MOST_RESTARTS + 1):
        assert recent_restarts(state, "worker", 1000.0) == number - 1
        state = with_restart(state, "worker", 1000.0)
        assert state.status == "starting"
        assert state.detail == f"worker ended and is started again ({number} of {MOST_RESTARTS})"
    assert recent_restarts(state, "worker", 1001.0) == MOST_RESTARTS
    assert recent_restarts(state, "server", 1001.0) == 0
    assert recent_restarts(state, "worker", 1000.0 + RESTARTS_WITHIN_S) == 0


def test_what_a_dead_leader_left_in_its_session_is_found():
    program = (
        "import subprocess, sys; print(subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL).pid, flush=True)"
    )
    leader = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    identity = ProcessId.of(leader.pid)
    left = int(leader.communicate()[0])
    try:
        assert [process.pid for process in session_processes(identity)] == [left]
    finally:
        os.kill(left, signal.SIGKILL)
