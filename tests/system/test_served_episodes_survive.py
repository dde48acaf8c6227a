"""Real runs whose episodes are held by real environment servers over HTTP, which are killed under them."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from gpu_workers.environments.http_messages import TOKEN_VARIABLE
from gpu_workers.environments.served import served_instances
from storage.errors import ConfigurationError
from storage.layout import RunLayout
from tasks.accounting import audit
from tests.system.test_episodes_survive import SETTINGS, STEPS, in_the_middle_of_episodes
from tests.system.test_survival import effective_hashes, kill_when

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]

TOKEN = "a-token-of-the-test"
PATIENT = {"async_rl__max_infrastructure_failures": 50, "async_rl__retry_backoff_max_s": 0.5}


class Server:
    """One environment server on a port of its own, which can be killed and started again."""

    def __init__(self, instance: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._instance = instance
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, wait_until: Callable[..., None]) -> None:
        program = ["-m", "gpu_workers.environments.http_server", "--port", str(self._port)]
        command = [sys.executable, *program, "--instance", self._instance]
        self._process = subprocess.Popen(command, env=os.environ | {TOKEN_VARIABLE: TOKEN})
        wait_until(self._answers, seconds=60)

    def _answers(self) -> bool:
        try:
            return bool(served_instances([self.url]))
        except ConfigurationError:
            return False

    def kill(self) -> None:
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., None]) -> Iterator[list[Server]]:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    made = [Server("games-0"), Server("games-1")]
    for server in made:
        server.start(wait_until)
    yield made
    for server in made:
        server.kill()


def test_servers_killed_under_a_run_and_with_it_cost_no_turn_that_a_snapshot_holds_and_change_no_rollout(
    new_home, train_command, servers, wait_until
):
    """One server dies alone and comes back; later everything dies. The run ends as one whose servers never died."""
    midflight = new_home()
    settings = {**SETTINGS, **PATIENT, "environment__servers": [server.url for server in servers]}
    token = {TOKEN_VARIABLE: TOKEN}
    whole = midflight.wait(midflight.start(*train_command("served-whole", settings), also=token))
    assert whole.code == 0, whole.text

    command = midflight.start(*train_command("served", settings), also=token)
    midflight.wait_for("served", lambda events: in_the_middle_of_episodes(events))
    servers[0].kill()
    midflight.wait_for("served", lambda events: any(e["event"] == "environment_unreachable" for e in events))
    servers[0].start(wait_until)
    life = kill_when(midflight, "served", back_in_the_middle_of_episodes)
    for server in servers:
        server.kill()
        server.start(wait_until)
    ended = midflight.wait(command)
    assert ended.code == 0, ended.text

    expected = effective_hashes(midflight.events("served-whole"))
    assert sorted(expected) == list(range(1, STEPS + 1))
    events = midflight.events("served")
    assert effective_hashes(events) == expected
    (restored,) = (e for e in events if e["event"] == "checkpoint_restored")
    snapshot = next(e for e in reversed(life) if e["event"] == "snapshot_attempt" and e["outcome"] == "completed")
    assert restored["turns_kept"] == snapshot["finished_turns"] > 0
    assert sum(e["turns"] for e in events if e["event"] == "attempt_resumed") == restored["turns_kept"]
    assert not audit(midflight.store, RunLayout("served")).problems


def back_in_the_middle_of_episodes(events: Sequence[Mapping[str, Any]]) -> bool:
    """Episodes run, some steps after a server was gone."""
    gone = [place for place, event in enumerate(events) if event["event"] == "environment_unreachable"]
    later = events[gone[-1] + 1 :] if gone else []
    return any(e["event"] == "train_step" for e in later) and in_the_middle_of_episodes(events)
