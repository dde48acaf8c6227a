"""Services that die under a run: Prefect's server and worker cost nothing, the Ray cluster what was not published.

They are started again where they were, and the run goes on to its end by itself.
"""

import os
import signal
from contextlib import suppress

import httpx
import psutil
import pytest

from flows.processes import ProcessId, session_processes
from storage.layout import RunLayout
from tasks.accounting import audit

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]

STEPS, PROMPTS, GENERATIONS = 100, 8, 4
STARTS_WITHIN_S, RESTARTS_WITHIN_S = 500, 240
SETTINGS = {
    "algorithm__max_steps": STEPS,
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


def flow_runs(midflight):
    """State and number of tries of each `train` flow run."""
    url = f"{midflight.state().prefect_api_url}/flow_runs/filter"
    found = httpx.post(url, json={"flow_runs": {"name": {"any_": ["train-served"]}}}).raise_for_status().json()
    return [(run["state_type"], run["run_count"]) for run in found]


def test_a_run_goes_on_while_its_services_die_and_are_started_again(new_home, train_command, wait_until):
    midflight = new_home()
    assert midflight.run("up").code == 0
    command = midflight.start(*train_command("served", SETTINGS))
    wait_until(lambda: steps(midflight) >= 2, seconds=STARTS_WITHIN_S)
    before = midflight.state()

    server = service(midflight, "prefect-server")
    os.kill(server.pid, signal.SIGKILL)
    trained = steps(midflight)
    wait_until(lambda: runs_again(midflight, "prefect-server", server), seconds=RESTARTS_WITHIN_S)
    assert steps(midflight) > trained
    worker = service(midflight, "prefect-worker")
    os.kill(worker.pid, signal.SIGKILL)
    wait_until(lambda: runs_again(midflight, "prefect-worker", worker), seconds=RESTARTS_WITHIN_S)
    trained = steps(midflight)
    wait_until(lambda: steps(midflight) > trained + 1, seconds=RESTARTS_WITHIN_S)
    assert flow_runs(midflight) == [("RUNNING", 1)]
    assert len(lives(midflight)) == 1

    head = service(midflight, "ray-head")
    for process in session_processes(head):
        with suppress(psutil.NoSuchProcess):  # it may have died of the one before
            process.kill()
    done = midflight.wait(command)
    assert done.code == 0, done.text
    assert flow_runs(midflight) == [("COMPLETED", 2)]
    assert len(lives(midflight)) == 2
    after = midflight.state()
    assert (after.prefect_api_url, after.ray_address) == (before.prefect_api_url, before.ray_address)
    told = (midflight.home.logs / "supervisor.log").read_text()
    assert all(f"{name} runs again" in told for name in ("prefect-server", "prefect-worker", "ray-head"))
    accounts = audit(midflight.store, RunLayout("served"))
    assert not accounts.problems
    assert accounts.pairs_trained == STEPS * PROMPTS * GENERATIONS
