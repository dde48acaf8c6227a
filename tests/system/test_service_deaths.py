"""Services that die under a run: the Prefect server costs nothing, the Ray cluster what was not published."""

import os
import signal

import pytest

from flows.processes import ProcessId, session_processes
from storage.layout import RunLayout
from tasks.accounting import audit

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]

STEPS, PROMPTS, GENERATIONS = 60, 8, 4
STARTS_WITHIN_S, RESTARTS_WITHIN_S = 500, 240
SETTINGS = {
    "algorithm__num_prompts_per_step": PROMPTS,
    "data__num_prompts": 500_000,
    "generation__max_num_seqs": 2,  # a step takes a while
    "rollout_checkpointing__interval_s": 0.5,
    "checkpointing__save_period": 5,
}


def steps(midflight):
    return max((int(e["step"]) for e in midflight.events("served") if e["event"] == "train_step"), default=0)


def lives(midflight):
    return list(dict.fromkeys(e["run_process"] for e in midflight.events("served")))


def service(midflight, name):
    return ProcessId.from_json(midflight.state().processes[name])


def runs_again(midflight, name, dead):
    state = midflight.state()
    return state.status == "ready" and state.processes[name]["pid"] != dead.pid


def test_dead_services_are_started_again_and_the_run_goes_on(new_home, train_command, wait_until):
    midflight = new_home()
    assert midflight.run("up").code == 0
    _a_dead_prefect_server_costs_nothing(midflight, train_command, wait_until)
    _a_dead_ray_cluster_costs_what_was_not_published(midflight, train_command, wait_until)


def _a_dead_prefect_server_costs_nothing(midflight, train_command, wait_until):
    command = midflight.start(*train_command("served", {**SETTINGS, "algorithm__max_steps": STEPS}))
    wait_until(lambda: steps(midflight) >= 2, seconds=STARTS_WITHIN_S)
    url, server = midflight.state().prefect_api_url, service(midflight, "prefect-server")
    os.kill(server.pid, signal.SIGKILL)
    before = steps(midflight)
    wait_until(lambda: runs_again(midflight, "prefect-server", server), seconds=RESTARTS_WITHIN_S)
    assert steps(midflight) > before
    assert midflight.state().prefect_api_url == url

    done = midflight.wait(command)
    assert done.code == 0, done.text
    assert "Prefect answers again" in done.text
    assert len(lives(midflight)) == 1
    assert steps(midflight) == STEPS


def _a_dead_ray_cluster_costs_what_was_not_published(midflight, train_command, wait_until):
    command = midflight.start(*train_command("served", {**SETTINGS, "algorithm__max_steps": 50_000}))
    wait_until(lambda: steps(midflight) >= STEPS + 6, seconds=STARTS_WITHIN_S)
    address, head = midflight.state().ray_address, service(midflight, "ray-head")
    for process in session_processes(head):
        process.kill()
    killed = midflight.wait(command)
    assert killed.code == 1, killed.text
    wait_until(lambda: runs_again(midflight, "ray-head", head), seconds=RESTARTS_WITHIN_S)
    assert midflight.state().ray_address == address
    assert "ray-head runs again" in (midflight.home.logs / "supervisor.log").read_text()

    last = steps(midflight) + 4
    restored = midflight.train("served", **{**SETTINGS, "algorithm__max_steps": last})
    assert restored.code == 0, restored.text
    assert len(lives(midflight)) == 3
    accounts = audit(midflight.store, RunLayout("served"))
    assert not accounts.problems
    assert accounts.pairs_trained == last * PROMPTS * GENERATIONS
