"""The train-step task fails at each side of the optimizer-commit window of a real run: every step is trained once.

Steps are streamed, so that the failure before the window meets a step that has claimed and accumulated something.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flows.config_files import load_config
from storage.layout import RunLayout
from storage.trace_analysis import batch_age
from tasks.accounting import audit

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

PROGRAM = Path(__file__).with_name("faulty_run.py")
STEPS, PROMPTS, GENERATIONS = 6, 6, 4
SETTINGS = {
    "name": "retried",
    "algorithm.max_steps": STEPS,
    "algorithm.num_prompts_per_step": PROMPTS,
    "algorithm.microbatch_rows": GENERATIONS,  # a call for each group
    "async_rl.min_groups_for_streaming_train": 2,
    "generation.max_num_seqs": 1,  # a step is asked for long before its last group is finished
}


@pytest.fixture(scope="module")
def told(midflight_home: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The whole faulty run, and what its runtime saw."""
    folder = tmp_path_factory.mktemp("faulty")
    store = f"store.url={midflight_home.home.store}"
    config = load_config(midflight_home.config, [store, *(f"{key}={value}" for key, value in SETTINGS.items())])
    (folder / "config.json").write_text(config.model_dump_json())
    done = subprocess.run(
        [sys.executable, PROGRAM, midflight_home.home.root, folder / "config.json", folder / "told.json"],
        env=midflight_home.environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((folder / "told.json").read_text())
    return found


def steps_of(midflight: Any) -> list[dict[str, Any]]:
    return [event for event in midflight.events("retried") if event["event"] == "train_step"]


def test_scenario_67_the_task_failed_at_each_side_of_the_window_and_every_step_was_committed_once(midflight_home, told):
    assert told["steps"] == STEPS
    before, after, reply = told["errors"]
    assert ("before the window" in before, "after the window" in after, "reply was lost" in reply) == (True,) * 3
    assert len(told["asked"]) >= 4, "the first step, and three tries again"
    trained = steps_of(midflight_home)
    assert [event["step"] for event in trained] == list(range(1, STEPS + 1))
    assert len({event["weights_sha256"] for event in trained}) == STEPS
    assert len({event["run_process"] for event in midflight_home.events("retried")}) == 1, "nothing was restarted"


def test_scenario_67_a_retry_after_the_window_returns_the_recorded_reports(midflight_home, told):
    recorded = {event["step"]: event for event in steps_of(midflight_home)}
    assert [r["step"] for r in told["lost"]] == [r["step"] for r in told["again"]]
    assert told["again"][-1]["step"] == STEPS
    for lost, again in zip(told["lost"], told["again"], strict=True):
        event = recorded[again["step"]]
        same = event.keys() & again.keys()
        assert {"group_ids", "rollouts_sha256", "weights_sha256", "metrics", "seconds"} <= same
        assert {k: again[k] for k in same} == {k: lost[k] for k in same} == {k: event[k] for k in same}


def test_after_these_failures_the_audit_finds_nothing_wrong(midflight_home, told):
    accounts = audit(midflight_home.store, RunLayout("retried"))
    assert not accounts.problems
    assert accounts.pairs_trained == STEPS * PROMPTS * GENERATIONS


def test_the_steps_were_streamed_and_their_batch_age_is_that_of_their_tokens(midflight_home, told):
    trained = steps_of(midflight_home)
    assert {sum(event["chunks"]) for event in trained} == {PROMPTS}
    assert max(len(event["chunks"]) for event in trained) > 1
    found = {age.step: age.batch_age for age in batch_age(midflight_home.events("retried"))}
    for event in trained:
        assert found[event["step"]] == pytest.approx(event["batch_age"], abs=1e-12)
    assert max(found.values()) > 0, "with a lookahead some tokens are older than the weights they train"
