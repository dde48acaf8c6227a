"""A real multi-turn run that is killed in the middle of its episodes goes on at the turns it had, bit for bit.

The run is synchronous, so that it is a function of its seed: rollouts and weights have the hashes of the uninterrupted
run. Two sequences at a time keep episodes at all of their turns.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from storage.layout import RunLayout
from tasks.accounting import audit
from tests.system.test_survival import effective_hashes, kill_when

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]

STEPS, PROMPTS, GENERATIONS, TURNS = 6, 4, 4, 6
SETTINGS = {
    "data__task": f"running_sum?turns={TURNS}",
    "algorithm__max_steps": STEPS,
    "algorithm__num_prompts_per_step": PROMPTS,
    "async_rl__max_lookahead_versions": 0,
    "generation__max_new_tokens": 4,
    "generation__max_model_len": 64,
    "generation__max_num_seqs": 2,
    "checkpointing__save_period": 2,
    "rollout_checkpointing__interval_s": 0.1,
    "rollout_recovery__target_level": "turn",
}


def in_the_middle_of_episodes(events: Sequence[Mapping[str, Any]]) -> bool:
    """The newest snapshot holds finished turns of running episodes, and no step was trained since."""
    steps = [int(e["step"]) for e in events if e["event"] == "train_step"]
    taken = [e for e in events if e["event"] == "snapshot_attempt" and e["outcome"] == "completed"]
    if not taken or not steps:
        return False
    newest = taken[-1]
    return int(newest["step"]) >= max(steps) >= 2 and int(newest["finished_turns"]) >= TURNS


def test_a_run_killed_in_the_middle_of_its_episodes_keeps_their_turns_and_ends_as_if_it_never_was(
    midflight_home, train_command
):
    midflight = midflight_home
    whole = midflight.run(*train_command("episodes-whole", SETTINGS))
    assert whole.code == 0, whole.text

    command = midflight.start(*train_command("episodes-killed", SETTINGS))
    life = kill_when(midflight, "episodes-killed", in_the_middle_of_episodes)
    killed = midflight.wait(command)
    assert killed.code == 0, killed.text

    expected = effective_hashes(midflight.events("episodes-whole"))
    assert sorted(expected) == list(range(1, STEPS + 1))
    assert effective_hashes(midflight.events("episodes-killed")) == expected
    events = midflight.events("episodes-killed")
    snapshot = next(e for e in reversed(life) if e["event"] == "snapshot_attempt" and e["outcome"] == "completed")
    (restored,) = (e for e in events if e["event"] == "checkpoint_restored")
    assert restored["sequence"] == snapshot["sequence"]
    assert restored["turns_kept"] == snapshot["finished_turns"] >= TURNS
    resumed = [e for e in events if e["event"] == "attempt_resumed"]
    assert sum(e["turns"] for e in resumed) == restored["turns_kept"]
    assert {e["environment_attempt"] - e["attempt"] for e in resumed} == {1}
    accounts = audit(midflight.store, RunLayout("episodes-killed"))
    assert not accounts.problems
    assert accounts.pairs_trained == STEPS * PROMPTS * GENERATIONS
    verified = midflight.run("verify", "episodes-killed", "--drill")
    assert verified.code == 0, verified.text
