"""Recovery level `prefix` with real Prefect, Ray, vLLM, torch and files: a response that is interrupted twice, and one
whose engine dies, go on from their tokens, within a turn of their episode, and the run ends like one that was never
stopped, bit for bit. (Single-turn responses: `test_survival`.)
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
STEPS, PROMPTS, GENERATIONS, TURNS = 3, 4, 4, 3
FEW_TOKENS = 8
# An untrained model rarely ends its response, and two sequences at a time take long: a kill finds many that run.
SETTINGS = {
    "data__task": f"running_sum?turns={TURNS}",
    "algorithm__max_steps": STEPS,
    "algorithm__num_prompts_per_step": PROMPTS,
    "algorithm__num_generations_per_prompt": GENERATIONS,
    "async_rl__max_lookahead_versions": 0,
    "policy__warm_start_steps": 0,
    "generation__max_num_seqs": 2,
    "generation__top_p": 0.5,
    "generation__max_new_tokens": 150,
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


def runs_with_tokens(events: Sequence[Event], deaths: int) -> bool:
    """Whether, since so many generators died and were started again, a snapshot has found some tokens."""
    restarts = [number for number, event in enumerate(events) if event["event"] == "generator_restarted"]
    newest = newest_snapshot(events[restarts[-1] :] if restarts else events)
    return len(restarts) == deaths and newest is not None and int(newest["partial_tokens"]) >= FEW_TOKENS


def test_a_response_killed_twice_goes_on_from_its_tokens_and_the_run_is_bitwise_one_that_was_never_stopped(
    midflight_home, train_command
):
    midflight = midflight_home
    whole = midflight.run(*train_command("prefix-whole", SETTINGS))
    assert whole.code == 0, whole.text

    def in_responses(events: Sequence[Event]) -> bool:
        newest = newest_snapshot(events)
        in_turns = newest is not None and int(newest["step"]) >= 1 and int(newest["finished_turns"]) > 0
        return in_turns and int(newest["partial_tokens"]) >= FEW_TOKENS

    def in_the_same_response(events: Sequence[Event]) -> bool:
        newest, resumed = newest_snapshot(events), resumed_tokens(events)
        return newest is not None and bool(resumed) and int(newest["partial_tokens"]) > sum(resumed.values())

    command = midflight.start(*train_command("prefix-killed", SETTINGS))
    lives, saves = [], []
    for moment in (in_responses, in_the_same_response):
        lives.append(kill_when(midflight, "prefix-killed", moment))
        newest = newest_snapshot(lives[-1])
        assert newest is not None
        saves.append(saved_tokens(midflight, "prefix-killed", int(newest["sequence"])))
    last = midflight.wait(command)
    assert last.code == 0, last.text

    expected = effective_hashes(midflight.events("prefix-whole"))
    assert sorted(expected) == list(range(1, STEPS + 1))
    assert effective_hashes(midflight.events("prefix-killed")) == expected
    events = midflight.events("prefix-killed")
    restores = [event for event in events if event["event"] == "checkpoint_restored"]
    assert len(restores) == 2
    for saved, restore in zip(saves, restores, strict=True):
        assert restore["calls_continued"] == len(saved) > 0
        assert restore["tokens_continued"] == sum(saved.values())
    third = [event for event in events if event["run_process"] == restores[1]["run_process"]]
    twice = {e["rollout_id"]: int(e["tokens"]) for e in third if e["event"] == "attempt_resumed"}
    before = resumed_tokens(lives[1])  # still running when the second kill came
    assert any(twice.get(rollout, 0) > tokens > 0 for rollout, tokens in before.items())
    assert not [event for event in events if event["event"] == "prefix_discarded"]
    accounts = audit(midflight.store, RunLayout("prefix-killed"))
    assert not accounts.problems
    assert accounts.pairs_trained == STEPS * PROMPTS * GENERATIONS


def test_responses_whose_engine_or_generator_is_killed_go_on_without_a_restart_of_the_run(
    midflight_home, train_command
):
    midflight, run = midflight_home, "prefix-dead"
    command = midflight.start(*train_command(run, SETTINGS))
    for deaths, victim in enumerate(("engine", "generator")):
        midflight.wait_for(run, lambda events, deaths=deaths: runs_with_tokens(events, deaths))
        events = midflight.events(run)
        pids = next(e["pids"] for e in events if e["event"] == "run_started")["generators"][0]
        pids = next((e["pids"] for e in reversed(events) if e["event"] == "generator_restarted"), pids)
        psutil.Process(pids["engine_pids"][0] if victim == "engine" else pids["pid"]).kill()
    last = midflight.wait(command)
    assert last.code == 0, last.text
    events = midflight.events(run)
    assert len({event["run_process"] for event in events}) == 1
    deaths = [number for number, event in enumerate(events) if event["event"] == "generator_died"]
    assert len(deaths) == 2
    for began, ended in zip(deaths, (*deaths[1:], len(events)), strict=True):
        after = events[began:ended]
        interrupted = {e["rollout_id"]: int(e["tokens"]) for e in after if e["event"] == "attempt_interrupted"}
        resumed = {e["rollout_id"]: int(e["tokens"]) for e in after if e["event"] == "attempt_resumed"}
        assert resumed == interrupted
        assert sum(interrupted.values()) >= FEW_TOKENS
    assert effective_hashes(events) == effective_hashes(midflight.events("prefix-whole"))
    assert not audit(midflight.store, RunLayout(run)).problems
