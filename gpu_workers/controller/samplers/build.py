"""Chooses the configured sampler, once, and checks that the run gives it the room it needs."""

from gpu_workers.controller.samplers.custom import load_custom_sampler
from gpu_workers.controller.samplers.in_order import InOrderSampler
from gpu_workers.controller.samplers.protocol import Sampler
from gpu_workers.controller.samplers.ready_first import ReadyFirstSampler
from gpu_workers.controller.samplers.weight_fifo import WeightFifoSampler
from gpu_workers.controller.samplers.windowed import WindowedSampler
from storage.errors import ConfigurationError
from storage.run_config import RunConfig


def build_sampler(config: RunConfig) -> Sampler:
    """The configured sampler. Raises `ConfigurationError` when it can't be loaded or lacks capacity."""
    sampler = _chosen(config)
    step_size = config.algorithm.num_prompts_per_step
    needed = max(sampler.required_capacity(step_size) or 0, step_size)
    given = config.async_rl.buffer_capacity
    if given is not None and given < needed:
        raise ConfigurationError(f"async_rl.buffer_capacity is {given}, but sampler '{sampler.name}' needs {needed}")
    return sampler


def capacity_of(config: RunConfig, sampler: Sampler) -> int | None:
    """Most groups in buffer and flight together: as configured, or what the sampler needs; None without a bound."""
    step_size = config.algorithm.num_prompts_per_step
    needed = sampler.required_capacity(step_size)
    return config.async_rl.buffer_capacity or (needed and max(needed, step_size))


def _chosen(config: RunConfig) -> Sampler:
    limits = config.async_rl
    match limits.sampler:
        case "in_order":
            most = limits.batches_ahead or 0
            return InOrderSampler(max_lookahead_versions=most, lookahead_at=config.lookahead_versions)
        case "weight_fifo":
            return WeightFifoSampler(max_staleness_versions=limits.max_staleness_versions)
        case "ready_first":
            return ReadyFirstSampler(max_staleness_versions=limits.max_staleness_versions)
        case "windowed":
            return WindowedSampler(
                max_staleness_versions=limits.max_staleness_versions, freshest_first=limits.freshest_first
            )
        case "custom":
            return load_custom_sampler(config)
