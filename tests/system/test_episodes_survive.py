"""A real multi-turn run that is killed in the middle of its episodes goes on at the turns it had, bit for bit.

The run is synchronous, so that it is a function of its seed: rollouts and weights have the hashes of the uninterrupted
run. Two sequences at a time keep episodes at all of their turns.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from flows.processes import free_port
from gpu_workers.environments.http_messages import TOKEN_VARIABLE
from gpu_workers.environments.served import served_instances
from storage.errors import ConfigurationError
from storage.layout import RunLayout
from tasks.accounting import audit
from tests.system.conftest import ENVIRONMENT_TOKEN, train_arguments
from tests.system.test_survival import effective_hashes, kill_when

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]

STEPS, PROMPTS, GENERATIONS, TURNS = 10, 4, 4, 6
SETTINGS = {
    "data__task": f"running_sum?turns={TURNS}",
    "algorithm__max_steps": STEPS,
    "algorithm__num_prompts_per_step": PROMPTS,
    "async_rl__max_lookahead_versions": 0,
    "generation__max_new_tokens": 4,
    "generation__max_model_len": 64,
    "generation__max_num_seqs": 2,
    "checkpointing__save_period": 2,
    "rollout_checkpointing__interval_s": 0.1,
    "rollout_recovery__target_level": "turn",
}


PATIENT = {"async_rl__max_infrastructure_failures": 500, "async_rl__retry_backoff_max_s": 0.5}


class Server:
    """One environment server on a port of its own, which can be killed and started again."""

    def __init__(self, instance: str) -> None:
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._instance = instance
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, wait_until: Callable[..., None]) -> None:
        program = ["-m", "gpu_workers.environments.http_server", "--port", str(self._port)]
        command = [sys.executable, *program, "--instance", self._instance]
        self._process = subprocess.Popen(command, env=os.environ | {TOKEN_VARIABLE: ENVIRONMENT_TOKEN})
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
    monkeypatch.setenv(TOKEN_VARIABLE, ENVIRONMENT_TOKEN)
    made = [Server("games-0"), Server("games-1")]
    for server in made:
        server.start(wait_until)
    yield made
    for server in made:
        server.kill()


def in_the_middle_of_episodes(events: Sequence[Mapping[str, Any]]) -> bool:
    """The newest snapshot holds finished turns of running episodes, and no step was trained since."""
    steps = [int(e["step"]) for e in events if e["event"] == "train_step"]
    taken = [e for e in events if e["event"] == "snapshot_attempt" and e["outcome"] == "completed"]
    if not taken or not steps:
        return False
    newest = taken[-1]
    return int(newest["step"]) >= max(steps) >= 2 and int(newest["finished_turns"]) >= TURNS


@pytest.fixture(scope="module")
def expected(midflight_home: Any) -> dict[int, tuple[str, str]]:
    """Rollout and weight hashes by step of the run that is never stopped."""
    whole = midflight_home.run(*train_arguments("episodes-whole", SETTINGS))
    assert whole.code == 0, whole.text
    hashes = effective_hashes(midflight_home.events("episodes-whole"))
    assert sorted(hashes) == list(range(1, STEPS + 1))
    return hashes


def test_a_run_killed_in_the_middle_of_its_episodes_keeps_their_turns_and_ends_as_if_it_never_was(
    midflight_home, train_command, expected
):
    midflight = midflight_home
    command = midflight.start(*train_command("episodes-killed", SETTINGS))
    life = kill_when(midflight, "episodes-killed", in_the_middle_of_episodes)
    killed = midflight.wait(command)
    assert killed.code == 0, killed.text

    assert effective_hashes(midflight.events("episodes-killed")) == expected
    events = midflight.events("episodes-killed")
    snapshot = next(e for e in reversed(life) if e["event"] == "snapshot_attempt" and e["outcome"] == "completed")
    (restored,) = (e for e in events if e["event"] == "checkpoint_restored")
    assert restored["sequence"] == snapshot["sequence"]
    assert restored["turns_kept"] == snapshot["finished_turns"] >= TURNS
    resumed = [e for e in events if e["event"] == "attempt_resumed"]
    assert sum(e["turns"] for e in resumed) == restored["turns_kept"]
    assert {e["environment_attempt"] - e["attempt"] for e in resumed} == {1}
    accounts = audit(midflight.store, RunLayout("episodes-killed"))
    assert not accounts.problems
    assert accounts.pairs_trained == STEPS * PROMPTS * GENERATIONS
    verified = midflight.run("verify", "episodes-killed", "--drill")
    assert verified.code == 0, verified.text


def test_servers_killed_under_a_run_and_with_it_cost_no_turn_that_a_snapshot_holds_and_change_no_rollout(
    midflight_home, train_command, expected, servers, wait_until
):
    """One server dies alone and comes back; later everything dies. The run ends like the one whose generators hold the
    episodes, and which is never stopped.
    """
    midflight = midflight_home
    settings = {**SETTINGS, **PATIENT, "environment__servers": [server.url for server in servers]}
    command = midflight.start(*train_command("served", settings), also={TOKEN_VARIABLE: ENVIRONMENT_TOKEN})
    midflight.wait_for("served", happened("attempt_sealed"))
    servers[0].kill()  # the first step can't be filled without it
    midflight.wait_for("served", happened("environment_unreachable"))
    servers[0].start(wait_until)
    life = kill_when(midflight, "served", in_the_middle_of_episodes, lives_before=frozenset())
    for server in servers:
        server.kill()
        server.start(wait_until)
    ended = midflight.wait(command)
    assert ended.code == 0, ended.text

    events = midflight.events("served")
    assert effective_hashes(events) == expected
    (restored,) = (e for e in events if e["event"] == "checkpoint_restored")
    snapshot = next(e for e in reversed(life) if e["event"] == "snapshot_attempt" and e["outcome"] == "completed")
    assert restored["turns_kept"] == snapshot["finished_turns"] > 0
    assert sum(e["turns"] for e in events if e["event"] == "attempt_resumed") == restored["turns_kept"]
    assert not audit(midflight.store, RunLayout("served")).problems


def happened(event: str) -> Callable[[Sequence[Mapping[str, Any]]], bool]:
    """Whether a trace has the event."""
    return lambda events: any(e["event"] == event for e in events)
