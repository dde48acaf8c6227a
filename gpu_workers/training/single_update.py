"""A step that is one optimizer update of the policy: gradients are accumulated while rows arrive."""

from collections.abc import Sequence

from gpu_workers.training.learner import Learner
from gpu_workers.training.losses import loss_denominator
from gpu_workers.training.policy_loss import PolicyLoss
from gpu_workers.training.preparation import prepare
from gpu_workers.training.step_rows import StepRows, TrainedRow
from gpu_workers.training.step_statistics import StepStatistics
from gpu_workers.training.train_step import infinite_loss


class SingleUpdate:
    """How many tokens and rows a step has is known at its end only: sums are accumulated and divided then."""

    def __init__(self, learner: Learner, *, version: int | None) -> None:
        self._learner = learner
        self._version = version
        self._statistics = StepStatistics(device=learner.device)
        self._loss = PolicyLoss(learner, self._statistics)
        self.num_updates = 0
        learner.optimizer.zero_gradients()

    def take(self, rows: Sequence[TrainedRow]) -> None:
        """Accumulate the gradients of rows."""
        self._loss.add(prepare(rows, self._learner), version=self._version)
        self._refuse_infinite_loss()

    def finish(self, rows: StepRows) -> dict[str, float]:
        """Add over ranks, clip, update."""
        ranks, optimizer = self._learner.ranks, self._learner.optimizer
        self._statistics.add_ranks(ranks)
        self._refuse_infinite_loss()
        denominator = loss_denominator(
            num_tokens=rows.num_tokens,
            num_rows=len(rows.lengths),
            normalization=self._learner.config.loss_normalization,
        )
        gradient_norm = 0.0
        if rows.num_tokens:
            ranks.add(optimizer.gradients())
            gradient_norm = optimizer.apply(denominator=denominator)
            self.num_updates = 1
        with_reference = self._learner.reference is not None
        measured = self._statistics.metrics(denominator=denominator, with_reference=with_reference)
        return {**measured, "gradient_norm": gradient_norm}

    def _refuse_infinite_loss(self) -> None:
        if not self._statistics.loss_is_finite:
            raise infinite_loss("loss", self._statistics.num_tokens)
