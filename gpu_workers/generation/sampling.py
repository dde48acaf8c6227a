"""Which sampling parameters a model call carries: chosen once per engine, by what its model runner can repeat."""

from dataclasses import dataclass
from typing import Any, Protocol

from storage.records import CallSampling
from storage.run_config import RunConfig

COUNTER_ARGUMENT = "midflight_counter"
ENGINE_KIND = "engine"


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

    def params(self, seed: int, *, prompt_length: int, offset: int = 0) -> Any:
        """Parameters of one call with the seed of `counter_seeds.sampling_seed`. `prompt_length` is the prompt's alone:
        the call's first `offset` tokens were sampled before, and follow it.
        """
        ...

    def call_sampling(self, seed: int) -> CallSampling:
        """What must stay the same for a call to be continued."""
        ...

    def budget(self, prompt_length: int) -> int:
        """Most tokens of a whole call, continued or not."""
        ...


class _OneKind:
    """What all kinds of sampling have in common."""

    kind: str

    def __init__(self, settings: SamplingSettings) -> None:
        self._settings = settings

    def call_sampling(self, seed: int) -> CallSampling:
        """See `Sampling`."""
        settings = self._settings
        return CallSampling(self.kind, seed, settings.temperature, settings.top_p, settings.stop_token_ids)

    def budget(self, prompt_length: int) -> int:
        """See `Sampling`."""
        return max(1, min(self._settings.max_new_tokens, self._settings.max_length - prompt_length))

    def _params(self, prompt_length: int, offset: int, **how: Any) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            max_tokens=self.budget(prompt_length) - offset,
            stop_token_ids=list(self._settings.stop_token_ids),
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
            **how,
        )


class CounterSampling(_OneKind):
    """For the V1 model runner on the CPU: greedy requests whose tokens `counter_sampler.CounterSampler` draws."""

    kind = "counter"

    def params(self, seed: int, *, prompt_length: int, offset: int = 0) -> Any:
        """A greedy request with the counter's arguments."""
        argument = {
            "seed": seed,
            "offset": offset,
            "temperature": self._settings.temperature,
            "top_p": self._settings.top_p,
        }
        return self._params(prompt_length, offset, temperature=0.0, extra_args={COUNTER_ARGUMENT: argument})


class SeededSampling(_OneKind):
    """For CUDA's V2 model runner, whose noise is itself a hash of (seed, position, token): a continued call's tokens
    stand at the positions that they would have had.
    """

    kind = "positional"

    def params(self, seed: int, *, prompt_length: int, offset: int = 0) -> Any:
        """A plain request with a seed."""
        settings = self._settings
        return self._params(prompt_length, offset, temperature=settings.temperature, top_p=settings.top_p, seed=seed)


class EngineSampling(SeededSampling):
    """`generation.seeding: engine`: the same request on any model runner. Its noise may depend on how often was drawn,
    so that a whole call can be repeated, but not its rest.
    """

    kind = ENGINE_KIND
