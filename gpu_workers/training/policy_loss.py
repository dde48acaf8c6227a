"""The policy's loss on one forward pass of prepared rows: gradients are added to, and everything is measured."""

import math
from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from gpu_workers.training.batches import TokenBatch, pad_rows
from gpu_workers.training.learner import Learner
from gpu_workers.training.losses import (
    TokenScores,
    clipped_policy_losses,
    clipped_tokens,
    importance_weights,
    kl_penalties,
    token_weights,
)
from gpu_workers.training.preparation import Floats, PreparedRow
from gpu_workers.training.step_statistics import StepStatistics


class PolicyLoss:
    """Sum over tokens of weight · (clipped policy loss + KL penalty - entropy bonus), in token order.

    The sum becomes the configured mean when the optimizer divides it by `losses.loss_denominator` of all rows of its
    update: gradients thus do not depend on how rows are cut into passes, but for rounding.
    """

    def __init__(self, learner: Learner, statistics: StepStatistics) -> None:
        self._learner = learner
        self._config = learner.config
        self._statistics = statistics

    def add(self, rows: Sequence[PreparedRow], *, version: int | None, train: bool = True) -> None:
        """Add the gradients of these rows, or with `train` false only measure them.

        `version`: tokens generated under it are *fresh*, see `StepStatistics`; None: no token is.
        """
        batch = pad_rows([row.row for row in rows], device=self._learner.device)
        with nullcontext() if train else torch.no_grad():
            scores = self._learner.policy.score(batch, entropy_gradient=self._config.entropy_coefficient > 0)
            losses = self._losses(rows, batch, scores, version)
            if train:
                losses.sum().backward()

    def _losses(
        self, rows: Sequence[PreparedRow], batch: TokenBatch, scores: TokenScores, version: int | None
    ) -> Tensor:
        """[tokens], weighted; counted in the statistics."""
        config = self._config
        advantages = self._tensor([row.advantages for row in rows])
        losses, log_ratio, truncated = self._clipped(rows, batch, scores, advantages)
        penalties = torch.zeros_like(losses)
        if self._learner.reference is not None:
            reference = self._tensor([row.reference_logprobs for row in rows])
            penalties = kl_penalties(scores.logprobs, reference, estimator=config.kl_estimator)
            losses = losses + config.kl_coefficient * penalties
        if config.entropy_coefficient > 0:
            losses = losses - config.entropy_coefficient * scores.entropies
        lengths = torch.tensor([row.length for row in rows], device=self._learner.device)
        losses = losses * token_weights(
            lengths,
            batch.rows,
            normalization=config.loss_normalization,
            constant_length=self._learner.normalization_length,
        )
        self._statistics.add(
            losses=losses.detach(),
            log_ratio=scores.logprobs.detach() - batch.recorded_logprobs,
            clipped=clipped_tokens(log_ratio, advantages, clip_low=config.clip_low, clip_high=config.clip_high),
            truncated=truncated,
            entropies=scores.entropies.detach(),
            penalties=penalties.detach(),
            fresh=torch.zeros_like(truncated) if version is None else batch.versions == version,
        )
        return losses

    def _clipped(
        self, rows: Sequence[PreparedRow], batch: TokenBatch, scores: TokenScores, advantages: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(losses, log of the clipped ratio without gradient, whether importance weights were truncated)."""
        config, recorded = self._config, batch.recorded_logprobs
        cap = config.importance_weight_cap
        by_trainer = config.clip_reference == "trainer"
        start = self._start_logprobs(rows, scores.logprobs) if by_trainer else recorded
        losses = clipped_policy_losses(
            scores.logprobs,
            start,
            advantages,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            importance_weight_cap=cap if config.importance_correction == "token" and not by_trainer else None,
        )
        log_ratio = scores.logprobs.detach() - start
        if config.importance_correction == "none":
            return losses, log_ratio, torch.zeros_like(log_ratio, dtype=torch.bool)
        if not by_trainer:
            return losses, log_ratio, (advantages < 0) & (log_ratio > math.log(cap))
        weights, truncated = importance_weights(
            start - recorded,
            batch.rows,
            num_rows=batch.num_rows,
            per_sequence=config.importance_correction == "sequence",
            cap=cap,
        )
        return losses * weights, log_ratio, truncated

    def _start_logprobs(self, rows: Sequence[PreparedRow], current: Tensor) -> Tensor:
        """Those prepared; where a step is a single update, the current ones are those of its start."""
        return current.detach() if rows[0].start_logprobs is None else self._tensor([r.start_logprobs for r in rows])

    def _tensor(self, arrays: Sequence[Floats | None]) -> Tensor:
        return torch.from_numpy(np.concatenate([a for a in arrays if a is not None])).to(self._learner.device)
