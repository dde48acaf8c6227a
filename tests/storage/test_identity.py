"""A run's identity ignores how it is operated, notices what it computes, and holds no secret."""

from typing import Any

import pytest

from storage.identity import differences, identity, identity_of, redacted, with_defaults
from storage.run_config import RunConfig

BASE = RunConfig(name="demo")


def _with(section: str, **values: Any) -> RunConfig:
    return RunConfig.model_validate({"name": "demo", section: values})


@pytest.mark.parametrize(
    "config",
    [
        RunConfig(name="fork"),
        _with("store", url="s3://elsewhere", deadline_s=3),
        _with("cluster", num_trainers=4, device="gpu"),
        _with("checkpointing", save_period=9, keep=1),
        _with("rollout_checkpointing", interval_s=1, enabled=False),
        _with("algorithm", max_steps=7),
        _with("async_rl", rollout_timeout_s=1, retry_backoff_s=2),
        _with("generation", num_engines=8, kv_cache_bytes=1 << 30, max_inflight_groups=2, max_num_seqs=3),
    ],
)
def test_operational_keys_do_not_change_it(config: RunConfig) -> None:
    assert identity(config) == identity(BASE)


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("algorithm", {"learning_rate": 1e-5}),
        ("algorithm", {"num_generations_per_prompt": 4}),
        ("data", {"seed": 3}),
        ("policy", {"hidden_size": 64}),
        ("generation", {"temperature": 0.5}),
        ("async_rl", {"max_lookahead_versions": 2}),
        ("rollout_recovery", {"target_level": "prompt_group"}),
    ],
)
def test_semantic_keys_change_it_and_are_named_with_both_values(section: str, values: dict[str, Any]) -> None:
    changed = identity(_with(section, **values))
    assert changed.fingerprint != identity(BASE).fingerprint
    (key, value), *_ = values.items()
    (line,) = differences(identity(BASE).config, changed.config)
    assert line.startswith(f"{section}.{key}: saved ")
    assert line.endswith(f"now {value!r}")


def test_a_key_that_one_side_lacks_is_named() -> None:
    assert differences({"a": {"b": 1}}, {"a": {"b": 1, "c": None}}) == ["a.c: saved absent, now None"]
    assert differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1}}) == ["a.c: saved 2, now absent"]
    assert differences({"a": [1, 2]}, {"a": (1, 2)}) == []


def test_the_identity_of_a_saved_configuration_is_that_of_the_run() -> None:
    assert identity_of(redacted(BASE)) == identity(BASE)


def test_keys_that_a_saved_configuration_could_not_know_have_their_defaults() -> None:
    saved = redacted(RunConfig.model_validate({"name": "demo", "generation": {"temperature": 0.5}}))
    del saved["generation"]["top_p"]
    del saved["algorithm"]["critic"]["learning_rate"]
    del saved["rollout_recovery"]
    now = RunConfig.model_validate({"name": "demo", "generation": {"temperature": 0.5}})
    assert identity_of(saved) != identity(now)
    assert identity_of(with_defaults(saved)) == identity(now)
    changed = differences(identity_of(with_defaults(saved)).config, identity(_with("generation", top_p=0.9)).config)
    assert changed == ["generation.temperature: saved 0.5, now 1.0", "generation.top_p: saved 1.0, now 0.9"]


def test_a_saved_key_that_exists_no_more_is_a_difference() -> None:
    saved = {**redacted(BASE), "algorithm": {**redacted(BASE)["algorithm"], "momentum": 0.9}}
    changed = differences(identity_of(with_defaults(saved)).config, identity(BASE).config)
    assert changed == ["algorithm.momentum: saved 0.9, now absent"]


def test_the_defaults_of_a_whole_configuration_change_nothing() -> None:
    assert with_defaults(redacted(BASE)) == redacted(BASE)


@pytest.mark.parametrize("url", ["s3://key:sesame@bucket/x", "https://sesame@host/x"])
def test_credentials_in_urls_are_redacted(url: str) -> None:
    shown = str(redacted(_with("store", url=url)))
    assert "sesame" not in shown
    assert "<redacted>@" in shown


def test_counts_that_are_named_like_tokens_stay() -> None:
    assert redacted(BASE)["generation"]["max_new_tokens"] == BASE.generation.max_new_tokens
