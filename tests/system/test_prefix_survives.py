"""Recovery level `prefix` with real Prefect, Ray, vLLM, torch and files: a response that is interrupted twice, and one
whose engine dies, go on from their tokens, and the run ends like one that was never stopped, bit for bit.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import pytest

from storage.layout import RunLayout
from storage.manifests import Manifest, read_log
from storage.snapshot_reader import read_bundle
from tasks.accounting import audit
from tests.system.test_survival import effective_hashes, kill_when

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

Event = Mapping[str, Any]
STEPS, PROMPTS, GENERATIONS = 3, 4, 4
# An untrained model rarely ends its response, and two sequences at a time take long: a kill finds many that run.
SETTINGS = {
    "algorithm__max_steps": STEPS,
    "algorithm__num_prompts_per_step": PROMPTS,
    "algorithm__num_generations_per_prompt": GENERATIONS,
    "async_rl__max_lookahead_versions": 0,
    "policy__warm_start_steps": 0,
    "generation__max_num_seqs": 2,
    "generation__top_p": 0.5,
    "generation__max_new_tokens": 400,
    "generation__max_model_len": 512,
    "checkpointing__save_period": 2,
    "rollout_checkpointing__interval_s": 0.1,
    "rollout_recovery__target_level": "prefix",
    "rollout_recovery__peek_interval_s": 0.1,
}


def saved_tokens(midflight: Any, run: str, sequence: int) -> dict[str, int]:
    """Of each running call in a bundle the number of its tokens, by rollout."""
    layout = RunLayout(run)
    (manifest,) = (
        slot for slot in read_log(midflight.store, layout) if isinstance(slot, Manifest) and slot.sequence == sequence
    )
    return {c.rollout_id: c.num_tokens for c in read_bundle(midflight.store, layout, manifest).state.partial_calls}


def newest_snapshot(events: Sequence[Event]) -> Event | None:
    """The newest completed snapshot of a life."""
    return next((e for e in reversed(events) if e["event"] == "snapshot_attempt" and e["outcome"] == "completed"), None)


def resumed_tokens(events: Sequence[Event]) -> dict[str, int]:
    """The rollouts that a life went on with and has not finished, with the tokens that each had."""
    sealed = {e["rollout_id"] for e in events if e["event"] == "attempt_sealed"}
    resumed = {e["rollout_id"]: int(e["tokens"]) for e in events if e["event"] == "attempt_resumed" and e["tokens"]}
    return {rollout: tokens for rollout, tokens in resumed.items() if rollout not in sealed}


def test_a_response_killed_twice_goes_on_from_its_tokens_and_the_run_is_bitwise_one_that_was_never_stopped(
    midflight_home, train_command
):
    midflight = midflight_home
    whole = midflight.run(*train_command("prefix-whole", SETTINGS))
    assert whole.code == 0, whole.text

    def in_responses(events: Sequence[Event]) -> bool:
        newest = newest_snapshot(events)
        return newest is not None and int(newest["step"]) >= 1 and int(newest["partial_tokens"]) >= 8

    def in_the_same_response(events: Sequence[Event]) -> bool:
        newest, resumed = newest_snapshot(events), resumed_tokens(events)
        return newest is not None and bool(resumed) and int(newest["partial_tokens"]) > sum(resumed.values())

    command = midflight.start(*train_command("prefix-killed", SETTINGS))
    lives = [kill_when(midflight, "prefix-killed", moment) for moment in (in_responses, in_the_same_response)]
    last = midflight.wait(command)
    assert last.code == 0, last.text

    expected = effective_hashes(midflight.events("prefix-whole"))
    assert sorted(expected) == list(range(1, STEPS + 1))
    assert effective_hashes(midflight.events("prefix-killed")) == expected
    events = midflight.events("prefix-killed")
    restores = [event for event in events if event["event"] == "checkpoint_restored"]
    assert len(restores) == 2
    for life, restore in zip(lives, restores, strict=True):
        newest = newest_snapshot(life)
        assert newest is not None
        saved = saved_tokens(midflight, "prefix-killed", int(newest["sequence"]))
        assert restore["calls_continued"] == len(saved) > 0
        assert restore["tokens_continued"] == sum(saved.values())
    third = [event for event in events if event["run_process"] == restores[1]["run_process"]]
    twice = {e["rollout_id"]: int(e["tokens"]) for e in third if e["event"] == "attempt_resumed"}
    before = resumed_tokens(lives[1])
    assert any(twice.get(rollout, 0) > tokens > 0 for rollout, tokens in before.items())
    assert not [event for event in events if event["event"] == "prefix_discarded"]
    accounts = audit(midflight.store, RunLayout("prefix-killed"))
    assert not accounts.problems
    assert accounts.pairs_trained == STEPS * PROMPTS * GENERATIONS


@pytest.mark.parametrize("victim", ["engine_pids", "pid"])
def test_when_an_engine_or_its_generator_is_killed_running_responses_go_on_without_a_restart_of_the_run(
    midflight_home, train_command, victim
):
    midflight, run = midflight_home, f"prefix-{victim.replace('_', '-')}"
    command = midflight.start(*train_command(run, SETTINGS))
    midflight.wait_for(run, lambda events: (newest_snapshot(events) or {}).get("partial_tokens", 0) >= 8)
    (generator,) = next(e["pids"] for e in midflight.events(run) if e["event"] == "run_started")["generators"]
    psutil.Process(generator["pid"] if victim == "pid" else generator["engine_pids"][0]).kill()
    last = midflight.wait(command)
    assert last.code == 0, last.text
    events = midflight.events(run)
    assert len({event["run_process"] for event in events}) == 1
    interrupted = {e["rollout_id"]: int(e["tokens"]) for e in events if e["event"] == "attempt_interrupted"}
    resumed = {e["rollout_id"]: int(e["tokens"]) for e in events if e["event"] == "attempt_resumed"}
    assert sum(interrupted.values()) >= 8
    assert resumed == interrupted
    assert effective_hashes(events) == effective_hashes(midflight.events("prefix-whole"))
    assert not audit(midflight.store, RunLayout(run)).problems
