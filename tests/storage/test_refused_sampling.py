"""Sampling parameters that a run can't have are refused by name, with the reason."""

import pytest
from pydantic import ValidationError

from storage.records import RecoveryLevel
from storage.refused_sampling import REFUSED_SAMPLING
from storage.run_config import RunConfig

SAID = {
    "use_beam_search": "beam search does not sample from the policy.*neither be trained on, nor continued",
    "beam_width": "beam search does not sample from the policy",
    "length_penalty": "beam search does not sample from the policy",
    "best_of": r"algorithm\.num_generations_per_prompt",
    "n": r"algorithm\.num_generations_per_prompt",
    "seed": "can't go on in the middle of a response; seeds come from the run's seed",
    "presence_penalty": "what it has counted is forgotten when an interrupted response goes on as part of the prompt",
    "frequency_penalty": "what it has counted is forgotten",
    "repetition_penalty": "what it has counted is forgotten",
    "top_k": "the trainer can't compute from the logits; use temperature or top_p",
    "min_p": "the trainer can't compute from the logits",
    "logit_bias": "the trainer can't compute from the logits",
    "min_tokens": "a length that is counted anew",
    "stop": "the task says which tokens end a response",
    "stop_token_ids": "the task says which tokens end a response",
    "max_tokens": "it is called max_new_tokens here",
}


@pytest.mark.parametrize(("name", "reason"), SAID.items())
def test_a_parameter_of_other_tools_is_refused_by_name_with_the_reason(name: str, reason: str):
    with pytest.raises(ValidationError, match=rf"generation\.{name} is not supported: .*{reason}"):
        RunConfig(name="run", generation={"max_new_tokens": 8, name: 1})


def test_every_refusal_is_tested_and_none_is_a_key():
    assert set(SAID) == set(REFUSED_SAMPLING)
    assert not set(REFUSED_SAMPLING) & set(type(RunConfig(name="run").generation).model_fields)


def test_a_key_that_nobody_knows_is_refused_as_in_every_section():
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        RunConfig(name="run", generation={"max_new_tokns": 8})


@pytest.mark.parametrize(
    "recovery",
    [{"target_level": "prefix"}, {"per_task": {"sort8": "prefix"}}, {"per_agent": {"sums": "prefix"}}],
)
def test_seeds_of_the_engine_are_refused_where_any_group_is_to_be_continued(recovery: dict[str, object]):
    with pytest.raises(
        ValidationError, match=r"generation\.seeding is 'engine', but rollout_recovery .*level 'prefix'"
    ):
        RunConfig(name="run", generation={"seeding": "engine"}, rollout_recovery=recovery)


@pytest.mark.parametrize("level", [level for level in RecoveryLevel if not level.keeps_tokens])
def test_seeds_of_the_engine_serve_every_other_level(level: RecoveryLevel):
    config = RunConfig(name="run", generation={"seeding": "engine"}, rollout_recovery={"target_level": level})
    assert config.generation.seeding == "engine"
