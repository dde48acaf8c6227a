"""Environment variables of a generator's process. vLLM reads them when it is imported, so they come first."""

from storage.run_config import RunConfig

_EVERYWHERE = {
    "HF_HUB_OFFLINE": "1",  # models are local folders
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

# A tiny model gains nothing from compiled samplers (15 to 22 s at the first batch) nor from a second thread, which
# would also make log-probabilities depend on the batch.
_CPU = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}


def generator_env(config: RunConfig) -> dict[str, str]:
    """The variables that must be set before `vllm` is imported."""
    return _EVERYWHERE | (_CPU if config.cluster.device == "cpu" else {})
