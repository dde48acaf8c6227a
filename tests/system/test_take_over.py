"""Two `train` of one run, as real processes: one holds it, the other is refused by name or takes it over.

Within a cluster the living controller changes its driver. From another cluster that shares the store the run is claimed
in the log, and the first controller, stopped by SIGSTOP meanwhile, finds itself fenced when it goes on.
"""

import signal
import subprocess
from collections.abc import Callable, Iterator

import httpx
import psutil
import pytest

from storage.layout import RunLayout
from storage.manifests import Manifest, read_log
from tasks.accounting import audit

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]

PROMPTS, GENERATIONS = 6, 4
SETTINGS = {
    "algorithm__num_prompts_per_step": PROMPTS,
    "data__num_prompts": 500_000,
    "generation__max_num_seqs": 2,  # a step takes a while
    "rollout_checkpointing__interval_s": 0.5,
    "checkpointing__save_period": 3,
}
ENDLESS = {**SETTINGS, "algorithm__max_steps": 50_000}
STARTS_WITHIN_S, ENDS_WITHIN_S = 500, 90


def steps(midflight, run):
    return max((int(e["step"]) for e in midflight.events(run) if e["event"] == "train_step"), default=0)


def lives(midflight, run):
    return list(dict.fromkeys(e["run_process"] for e in midflight.events(run)))


def assert_nothing_was_lost_or_trained_twice(midflight, run, *, trained):
    accounts = audit(midflight.store, RunLayout(run))
    assert not accounts.problems
    assert accounts.pairs_trained == trained * PROMPTS * GENERATIONS


@pytest.fixture
def in_background(midflight_home) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts commands of the shared home; those that still run are interrupted afterwards."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments):
        started.append(midflight_home.start(*arguments))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.terminate()
            process.communicate()


def flow_runs(midflight, run):
    """The states of a run's `train` flow runs, oldest first."""
    wanted = {"flow_runs": {"name": {"any_": [f"train-{run}"]}}, "sort": "EXPECTED_START_TIME_ASC"}
    url = f"{midflight.state().prefect_api_url}/flow_runs/filter"
    return [found["state_type"] for found in httpx.post(url, json=wanted).raise_for_status().json()]


def test_a_second_train_takes_the_living_controller_over(midflight_home, train_command, in_background, wait_until):
    first = in_background(*train_command("handed-over", ENDLESS))
    wait_until(lambda: steps(midflight_home, "handed-over") >= 2, seconds=STARTS_WITHIN_S)
    refused = midflight_home.run(*train_command("handed-over", ENDLESS))
    assert refused.code == 1
    assert "RunAlreadyLive" in refused.text
    assert "--take-over" in refused.text

    second = in_background(*train_command("handed-over", ENDLESS), "--take-over")
    sent_away = midflight_home.wait(first)
    assert sent_away.code == 1, sent_away.text
    assert "no longer by train-handed-over" in sent_away.text
    reached = steps(midflight_home, "handed-over")
    wait_until(lambda: steps(midflight_home, "handed-over") >= reached + 3, seconds=ENDS_WITHIN_S)
    second.send_signal(signal.SIGINT)
    assert midflight_home.wait(second).code == 130

    assert len(lives(midflight_home, "handed-over")) == 1
    assert flow_runs(midflight_home, "handed-over") == ["FAILED", "CANCELLED"]
    trained = steps(midflight_home, "handed-over")
    assert_nothing_was_lost_or_trained_twice(midflight_home, "handed-over", trained=trained)


def test_a_paused_controller_that_was_taken_over_publishes_nothing_more_says_so_and_stops(
    midflight_home, new_home, train_command, in_background, wait_until
):
    settings = {**ENDLESS, "store__url": str(midflight_home.home.store)}
    first = in_background(*train_command("fenced", settings))
    wait_until(lambda: steps(midflight_home, "fenced") >= 4, seconds=STARTS_WITHIN_S)
    elsewhere = new_home("elsewhere")
    refused = elsewhere.run(*train_command("fenced", settings))
    assert refused.code == 1, refused.text
    assert "held by controller" in refused.text
    assert "train-fenced (flow run" in refused.text

    processes = midflight_home.processes_of("fenced")
    processes.controller.suspend()
    last = steps(midflight_home, "fenced") + 4
    try:
        taken_over = elsewhere.run(*train_command("fenced", {**settings, "algorithm__max_steps": last}), "--take-over")
    finally:
        processes.controller.resume()
    assert taken_over.code == 0, taken_over.text

    fenced = midflight_home.wait(first)
    assert fenced.code == 1, fenced.text
    assert "Fenced" in fenced.text
    assert "publishes nothing more" in fenced.text
    _, alive = psutil.wait_procs(processes.all, timeout=ENDS_WITHIN_S)
    assert not alive

    old, new = lives(midflight_home, "fenced")
    of_the_old = [e for e in midflight_home.events("fenced") if e["run_process"] == old]
    assert [e["event"] for e in of_the_old if e["event"] in ("fenced", "run_ended")] == ["fenced", "run_ended"]
    writers = [
        slot.writer for slot in read_log(midflight_home.store, RunLayout("fenced")) if isinstance(slot, Manifest)
    ]
    assert list(dict.fromkeys(writers)) == [old, new]
    assert writers == sorted(writers, key=[old, new].index)
    assert flow_runs(midflight_home, "fenced") == ["FAILED"]
    assert_nothing_was_lost_or_trained_twice(midflight_home, "fenced", trained=last)
