"""The critic's loss on one forward pass of prepared rows, and how its values compare with their targets."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gpu_workers.training.batches import pad_rows
from gpu_workers.training.critic import Critic
from gpu_workers.training.learner import Learner
from gpu_workers.training.losses import clipped_values, value_losses
from gpu_workers.training.preparation import Floats, PreparedRow
from gpu_workers.training.step_statistics import CriticStatistics, Moments


class CriticLoss:
    """Sum of the value losses of tokens; the optimizer makes it their mean over the tokens of its update."""

    def __init__(self, learner: Learner, critic: Critic, statistics: CriticStatistics) -> None:
        self._device = learner.device
        self._critic = critic
        self._clip = learner.config.critic.value_clip
        self._statistics = statistics

    def add(self, rows: Sequence[PreparedRow]) -> None:
        """Add the gradients of these rows."""
        values = self._critic.values(pad_rows([row.row for row in rows], device=self._device))
        old = joined([row.values for row in rows]).to(self._device)
        returns = joined([row.returns for row in rows]).to(self._device)
        losses = value_losses(values, old, returns, clip=self._clip)
        losses.sum().backward()
        self._statistics.add(losses.detach(), clipped_values(values.detach(), old, returns, clip=self._clip))


def describe_values(rows: Sequence[PreparedRow], learner: Learner) -> dict[str, float]:
    """The critic before the step, over the trained tokens of all ranks; `explained_variance` is 1 - Var(R - V) / Var(R)
    and 0 where all targets are equal."""
    values, returns = joined([row.values for row in rows]), joined([row.returns for row in rows])
    advantages = moments(joined([row.advantages for row in rows]), learner)
    targets, errors = moments(returns, learner), moments(returns - values, learner)
    return {
        "advantage_mean": advantages.mean,
        "advantage_deviation": advantages.deviation,
        "value_mean": targets.mean - errors.mean,
        "return_mean": targets.mean,
        "explained_variance": 1 - (errors.deviation / targets.deviation) ** 2 if targets.deviation else 0.0,
    }


def moments(values: Tensor, learner: Learner) -> Moments:
    """Of this rank's values [n] and those of all others."""
    return Moments(values.double(), learner.ranks, device=learner.device)


def joined(arrays: Sequence[Floats | None]) -> Tensor:
    """All values in their order, float32 on CPU."""
    found = [array for array in arrays if array is not None]
    return torch.from_numpy(np.concatenate(found) if found else np.zeros(0, dtype=np.float32))
