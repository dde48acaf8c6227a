"""Settings of generators that can be checked without starting an engine."""

from pathlib import Path

import pytest

from gpu_workers.generation.engine import start_engine
from gpu_workers.generation.runtime_env import generator_env
from gpu_workers.generation.sampling import sampling_settings
from storage.errors import ConfigurationError
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


def test_sampling_settings_are_the_configurations():
    config = RunConfig(name="r", generation={"temperature": 0.5, "top_p": 0.8, "max_new_tokens": 9})
    settings = sampling_settings(config, (1,))
    assert (settings.temperature, settings.top_p, settings.max_new_tokens, settings.max_length) == (0.5, 0.8, 9, 64)
