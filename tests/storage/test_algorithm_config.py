"""Options of the algorithms: contradictory ones are refused by one message that names the keys and the way out."""

from typing import Any

import pytest
from pydantic import ValidationError

from storage.run_config import RunConfig


def build(algorithm: dict[str, Any], **async_rl: Any) -> RunConfig:
    return RunConfig.model_validate({"name": "run", "algorithm": algorithm, "async_rl": async_rl})


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"num_generations_per_prompt": 1}, r"num_generations_per_prompt is 1, but algorithm\.kind 'grpo'"),
        (
            {"num_generations_per_prompt": 1, "baseline": "leave_one_out"},
            r"num_generations_per_prompt is 1.*algorithm\.baseline 'leave_one_out'",
        ),
        (
            {"kind": "ppo", "baseline": "leave_one_out"},
            r"algorithm\.baseline is 'leave_one_out', but only algorithm\.kind 'grpo' uses it",
        ),
        ({"kind": "ppo", "divide_by_standard_deviation": False}, r"algorithm\.divide_by_standard_deviation is False"),
        ({"kind": "ppo", "filter_equal_rewards": False}, r"algorithm\.filter_equal_rewards is False"),
        (
            {"critic": {"gae_lambda": 0.5}},
            r"algorithm\.critic\.gae_lambda is 0\.5, but only algorithm\.kind 'ppo' uses it",
        ),
        ({"policy_training_start_step": 3}, r"algorithm\.policy_training_start_step is 3, but only .*'ppo'"),
        (
            {"kind": "ppo", "policy_training_start_step": 9, "max_steps": 9},
            r"policy_training_start_step is 9, but the run has algorithm\.max_steps 9",
        ),
        (
            {"kind": "ppo", "mask_truncated": True, "critic": {"bootstrap_truncated": True}},
            r"algorithm\.mask_truncated leaves.*algorithm\.critic\.bootstrap_truncated",
        ),
        (
            {"normalization_length": 8},
            r"algorithm\.normalization_length is 8, but algorithm\.loss_normalization 'token_mean'",
        ),
        (
            {"importance_correction": "sequence"},
            r"algorithm\.importance_correction is 'sequence', but with algorithm\.clip_reference 'generator'",
        ),
        ({"importance_weight_cap": 1.1}, r"importance_weight_cap 1\.1 is less than 1 \+ algorithm\.clip_high 0\.28"),
        ({"kl_coefficient": -0.1}, "kl_coefficient"),
        ({"kl_estimator": "k4"}, "kl_estimator"),
        ({"adam_betas": [0.9, 1.0]}, "adam_betas"),
        ({"critic": {"gamma": 1.1}}, "gamma"),
        ({"kind": "reinforce"}, "kind"),
    ],
)
def test_options_that_contradict_are_refused_by_name(algorithm: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        build(algorithm)


@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        {"kl_estimator": "k1"},  # the estimator of a penalty without weight harms nobody
        {"kind": "ppo", "num_generations_per_prompt": 1},
        {"kind": "ppo", "critic": {"value_clip": None, "num_epochs": 2}},
        {"clip_reference": "trainer", "importance_correction": "sequence", "importance_weight_cap": 1.0},
        {"importance_correction": "none", "importance_weight_cap": 1.0},
        {"loss_normalization": "constant_length", "normalization_length": 512},
    ],
)
def test_options_that_fit_are_accepted_and_survive_being_saved(algorithm: dict[str, Any]) -> None:
    config = build(algorithm)
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config


def warm(lookahead: int, warmup: int | None, start_step: int = 5) -> RunConfig:
    algorithm = {"kind": "ppo", "policy_training_start_step": start_step}
    return build(algorithm, max_lookahead_versions=lookahead, warmup_lookahead_versions=warmup)


def test_dispatch_may_run_further_ahead_while_the_critic_warms_up() -> None:
    config = warm(1, 4)
    assert [config.lookahead_versions(version) for version in range(8)] == [4, 4, 4, 3, 2, 1, 1, 1]
    assert {warm(2, None).lookahead_versions(version) for version in range(8)} == {2}


@pytest.mark.parametrize("lookahead", [0, 1, 3])
@pytest.mark.parametrize("warmup", [3, 6, 20])
@pytest.mark.parametrize("start_step", [1, 2, 7])
def test_no_batch_is_trained_more_policy_updates_late_than_without_a_warm_up(
    lookahead: int, warmup: int, start_step: int
) -> None:
    config = warm(lookahead, warmup, start_step)

    def updates(version: int) -> int:
        return max(0, version - start_step)

    for version in range(start_step + 10):
        farthest = version + config.lookahead_versions(version)
        assert updates(farthest) - updates(version) <= lookahead
        following = version + 1 + config.lookahead_versions(version + 1)
        assert following >= farthest  # what was admitted stays admitted


def test_a_warm_up_window_needs_a_warm_up_and_room() -> None:
    with pytest.raises(ValidationError, match=r"warmup_lookahead_versions is 3, but no critic warms up"):
        build({}, warmup_lookahead_versions=3)
    with pytest.raises(ValidationError, match=r"warmup_lookahead_versions is 1, less than .* 2"):
        warm(2, 1)
