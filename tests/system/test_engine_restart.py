"""A generator that dies in the middle of a step: the run goes on by itself, trains every prompt once and ends well."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil
import pytest

from storage.layout import RunLayout
from tasks.accounting import audit

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

Event = Mapping[str, Any]
RUN = "restarted"
DEADLINE_S = 280.0
STEPS, PROMPTS, GENERATIONS = 16, 6, 4
SETTINGS = {
    "algorithm__max_steps": STEPS,
    "algorithm__num_prompts_per_step": PROMPTS,
    "generation__max_num_seqs": 2,  # a step's rollouts take a while
}


def generator_pids(midflight: Any) -> Mapping[str, Any]:
    """`pid` and `engine_pids` of the generator as the trace tells them: those of the start, or of the last restart."""
    facts = [e["pids"] for e in midflight.events(RUN) if e["event"] in ("run_started", "generator_restarted")]
    newest: Mapping[str, Any] = facts[-1]["generators"][0] if "generators" in facts[-1] else facts[-1]
    return newest


def running(events: Sequence[Event]) -> set[str]:
    """Rollouts that were dispatched and have not ended."""
    rollouts: set[str] = set()
    for event in events:
        if event["event"] == "attempt_dispatched":
            rollouts.add(event["rollout_id"])
        elif event["event"] in ("attempt_sealed", "attempt_abandoned"):
            rollouts.discard(event["rollout_id"])
    return rollouts


def kill_in_mid_step(midflight: Any, choose: Callable[[Mapping[str, Any]], int], *, after_step: int) -> int:
    """SIGKILL the process while rollouts run. It is frozen first: what runs then is still running when it dies."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        steps = [e["step"] for e in midflight.events(RUN) if e["event"] == "train_step"]
        if max(steps, default=0) >= after_step:
            victim = psutil.Process(choose(generator_pids(midflight)))
            victim.suspend()
            time.sleep(0.1)  # what it had sent already arrives
            if running(midflight.events(RUN)):
                victim.kill()
                return victim.pid
            victim.resume()
        time.sleep(0.02)
    raise AssertionError(f"the moment to kill never came; last events: {midflight.events(RUN)[-3:]}")


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def restarts(midflight: Any) -> list[Event]:
    return [event for event in midflight.events(RUN) if event["event"] == "generator_restarted"]


def test_scenario_o_a_run_whose_engine_and_then_whose_generator_is_killed_goes_on_and_loses_nothing(
    midflight_home, train_command, wait_until
):
    midflight = midflight_home
    command = midflight.start(*train_command(RUN, SETTINGS))
    engine = kill_in_mid_step(midflight, lambda pids: pids["engine_pids"][0], after_step=2)
    wait_until(lambda: len(restarts(midflight)) == 1 or command.poll() is not None, seconds=DEADLINE_S)
    restarted_at = max((e["step"] for e in midflight.events(RUN) if e["event"] == "train_step"), default=0)
    actor = kill_in_mid_step(midflight, lambda pids: pids["pid"], after_step=restarted_at + 1)
    done = midflight.wait(command)
    assert done.code == 0, done.text

    events = midflight.events(RUN)
    assert len({event["run_process"] for event in events}) == 1, "the controller was never restarted"
    assert [e["step"] for e in events if e["event"] == "train_step"] == list(range(1, STEPS + 1))
    abandoned = [e for e in events if e["event"] == "attempt_abandoned"]
    assert {e["reason"] for e in abandoned} == {"infrastructure"}
    assert all("generator 0 died while it ran" in e["message"] for e in abandoned)
    assert not [e for e in events if e["event"] == "prompt_dropped"]

    first, second = restarts(midflight)
    assert first["pids"]["pid"] == actor
    assert engine not in first["pids"]["engine_pids"]
    assert actor != second["pids"]["pid"]
    for restarted in (first, second):
        before = [e["version"] for e in events if e["event"] == "weight_sync" and e["t"] <= restarted["t"]]
        # A refit that found the engine dead ends after the restart, which has loaded the weights of this refit.
        assert restarted["version"] - before[-1] in (0, 1)

    accounts = audit(midflight.store, RunLayout(RUN))
    assert accounts.problems == []
    assert accounts.pairs_trained == STEPS * PROMPTS * GENERATIONS
    of_the_run = [pid for pids in (first["pids"], second["pids"]) for pid in (pids["pid"], *pids["engine_pids"])]
    wait_until(lambda: not any(map(is_alive, of_the_run)), seconds=20)
