"""Settings of generators that can be checked without starting an engine."""

from pathlib import Path
from typing import Any

import pytest

from gpu_workers.generation.engine import _cpu_arguments, _sampling, start_engine
from gpu_workers.generation.runtime_env import generator_env
from gpu_workers.generation.sampling import CounterSampling, sampling_settings
from storage.errors import ConfigurationError
from storage.records import CallSampling
from storage.run_config import RunConfig


def test_only_cpu_engines_are_kept_from_compiling_and_to_one_thread():
    cpu = generator_env(RunConfig(name="r"))
    gpu = generator_env(RunConfig(name="r", cluster={"device": "gpu"}))
    assert (cpu["OMP_NUM_THREADS"], cpu["TORCHDYNAMO_DISABLE"]) == ("1", "1")
    assert gpu.keys() == {"HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "VLLM_LOGGING_LEVEL"}


def test_log_probabilities_that_no_trainer_can_compute_are_refused_before_anything_starts():
    config = RunConfig(name="r", cluster={"device": "gpu"}, generation={"top_p": 0.9, "temperature": 0.7})
    with pytest.raises(ConfigurationError, match=r"generation\.top_p 0\.9 .* generation\.temperature 0\.7"):
        start_engine(config, Path("unused"), stop_token_ids=(1,))


def test_the_engine_s_own_seeds_on_the_cpu_have_the_same_limits():
    config = RunConfig(name="r", generation={"top_p": 0.9, "temperature": 0.7, "seeding": "engine"})
    with pytest.raises(ConfigurationError, match=r"cluster\.device 'cpu' with generation\.seeding 'engine'"):
        _cpu_arguments(config)
    usual = _cpu_arguments(RunConfig(name="r", generation={"seeding": "engine"}))
    assert (usual["enable_chunked_prefill"], usual["logprobs_mode"]) == (False, "raw_logprobs")
    assert "logits_processors" not in usual


@pytest.mark.parametrize(
    ("sections", "v2_model_runner", "kind"),
    [
        ({}, False, "counter"),
        ({"generation": {"seeding": "engine"}}, False, "engine"),
        ({"cluster": {"device": "gpu"}}, True, "positional"),
        ({"cluster": {"device": "gpu"}, "generation": {"seeding": "engine"}}, False, "engine"),
        ({"cluster": {"device": "gpu"}, "generation": {"seeding": "engine"}}, True, "engine"),
    ],
)
def test_what_a_call_must_have_kept_to_be_continued_names_the_noise(
    sections: dict[str, Any], v2_model_runner: bool, kind: str
):
    config = RunConfig(name="r", **sections)
    sampling = _sampling(config, sampling_settings(config, (1, 2)), v2_model_runner=v2_model_runner)
    assert sampling.call_sampling(7) == CallSampling(kind, 7, 1.0, 1.0, (1, 2))


def test_a_gpu_model_that_only_the_old_model_runner_can_run_is_told_of_the_engine_s_own_seeds():
    config = RunConfig(name="r", cluster={"device": "gpu"})
    with pytest.raises(ConfigurationError, match=r"set generation\.seeding to 'engine' and .*target_level to 'turn'"):
        _sampling(config, sampling_settings(config, ()), v2_model_runner=False)


@pytest.mark.parametrize(("prompt_length", "budget"), [(4, 9), (60, 4), (63, 1), (64, 1)])
def test_the_budget_of_a_call_is_what_fits_behind_its_prompt(prompt_length: int, budget: int):
    config = RunConfig(name="r", generation={"max_new_tokens": 9})
    assert CounterSampling(sampling_settings(config, ())).budget(prompt_length) == budget


def test_sampling_settings_are_the_configurations():
    config = RunConfig(name="r", generation={"temperature": 0.5, "top_p": 0.8, "max_new_tokens": 9})
    settings = sampling_settings(config, (1,))
    assert (settings.temperature, settings.top_p, settings.max_new_tokens, settings.max_length) == (0.5, 0.8, 9, 64)
