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
from numpy.typing import NDArray
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from gpu_workers.generation.counter_seeds import mixed_seeds, seeds_at
from gpu_workers.generation.sampling import COUNTER_ARGUMENT


@dataclass(frozen=True, slots=True)
class _Row:
    """One request of the batch. `sampled` is vLLM's own list and grows by each token."""

    seed: int
    offset: int
    temperature: float
    top_p: float
    sampled: list[int]


@dataclass(frozen=True, slots=True)
class _Batch:
    """What stays the same for as long as no request enters, leaves or moves, as arrays in the order of the rows."""

    indices: torch.Tensor
    contiguous: bool
    mixed: NDArray[np.uint64]
    offsets: NDArray[np.int64]
    sampled: tuple[list[int], ...]
    temperatures: torch.Tensor | None
    top_p: torch.Tensor | None

    @classmethod
    def of(cls, rows: dict[int, _Row]) -> "_Batch":
        """From the rows by their index; temperatures and nuclei of 1 change nothing and are left out."""
        indices = sorted(rows)
        ordered = [rows[index] for index in indices]
        temperatures = torch.tensor([row.temperature for row in ordered], dtype=torch.float32)
        top_p = torch.tensor([row.top_p for row in ordered], dtype=torch.float32)
        return cls(
            indices=torch.tensor(indices),
            contiguous=indices == list(range(len(indices))),
            mixed=mixed_seeds(np.array([row.seed for row in ordered], dtype=np.uint64)),
            offsets=np.array([row.offset for row in ordered], dtype=np.int64),
            sampled=tuple(row.sampled for row in ordered),
            temperatures=temperatures if bool((temperatures != 1).any()) else None,
            top_p=top_p if bool((top_p < 1).any()) else None,
        )

    def seeds(self) -> torch.Tensor:
        """The seed of each row's next token, int64 [rows]."""
        positions = self.offsets + np.fromiter(map(len, self.sampled), dtype=np.int64, count=len(self.sampled))
        return torch.from_numpy(seeds_at(self.mixed, positions.view(np.uint64)))


class CounterSampler(LogitsProcessor):
    """Draws tokens for the requests that carry `COUNTER_ARGUMENT`; other rows are left alone."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}
        self._batch: _Batch | None = None

    def is_argmax_invariant(self) -> bool:
        """It decides what the greedy sampler takes."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow requests that enter, leave or move within the batch."""
        if batch_update is not None:
            process_dict_updates(self._rows, batch_update, _row)
            self._batch = _Batch.of(self._rows) if self._rows else None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits are float32 of shape [rows, vocabulary]. Called once per decoding step: every microsecond counts."""
        batch = self._batch
        if batch is None:
            return logits
        whole = batch.contiguous and len(batch.sampled) == len(logits)
        chosen = logits if whole else logits[batch.indices]
        tokens, logprobs = draw(chosen, batch.seeds(), batch.temperatures, batch.top_p)
        picked = torch.full_like(chosen, -torch.inf).scatter_(-1, tokens.unsqueeze(-1), logprobs.unsqueeze(-1))
        if whole:
            return picked
        logits[batch.indices] = picked
        return logits


def draw(
    logits: torch.Tensor, seeds: torch.Tensor, temperatures: torch.Tensor | None, top_p: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row by the Gumbel-max trick, and its log-probability under softmax(logits / temperature).

    `logits` float32 [rows, vocabulary], `seeds` int64 [rows]; `temperatures` and `top_p` float32 [rows], None where
    all are 1. Tokens int64.
    """
    scaled = logits if temperatures is None else logits / temperatures.unsqueeze(-1)
    logprobs = scaled.log_softmax(dim=-1)
    nucleus = scaled if top_p is None else _nucleus(logprobs, top_p)
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
