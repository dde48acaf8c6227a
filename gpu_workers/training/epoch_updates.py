"""A step of several epochs and minibatches, of policy and critic: rows are prepared while they arrive, updates follow.

All updates happen in `finish`, the optimizer-commit window: until then no network has changed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_workers.training.advantages import standardized
from gpu_workers.training.critic_loss import CriticLoss, describe_values, joined, moments
from gpu_workers.training.learner import Learner
from gpu_workers.training.losses import loss_denominator
from gpu_workers.training.optimizer import Optimizer
from gpu_workers.training.policy_loss import PolicyLoss
from gpu_workers.training.preparation import PreparedRow, prepare
from gpu_workers.training.step_rows import StepRows, TrainedRow
from gpu_workers.training.step_statistics import CriticStatistics, StepStatistics
from gpu_workers.training.train_step import infinite_loss


class EpochUpdates:
    """Each epoch visits every row once, in `num_minibatches` updates of each network.

    With several minibatches the rows of an epoch are shuffled by their ids and (run seed, step, epoch), never by what
    happened before nor by when they arrived, so that a restored trainer goes on as it would have. In the first
    `policy_training_start_step` steps only the critic is updated; the policy is measured once.
    """

    def __init__(self, learner: Learner, *, step: int, version: int | None) -> None:
        self._learner = learner
        self._config = learner.config
        self._step = step
        self._version = version
        self._trains_policy = step > learner.config.policy_training_start_step
        self._statistics = StepStatistics(device=learner.device)
        self._critic_statistics = CriticStatistics(device=learner.device)
        self._loss = PolicyLoss(learner, self._statistics)
        critic = learner.critic
        self._critic_loss = None if critic is None else CriticLoss(learner, critic, self._critic_statistics)
        self._prepared: list[PreparedRow] = []
        self._norms: list[float] = []
        self._critic_norms: list[float] = []
        learner.optimizer.zero_gradients()
        if learner.critic is not None:
            learner.critic.optimizer.zero_gradients()

    @property
    def num_updates(self) -> int:
        """Updates of policy and critic."""
        return len(self._norms) + len(self._critic_norms)

    def take(self, rows: Sequence[TrainedRow]) -> None:
        """Prepare rows; no gradient is computed yet."""
        self._prepared += prepare(rows, self._learner)

    def finish(self, rows: StepRows) -> dict[str, float]:
        """All epochs."""
        described = {} if self._learner.critic is None else describe_values(self._prepared, self._learner)
        own = {row.number: row for row in self._with_final_advantages()}
        policy_epochs, critic_epochs = self._epochs() if rows.num_tokens else (0, 0)
        for epoch in range(max(policy_epochs, critic_epochs)):
            for numbers in self._minibatches(rows.row_ids, epoch):
                lengths = [rows.lengths[number] for number in numbers]
                mine = [own[number] for number in numbers.tolist() if number in own]
                if epoch < policy_epochs:
                    self._visit_policy(mine, denominator=self._denominator(lengths))
                if epoch < critic_epochs:
                    self._update_critic(mine, num_tokens=sum(lengths))
        return {**self._metrics(rows, policy_epochs), **described}

    def _epochs(self) -> tuple[int, int]:
        """(policy, critic)."""
        policy = self._config.num_epochs if self._trains_policy else 1
        critic = self._config.critic.num_epochs or self._config.num_epochs
        return policy, critic if self._learner.critic is not None else 0

    def _with_final_advantages(self) -> Sequence[PreparedRow]:
        """Advantages of a critic get mean 0 and deviation 1 over the trained tokens of the step, all ranks."""
        if self._learner.critic is None or not self._config.critic.normalize_advantages:
            return self._prepared
        over_all = moments(joined([row.advantages for row in self._prepared]), self._learner)

        def changed(row: PreparedRow) -> PreparedRow:
            advantages = torch.from_numpy(row.advantages)
            return replace(
                row, advantages=standardized(advantages, mean=over_all.mean, deviation=over_all.deviation).numpy()
            )

        return [changed(row) for row in self._prepared]

    def _minibatches(self, row_ids: Sequence[str], epoch: int) -> Iterator[NDArray[np.int64]]:
        """Numbers of rows, those of all ranks, for each update.

        Ids are shuffled, not places: a row's minibatch doesn't depend on when it arrived.
        """
        count = min(self._config.num_minibatches, len(row_ids))
        order = np.arange(len(row_ids))
        if count > 1:
            random = np.random.default_rng((self._learner.seed, self._step, epoch))
            order = np.argsort(np.array(row_ids))[random.permutation(len(row_ids))]
        yield from np.array_split(order, count)

    def _visit_policy(self, rows: Sequence[PreparedRow], *, denominator: int) -> None:
        # After the first update the policy isn't the published version any more: no token is fresh then.
        version = None if self._norms else self._version
        for microbatch in self._microbatches(rows):
            self._loss.add(microbatch, version=version, train=self._trains_policy)
        self._demand("loss", self._statistics.loss_is_finite)
        if self._trains_policy:
            self._norms.append(self._apply(self._learner.optimizer, denominator))

    def _update_critic(self, rows: Sequence[PreparedRow], *, num_tokens: int) -> None:
        if self._critic_loss is None or self._learner.critic is None:
            return
        for microbatch in self._microbatches(rows):
            self._critic_loss.add(microbatch)
        self._demand("critic's loss", self._critic_statistics.loss_is_finite)
        self._critic_norms.append(self._apply(self._learner.critic.optimizer, num_tokens))

    def _demand(self, what: str, is_finite: bool) -> None:
        """Raise on all ranks if a loss isn't finite on one: none may wait for the gradients of another."""
        infinite = torch.tensor(float(not is_finite), device=self._learner.device)
        self._learner.ranks.maximum(infinite)
        if infinite.item():
            raise infinite_loss(what, self._statistics.num_tokens)

    def _apply(self, optimizer: Optimizer, denominator: int) -> float:
        self._learner.ranks.add(optimizer.gradients())
        norm = optimizer.apply(denominator=denominator)
        optimizer.zero_gradients()
        return norm

    def _microbatches(self, rows: Sequence[PreparedRow]) -> Iterator[Sequence[PreparedRow]]:
        size = self._config.microbatch_rows
        return (rows[first : first + size] for first in range(0, len(rows), size))

    def _denominator(self, lengths: Sequence[int]) -> int:
        normalization = self._config.loss_normalization
        return loss_denominator(num_tokens=sum(lengths), num_rows=len(lengths), normalization=normalization)

    def _metrics(self, rows: StepRows, visits: int) -> dict[str, float]:
        """`visits`: how often the policy's loss of every row was measured."""
        ranks = self._learner.ranks
        self._statistics.add_ranks(ranks)
        measured = self._statistics.metrics(
            denominator=visits * self._denominator(rows.lengths), with_reference=self._learner.reference is not None
        )
        measured["gradient_norm"] = _mean(self._norms)
        if self._learner.critic is None:
            return measured
        self._critic_statistics.add_ranks(ranks)
        return {
            **measured,
            **self._critic_statistics.metrics(),
            "value_gradient_norm": _mean(self._critic_norms),
            "critic_warmup": float(not self._trains_policy),
        }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
