"""Which sampling parameters a model call carries: chosen once per engine, by what its model runner can repeat."""

from dataclasses import dataclass
from typing import Any, Protocol

from storage.run_config import RunConfig

COUNTER_ARGUMENT = "midflight_counter"


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """What the configuration says about sampling. `max_length` bounds prompt and completion together."""

    temperature: float
    top_p: float
    max_new_tokens: int
    max_length: int
    stop_token_ids: tuple[int, ...]


def sampling_settings(config: RunConfig, stop_token_ids: tuple[int, ...]) -> SamplingSettings:
    """The settings of a run whose task ends completions with `stop_token_ids`."""
    return SamplingSettings(
        temperature=config.generation.temperature,
        top_p=config.generation.top_p,
        max_new_tokens=config.generation.max_new_tokens,
        max_length=config.generation.max_model_len,
        stop_token_ids=stop_token_ids,
    )


class Sampling(Protocol):
    """Makes `vllm.SamplingParams` that draw the same tokens whenever the seed and the weights are the same."""

    def params(self, seed: int, *, prompt_length: int) -> Any:
        """Parameters of one call with the seed of `counter_seeds.sampling_seed`."""
        ...


class CounterSampling:
    """For the V1 model runner on the CPU: greedy requests whose tokens `counter_sampler.CounterSampler` draws."""

    def __init__(self, settings: SamplingSettings) -> None:
        self._settings = settings

    def params(self, seed: int, *, prompt_length: int) -> Any:
        """A greedy request with the counter's arguments."""
        argument = {
            "seed": seed,
            "offset": 0,
            "temperature": self._settings.temperature,
            "top_p": self._settings.top_p,
        }
        return _params(self._settings, prompt_length, temperature=0.0, extra_args={COUNTER_ARGUMENT: argument})


class SeededSampling:
    """For CUDA's V2 model runner, whose noise is itself a hash of (seed, position, token)."""

    def __init__(self, settings: SamplingSettings) -> None:
        self._settings = settings

    def params(self, seed: int, *, prompt_length: int) -> Any:
        """A plain request with a seed."""
        return _params(
            self._settings,
            prompt_length,
            temperature=self._settings.temperature,
            top_p=self._settings.top_p,
            seed=seed,
        )


def _params(settings: SamplingSettings, prompt_length: int, **how: Any) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=max(1, min(settings.max_new_tokens, settings.max_length - prompt_length)),
        stop_token_ids=list(settings.stop_token_ids),
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
        **how,
    )
