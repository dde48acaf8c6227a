"""Starts vLLM's engine as the configuration wants it, with the sampling that its model runner can repeat."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_workers.generation.engine_process import forked_engines, start_importing
from gpu_workers.generation.sampling import (
    CounterSampling,
    EngineSampling,
    Sampling,
    SamplingSettings,
    SeededSampling,
    sampling_settings,
)
from storage.errors import ConfigurationError
from storage.run_config import RunConfig


@dataclass(frozen=True, slots=True)
class Engine:
    """A running `vllm.v1.engine.async_llm.AsyncLLM` and the sampling that goes with it."""

    llm: Any
    sampling: Sampling

    @property
    def pids(self) -> list[int]:
        """Ids of the engine's own processes."""
        return [process.pid for process in self.llm.engine_core.resources.engine_manager.processes]


def start_engine(config: RunConfig, model_dir: Path, *, stop_token_ids: tuple[int, ...]) -> Engine:
    """Start the engine's process and load the model; about 9 s on two free CPU cores.

    The variables of `runtime_env.generator_env` must be set. Raises ConfigurationError for settings under which
    log-probabilities or repeatability would be wrong.
    """
    settings = sampling_settings(config, stop_token_ids)
    if config.cluster.device == "cpu":
        start_importing()
        with forked_engines():
            return _start(config, _arguments(config, model_dir) | _cpu_arguments(config), settings)
    return _start(config, _arguments(config, model_dir) | _gpu_arguments(config), settings)


def _start(config: RunConfig, arguments: dict[str, Any], settings: SamplingSettings) -> Engine:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    vllm_config = AsyncEngineArgs(**arguments).create_engine_config(UsageContext.ENGINE_CONTEXT)
    sampling = _sampling(config, settings, v2_model_runner=bool(vllm_config.use_v2_model_runner))
    return Engine(AsyncLLM.from_vllm_config(vllm_config, disable_log_stats=True), sampling)


def _arguments(config: RunConfig, model_dir: Path) -> dict[str, Any]:
    generation = config.generation
    return {
        "model": str(model_dir),
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # no sampling defaults from the model's folder
        "dtype": config.policy.dtype,
        "seed": config.seed,
        "max_model_len": generation.max_model_len,
        "max_num_seqs": generation.max_num_seqs,
        "max_num_batched_tokens": max(8192, generation.max_model_len),
        "disable_log_stats": True,
        "worker_extension_cls": "gpu_workers.generation.refit_extension.RefitExtension",
    }


def _cpu_arguments(config: RunConfig) -> dict[str, Any]:
    arguments = {
        "distributed_executor_backend": "uni",
        "enforce_eager": True,
        "kv_cache_memory_bytes": config.generation.kv_cache_bytes,
    }
    if config.generation.seeding == "engine":  # seeds and chunked prefill together crash vLLM on the CPU
        return arguments | {"enable_chunked_prefill": False, "logprobs_mode": _own_logprobs(config)}
    return arguments | {
        "logits_processors": ["gpu_workers.generation.counter_sampler:CounterSampler"],
        "logprobs_mode": "processed_logits",  # what the counter sampler leaves is the log-probability
    }


def _gpu_arguments(config: RunConfig) -> dict[str, Any]:
    return {
        "tensor_parallel_size": config.generation.tensor_parallel_size,
        "gpu_memory_utilization": config.generation.gpu_memory_utilization,
        "logprobs_mode": _own_logprobs(config),
    }


def _own_logprobs(config: RunConfig) -> str:
    """The mode in which vLLM's own sampler reports softmax(logits / temperature)."""
    generation = config.generation
    if generation.top_p < 1.0 and generation.temperature != 1.0:
        raise ConfigurationError(
            f"generation.top_p {generation.top_p} with generation.temperature {generation.temperature} on "
            f"cluster.device '{config.cluster.device}' with generation.seeding '{generation.seeding}': vLLM then "
            "reports log-probabilities inside the nucleus, which the trainer can't compute; set one of the two to 1.0"
        )
    return "raw_logprobs" if generation.temperature == 1.0 else "processed_logprobs"


def _sampling(config: RunConfig, settings: SamplingSettings, *, v2_model_runner: bool) -> Sampling:
    if config.generation.seeding == "engine":
        return EngineSampling(settings)
    if config.cluster.device == "cpu":
        return CounterSampling(settings)
    if not v2_model_runner:
        raise ConfigurationError(
            f"vLLM would run {config.policy.model!r} on its V1 model runner, whose seeded sampling can't be repeated "
            "from the middle; use a model that the V2 model runner supports (see vLLM's log for the reason), or set "
            "generation.seeding to 'engine' and rollout_recovery.target_level to 'turn' at most"
        )
    return SeededSampling(settings)
