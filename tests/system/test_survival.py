"""Real Prefect, Ray, vLLM, torch and files: a run that is killed again and again goes on by itself, and ends like one
that never was. It recovers at level `prefix`: running responses go on from their tokens.

The run is synchronous (lookahead 0), so that it is a function of its seed: after every restore rollouts and weights
have the hashes of the uninterrupted run, bit for bit. Trainer checkpoints are rarer than steps, so that batches trained
since the last one are trained again.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import psutil
import pytest

from storage.catalog import live_bundles
from storage.layout import RunLayout
from storage.manifests import read_log
from tasks.accounting import audit

pytestmark = [pytest.mark.system, pytest.mark.timeout(1500)]

Event = Mapping[str, Any]
DEADLINE_S = 240.0
STEPS, PROMPTS, GENERATIONS, SAVE_PERIOD = 20, 6, 4, 5
# Two sequences at a time: a group's siblings are sealed one after the other, and a step's rollouts take a while.
SETTINGS = {
    "algorithm__max_steps": STEPS,
    "algorithm__num_prompts_per_step": PROMPTS,
    "async_rl__max_lookahead_versions": 0,
    "generation__max_num_seqs": 2,
    "checkpointing__save_period": SAVE_PERIOD,
    "rollout_checkpointing__interval_s": 0.2,
    "rollout_recovery__target_level": "prefix",
}


def kill_when(
    midflight: Any, run: str, moment: Callable[[Sequence[Event]], bool], *, lives_before: frozenset[str] | None = None
) -> list[Event]:
    """SIGKILL the run's processes at the moment that the newest life's trace shows; returns that life's trace.

    It is the one after those of `lives_before`; None: after those that there have been.

    The controller is frozen first. Only when nothing was published since, by the trace and by the store, is it the
    moment; otherwise the controller goes on, and the next such moment is waited for.
    """
    if lives_before is None:
        lives_before = frozenset(event["run_process"] for event in midflight.events(run))
    this_life: list[Event] = []
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        this_life = [e for e in midflight.events(run) if e["run_process"] not in lives_before]
        if moment(this_life):
            controller = controller_of(this_life)
            controller.suspend()  # before all that takes time: looking for the other processes does
            this_life = [e for e in midflight.events(run) if e["run_process"] not in lives_before]
            if moment(this_life) and newest_published(this_life) >= newest_in_store(midflight, run):
                processes = midflight.processes_of(run)
                if processes.flows:
                    for process in processes.all:
                        with suppress(psutil.NoSuchProcess):  # it may have died of the one before
                            process.kill()
                    return this_life
            controller.resume()
        time.sleep(0.01)
    raise AssertionError(f"the moment to kill never came; last events: {this_life[-3:]}")


def controller_of(life: Sequence[Event]) -> psutil.Process:
    """The controller that writes this life's trace."""
    return psutil.Process(next(e["pids"]["controller"] for e in life if e["event"] == "run_started"))


def newest_published(events: Sequence[Event]) -> int:
    """The sequence of the newest bundle that a trace tells of; 0 if none."""
    return max((int(e["sequence"]) for e in events if e.get("sequence") is not None), default=0)


def newest_in_store(midflight: Any, run: str) -> int:
    """The sequence of the newest bundle in the store; 0 if none."""
    checkpoints, snapshots = live_bundles(read_log(midflight.store, RunLayout(run)))
    return max((bundle.sequence for bundle in (*checkpoints, *snapshots)), default=0)


def snapshot_with_sealed_siblings(*, step: int, recorded: int = 0) -> Callable[[Sequence[Event]], bool]:
    """A snapshot from train step `step` on, just published. Its unfinished groups hold sealed siblings, others run;
    it holds the batches of at least `recorded` steps.
    """

    def moment(events: Sequence[Event]) -> bool:
        steps = [int(e["step"]) for e in events if e["event"] == "train_step"]
        newest = next((e for e in reversed(events) if e["event"] == "snapshot_attempt"), None)
        return (
            newest is not None
            and newest["outcome"] == "completed"
            and int(newest["step"]) >= step
            and int(newest["step"]) >= max(steps, default=0)
            and int(newest["recorded_steps"]) >= recorded
            and int(newest["sealed_siblings"]) > 0
            and int(newest["running_attempts"]) > 0
            and int(newest["partial_tokens"]) > 0
        )

    return moment


def checkpointing(events: Sequence[Event]) -> bool:
    """A step is committed at which a trainer checkpoint is due; it is being written."""
    return any(e["event"] == "train_step" and int(e["step"]) % SAVE_PERIOD == 0 for e in events)


def replaying(events: Sequence[Event]) -> bool:
    """A recorded batch was just trained again; others may follow."""
    return any(e["event"] == "train_step" and e["replayed"] for e in events)


def restored(events: Sequence[Event]) -> bool:
    """The restore chain has just ended; no step was trained since."""
    return any(e["event"] == "checkpoint_restored" for e in events)


def effective_hashes(events: Sequence[Event]) -> dict[int, tuple[str, str]]:
    """Rollout and weight hashes by step; of a step that was rolled back and trained again, the last ones."""
    trained = [event for event in events if event["event"] == "train_step"]
    return {int(e["step"]): (e["rollouts_sha256"], e["weights_sha256"]) for e in trained}


def test_a_run_killed_five_times_is_bitwise_the_run_that_was_never_stopped(midflight_home, train_command):
    midflight = midflight_home
    whole = midflight.run(*train_command("whole", SETTINGS))
    assert whole.code == 0, whole.text

    moments = [
        snapshot_with_sealed_siblings(step=0),  # before the first step: restored onto the initial model
        snapshot_with_sealed_siblings(step=2, recorded=2),  # whose batches are trained again
        replaying,  # while they are
        checkpointing,
        restored,  # again, before any step
    ]
    command = midflight.start(*train_command("killed", SETTINGS))
    frozen = [kill_when(midflight, "killed", moment) for moment in moments]
    last = midflight.wait(command)
    assert last.code == 0, last.text
    assert last.text.count("train-killed crashed and goes on") == len(moments)

    expected = effective_hashes(midflight.events("whole"))
    assert sorted(expected) == list(range(1, STEPS + 1))
    assert effective_hashes(midflight.events("killed")) == expected

    restores = [e for e in midflight.events("killed") if e["event"] == "checkpoint_restored"]
    assert len(restores) == 5
    assert int(restores[1]["steps_to_replay"]) >= 2
    for life, restore in zip(frozen[:2], restores[:2], strict=True):
        snapshot = next(e for e in reversed(life) if e["event"] == "snapshot_attempt" and e["outcome"] == "completed")
        assert 0 < int(snapshot["sealed_siblings"]) == int(restore["siblings_reused"])
        assert 0 < int(snapshot["partial_tokens"]) == int(restore["tokens_continued"])
    accounts = audit(midflight.store, RunLayout("killed"))
    assert not accounts.problems
    assert accounts.steps_rolled_back >= 2
    assert accounts.pairs_trained == STEPS * PROMPTS * GENERATIONS
