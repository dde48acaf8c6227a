"""What is computed about rows once, before the first update of their step: targets that no update may move."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_workers.training.advantages import generalized_advantages
from gpu_workers.training.batches import TokenBatch, TrainingRow, pad_rows
from gpu_workers.training.critic import Critic
from gpu_workers.training.learner import Learner
from gpu_workers.training.step_rows import TrainedRow

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PreparedRow:
    """A row with one value per sampled token in each array.

    `start_logprobs`: the policy's own before the step, if the loss needs them and an update may precede it;
    `reference_logprobs`: the frozen policy's; `values` and `returns`: the critic's before the step, and its targets.
    """

    number: int
    row: TrainingRow
    advantages: Floats
    start_logprobs: Floats | None = None
    reference_logprobs: Floats | None = None
    values: Floats | None = None
    returns: Floats | None = None

    @property
    def length(self) -> int:
        """Sampled tokens."""
        return len(self.advantages)


@torch.no_grad()
def prepare(rows: Sequence[TrainedRow], learner: Learner) -> list[PreparedRow]:
    """Prepare the rows of one forward pass; changes nothing."""
    plain = [row.row for row in rows]
    lengths = [row.num_sampled_tokens for row in plain]
    advantages = [np.full(length, row.advantage, dtype=np.float32) for row, length in zip(rows, lengths, strict=True)]
    needs_start = learner.config.clip_reference == "trainer" and not learner.config.updates_once
    if not needs_start and learner.reference is None and learner.critic is None:
        return [PreparedRow(row.number, row.row, values) for row, values in zip(rows, advantages, strict=True)]
    batch = pad_rows(plain, device=learner.device)
    start = _split(learner.policy.score(batch).logprobs if needs_start else None, lengths)
    reference = _split(None if learner.reference is None else learner.reference.score(batch).logprobs, lengths)
    values: Sequence[Floats | None] = [None] * len(rows)
    returns = values
    if learner.critic is not None:
        estimated, expected = _advantages(plain, lengths, batch, learner.critic, learner)
        advantages = _cut(estimated, lengths)
        values, returns = _cut(expected, lengths), _cut(estimated + expected, lengths)
    columns = zip(rows, advantages, start, reference, values, returns, strict=True)
    return [PreparedRow(row.number, row.row, *arrays) for row, *arrays in columns]


def _advantages(
    rows: Sequence[TrainingRow], lengths: Sequence[int], batch: TokenBatch, critic: Critic, learner: Learner
) -> tuple[Tensor, Tensor]:
    """(advantages, values), float64 [R, S] on CPU; the reward arrives with a row's last sampled token."""
    inside = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(-1)
    values = torch.zeros(inside.shape, dtype=torch.float64)
    values[inside] = critic.values(batch).double().cpu()
    last = torch.tensor(lengths) - 1
    rewards = torch.zeros_like(values)
    rewards[torch.arange(len(rows)), last] = torch.tensor([row.reward for row in rows], dtype=torch.float64)
    settings = learner.config.critic
    final_values = torch.zeros(len(rows), dtype=torch.float64)
    cut_off = torch.tensor([settings.bootstrap_truncated and row.is_truncated for row in rows])
    if cut_off.any():
        final_values[cut_off] = critic.final_values([row for row in rows if row.is_truncated]).double().cpu()
    advantages = generalized_advantages(
        rewards, values, last + 1, final_values, gamma=settings.gamma, gae_lambda=settings.gae_lambda
    )
    return advantages, values


def _split(values: Tensor | None, lengths: Sequence[int]) -> Sequence[Floats | None]:
    if values is None:
        return [None] * len(lengths)
    return np.split(values.float().cpu().numpy(), np.cumsum(lengths)[:-1])


def _cut(values: Tensor, lengths: Sequence[int]) -> list[Floats]:
    return [row[:length].astype(np.float32) for row, length in zip(values.numpy(), lengths, strict=True)]
