"""A run while it lives: refused to others, snapshotted and verified on request, interrupted, continued.

The tests share one run and go through its life in this order.
"""

import signal
import subprocess
import sys

import pytest

from tests.system.prefect_api import PrefectApi

pytestmark = pytest.mark.system

SETTINGS = {
    "data.num_prompts": 500_000,
    "rollout_checkpointing.interval_s": 3600,
    "checkpointing.save_period": 50,
}
DEPLOYMENT_DEADLINE_S = 120


@pytest.fixture(scope="module")
def live(midflight_home):
    """A `train` command that goes on until it is stopped; its run is named `live`."""
    settings = {**SETTINGS, "algorithm.max_steps": 100_000}
    arguments = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    process = midflight_home.start("train", str(midflight_home.config), "--set", "name=live", *arguments)
    midflight_home.wait_for("live", lambda events: sum(e["event"] == "train_step" for e in events) > 2)
    yield process
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        midflight_home.wait(process)


def steps(midflight):
    return max(event["step"] for event in midflight.events("live") if event["event"] == "train_step")


def run_deployment(midflight, name, *parameters):
    """A deployment run from outside, as a schedule or a person would do it; its exit code."""
    options = [part for parameter in parameters for part in ("--param", parameter)]
    return subprocess.run(
        [sys.executable, "-m", "prefect", "deployment", "run", name, *options, "--watch"],
        env={**midflight.environment(), **midflight.state().environment(midflight.home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEPLOYMENT_DEADLINE_S,
        check=False,
    )


def test_a_second_driver_is_refused_by_the_name_of_the_first_and_disturbs_nothing(midflight_home, live):
    refused = midflight_home.train("live")
    assert refused.code == 1, refused.text
    assert "RunAlreadyLive" in refused.text
    assert "train-live (flow run " in refused.text
    before = steps(midflight_home)
    midflight_home.wait_for("live", lambda _: steps(midflight_home) > before)
    assert len({event["run_process"] for event in midflight_home.events("live")}) == 1


def test_a_snapshot_is_taken_on_request(midflight_home, live):
    done = run_deployment(midflight_home, "snapshot/snapshot", "run=live")
    assert done.returncode == 0, done.stdout + done.stderr
    attempts = [e for e in midflight_home.events("live") if e["event"] == "snapshot_attempt"]
    assert [attempt["outcome"] for attempt in attempts][-1:] in (["completed"], ["skipped"])


def test_a_killed_flow_process_is_started_again_by_itself_and_finds_the_same_runtime(midflight_home, live, wait_until):
    prefect = PrefectApi(midflight_home.state().prefect_api_url)
    train = prefect.flow_runs("train-live")[-1]["id"]
    for process in midflight_home.processes_of("live").flows:
        process.kill()
    wait_until(lambda: trained_by_try(prefect, train, 2), seconds=DEPLOYMENT_DEADLINE_S)
    assert prefect.state(train) == "Running"
    assert live.poll() is None
    assert len({event["run_process"] for event in midflight_home.events("live")}) == 1


def trained_by_try(prefect, flow_run_id, number):
    """Whether this try of a flow run has trained steps."""
    return any(
        task_run["name"].startswith("train-steps-") and task_run["state_name"] == "Completed"
        for task_run in prefect.task_runs(flow_run_id)
        if task_run["flow_run_run_count"] == number
    )


def test_a_trainer_checkpoint_is_saved_on_request(midflight_home, live):
    done = midflight_home.run("checkpoint", "live")
    assert done.code == 0, done.text
    assert "durable" in done.text
    by_flow = run_deployment(midflight_home, "checkpoint/checkpoint", "run=live")
    assert by_flow.returncode == 0, by_flow.stdout + by_flow.stderr
    requested = [e for e in midflight_home.events("live") if e.get("trigger") == "request"]
    assert {e["event"] for e in requested} == {"checkpoint_published"}


def test_a_live_run_can_be_verified(midflight_home, live):
    done = run_deployment(midflight_home, "verify/verify", "run=live")
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_interrupted_run_publishes_and_can_be_continued(midflight_home, live):
    live.send_signal(signal.SIGINT)
    interrupted = midflight_home.wait(live)
    assert interrupted.code == 130, interrupted.text
    assert "Cancelling" in interrupted.text
    last = steps(midflight_home)
    continued = midflight_home.train("live", algorithm__max_steps=last + 20, data__num_prompts=500_000)
    assert continued.code == 0, continued.text
    assert steps(midflight_home) == last + 20
