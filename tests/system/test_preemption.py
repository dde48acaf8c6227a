"""A run is told to leave: by SIGTERM to its controller, by a cancel in Prefect, by SIGTERM (twice) to its flow process.

Each time it publishes what is in flight and ends within its grace, and the next `train` reuses what was published.
"""

import time

import httpx
import psutil
import pytest

from storage.layout import RunLayout
from tasks.accounting import audit

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]

STEPS, PROMPTS, GENERATIONS = 30, 6, 4
SETTINGS = {
    "cluster__max_resumes": 0,  # the tests look at how it ends
    "algorithm__max_steps": STEPS,
    "algorithm__num_prompts_per_step": PROMPTS,
    "data__num_prompts": STEPS * PROMPTS + 100,
    "generation__max_num_seqs": 2,  # siblings are sealed one after the other
    "rollout_checkpointing__interval_s": 3600,  # only what is asked for
    "checkpointing__save_period": 1,
    "cluster__grace_s": 20,
}
ENDS_WITHIN_S = 60


def flow_run_of(midflight):
    """The id of the `train` flow run that is running."""
    running = {"flow_runs": {"name": {"any_": ["train-left"]}, "state": {"type": {"any_": ["RUNNING"]}}}}
    found = httpx.post(f"{midflight.state().prefect_api_url}/flow_runs/filter", json=running)
    (run,) = found.raise_for_status().json()
    return run["id"]


def flow_process_of(midflight):
    """The process of that flow run; those of its child runs live beside it for a while."""
    run = flow_run_of(midflight)
    flows = midflight.processes_of("left").flows
    return next(process for process in flows if process.environ().get("PREFECT__FLOW_RUN_ID") == run)


def cancel_in_prefect(midflight):
    """What the UI's button does."""
    state = {"state": {"type": "CANCELLING", "name": "Cancelling"}}
    url = f"{midflight.state().prefect_api_url}/flow_runs/{flow_run_of(midflight)}/set_state"
    httpx.post(url, json=state).raise_for_status()


def in_the_middle_of_a_step(events):
    """Siblings of the next step were sealed after the newest step was trained."""
    trained = [n for n, e in enumerate(events) if e["event"] == "train_step"]
    after = events[trained[-1] + 1 :] if trained else []
    return sum(e["event"] == "attempt_sealed" for e in after) >= 2


def tell_to_leave(midflight, command, notice):
    """Give notice in the middle of a step; the newest life's events once everything of the run has ended."""
    lives = {event["run_process"] for event in midflight.events("left")}
    midflight.wait_for(
        "left", lambda events: in_the_middle_of_a_step([e for e in events if e["run_process"] not in lives])
    )
    processes = midflight.processes_of("left").all
    notice()
    ended = midflight.wait(command)
    assert ended.code != 0, ended.text
    gone, alive = psutil.wait_procs(processes, timeout=ENDS_WITHIN_S)
    assert not alive, alive
    assert gone
    return [e for e in midflight.events("left") if e["run_process"] not in lives]


def test_a_run_that_is_told_to_leave_publishes_ends_and_is_continued(midflight_home, train_command):
    midflight = midflight_home

    def twice():
        process = flow_process_of(midflight)
        process.terminate()
        time.sleep(0.05)
        if process.is_running():
            process.terminate()

    notices = {
        "controller": lambda: midflight.processes_of("left").controller.terminate(),
        "cancel": lambda: cancel_in_prefect(midflight),
        "flow": lambda: flow_process_of(midflight).terminate(),
    }
    published = []
    for name, notice in notices.items():
        command = midflight.start(*train_command("left", SETTINGS))
        life = tell_to_leave(midflight, command, notice)
        ended = [e for e in life if e["event"] == "run_ended"]
        assert len(ended) == 1, (name, life[-3:])
        assert "preempted" in ended[0]["reason"], ended
        snapshots = [e for e in life if e["event"] == "snapshot_attempt" and e["outcome"] == "completed"]
        assert len(snapshots) == 1, (name, snapshots)  # no other snapshot was asked for
        published.append(snapshots[0])

    command = midflight.start(*train_command("left", SETTINGS))
    lives = {event["run_process"] for event in midflight.events("left")}
    midflight.wait_for("left", lambda es: in_the_middle_of_a_step([e for e in es if e["run_process"] not in lives]))
    twice()
    assert midflight.wait(command).code != 0

    done = midflight.run(*train_command("left", SETTINGS))
    assert done.code == 0, done.text
    restored = [e for e in midflight.events("left") if e["event"] == "checkpoint_restored"]
    for snapshot, restore in zip(published, restored, strict=False):
        assert restore["sequence"] == snapshot["sequence"]
        assert restore["siblings_reused"] == snapshot["sealed_siblings"]
    accounts = audit(midflight.store, RunLayout("left"))
    assert not accounts.problems
    assert accounts.pairs_trained == STEPS * PROMPTS * GENERATIONS
