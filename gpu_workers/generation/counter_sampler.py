"""The counter sampler: a vLLM logits processor that draws each token with noise from (seed, position).

vLLM loads this module by name inside its engine process (V1 model runner, CPU). Requests run greedily; the processor
picks the token itself and leaves a row in which only that token is finite. The number it leaves there is the token's
log-probability under softmax(logits / temperature), which the engine reports as it is
(`logprobs_mode="processed_logits"`). Top-p restricts which token is drawn; it does not change that log-probability,
because the trainer can't know the nucleus of each position.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from gpu_workers.generation.counter_seeds import row_seeds
from gpu_workers.generation.sampling import COUNTER_ARGUMENT


@dataclass(frozen=True, slots=True)
class _Row:
    """One request of the batch. `sampled` is vLLM's own list and grows by each token."""

    seed: int
    offset: int
    temperature: float
    top_p: float
    sampled: list[int]


class CounterSampler(LogitsProcessor):
    """Draws tokens for the requests that carry `COUNTER_ARGUMENT`; other rows are left alone."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        """It decides what the greedy sampler takes."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow requests that enter, leave or move within the batch."""
        process_dict_updates(self._rows, batch_update, _row)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits are float32 of shape [rows, vocabulary]."""
        if not self._rows:
            return logits
        indices = sorted(self._rows)
        rows = [self._rows[index] for index in indices]
        seeds = row_seeds(
            np.array([row.seed for row in rows], dtype=np.uint64),
            np.array([row.offset + len(row.sampled) for row in rows], dtype=np.uint64),
        )
        chosen = logits if len(rows) == len(logits) else logits[indices]
        temperatures = torch.tensor([row.temperature for row in rows], dtype=torch.float32)
        top_p = torch.tensor([row.top_p for row in rows], dtype=torch.float32)
        tokens, logprobs = draw(chosen, torch.from_numpy(seeds), temperatures, top_p)
        at = torch.tensor(indices)
        logits[at] = -torch.inf
        logits[at, tokens] = logprobs
        return logits


def draw(
    logits: torch.Tensor, seeds: torch.Tensor, temperatures: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row by the Gumbel-max trick, and its log-probability under softmax(logits / temperature).

    `logits` float32 [rows, vocabulary], `seeds` int64 [rows], `temperatures` and `top_p` float32 [rows]. Tokens int64.
    """
    scaled = logits / temperatures.unsqueeze(-1)
    logprobs = scaled.log_softmax(dim=-1)
    nucleus = _nucleus(logprobs, top_p) if bool((top_p < 1).any()) else scaled
    tokens = torch.ops._C.fused_gumbel_argmax(nucleus.contiguous(), seeds)
    return tokens, logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def _nucleus(logprobs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Log-probabilities with everything outside the smallest set that reaches `top_p` at -inf."""
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    before = ordered.exp().cumsum(dim=-1).roll(1, dims=-1)
    before[:, 0] = 0.0
    beyond = before >= top_p.unsqueeze(-1)
    return logprobs.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), -torch.inf)


def _row(params: SamplingParams, prompt: list[int] | None, sampled: list[int]) -> _Row | None:
    argument = (params.extra_args or {}).get(COUNTER_ARGUMENT)
    return None if argument is None else _Row(sampled=sampled, **argument)
