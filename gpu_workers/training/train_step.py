"""One optimizer step while it is open: gradients of summed token losses, scaled by the step's tokens at its end."""

import time
from collections.abc import Sequence

import pyarrow as pa
import torch
from torch import Tensor

from gpu_workers.training.advantages import equal_rewards, group_advantages
from gpu_workers.training.batches import TrainingRow, pad_rows, read_groups
from gpu_workers.training.losses import clipped_policy_losses
from gpu_workers.training.optimizer import PolicyOptimizer
from gpu_workers.training.policy import Policy
from gpu_workers.training.ranks import Ranks
from gpu_workers.training.step_statistics import StepStatistics
from storage.errors import BrokenInvariant, StepOutOfOrder
from storage.run_config import AlgorithmConfig

Trained = tuple[TrainingRow, float]
"""A row that enters the loss, and its advantage."""


class TrainStep:
    """Takes whole groups in order, then updates the policy once.

    The loss is the mean over all trained tokens of the step (token-mean; DAPO, arXiv:2503.14476, section 3.3). How
    many there are is known at the end only, so gradients of *sums* are accumulated and divided then.

    Forward passes hold `microbatch_rows` rows each, counted over the whole step: rows of a call that do not fill one
    wait for the next call or the end. The result thus depends on the rows and their order, never on how calls cut
    them. Row i of those that enter the loss belongs to rank i mod size. Groups of equal rewards and masked rows have
    no gradient and are not computed; a step that has nothing else leaves policy and optimizer as they are.
    """

    def __init__(
        self,
        policy: Policy,
        optimizer: PolicyOptimizer,
        ranks: Ranks,
        config: AlgorithmConfig,
        *,
        device: torch.device,
        version: int | None,
    ) -> None:
        self._policy = policy
        self._optimizer = optimizer
        self._ranks = ranks
        self._config = config
        self._device = device
        self._version = version
        self._statistics = StepStatistics(config, device=device)
        self._pending: list[Trained] = []
        self._group_ids: set[str] = set()
        self._rewards: list[float] = []
        self._equal_groups = 0
        self._masked_rows = 0
        self._trained_rows = 0
        self._seconds = 0.0
        self._usable = True
        optimizer.zero_gradients()

    def add(self, batches: Sequence[pa.RecordBatch]) -> dict[str, float]:
        """Accumulate the gradients of whole groups; returns what the call brought: groups, rows, tokens, seconds.

        Raises: BrokenInvariant for rows that `read_groups` refuses or a group that came before (the step is as it was
        and can go on), and for a loss that isn't finite (the step has to be begun again).
        """
        started = time.perf_counter()
        self._demand_usable()
        groups = self._read(batches)
        trained = [row for group in groups for row in self._take(group)]
        self._pending += self._own(trained)
        while len(self._pending) >= self._config.microbatch_rows:
            self._accumulate(self._next_microbatch())
        self._refuse_infinite_loss()
        seconds = time.perf_counter() - started
        self._seconds += seconds
        return {
            "groups": float(len(groups)),
            "rows": float(sum(len(group) for group in groups)),
            "tokens": float(sum(row.num_trained_tokens for row, _ in trained)),
            "seconds": seconds,
        }

    def flush(self) -> None:
        """Compute the rows that wait for a full forward pass. Call it after the last rows of a step only: what comes
        later starts a new pass. Raises: BrokenInvariant for a loss that isn't finite."""
        started = time.perf_counter()
        self._demand_usable()
        self._accumulate_pending()
        self._refuse_infinite_loss()
        self._seconds += time.perf_counter() - started

    def apply(self) -> dict[str, float]:
        """Compute what is pending, add over ranks, clip, update. Returns the step's metrics.

        Raises: BrokenInvariant, before the update, if loss or gradient norm isn't finite.
        """
        started = time.perf_counter()
        self._demand_usable()
        self._usable = False
        self._accumulate_pending()
        self._statistics.add_ranks(self._ranks)
        self._refuse_infinite_loss()
        gradient_norm = 0.0
        if self._statistics.num_tokens:
            self._ranks.add(self._optimizer.gradients())
            gradient_norm = self._optimizer.apply(num_tokens=self._statistics.num_tokens)
        return {
            **self._statistics.metrics(),
            "reward": sum(self._rewards) / max(len(self._rewards), 1),
            "gradient_norm": gradient_norm,
            "groups": float(len(self._group_ids)),
            "equal_reward_groups": float(self._equal_groups),
            "rows": float(len(self._rewards)),
            "masked_rows": float(self._masked_rows),
            "seconds": self._seconds + time.perf_counter() - started,
        }

    def _read(self, batches: Sequence[pa.RecordBatch]) -> list[list[TrainingRow]]:
        groups = read_groups(
            batches,
            group_size=self._config.num_generations_per_prompt,
            vocabulary_size=self._policy.vocabulary_size,
        )
        ids = [group[0].group_id for group in groups]
        again = [
            group_id for index, group_id in enumerate(ids) if group_id in self._group_ids or group_id in ids[:index]
        ]
        if again:
            raise BrokenInvariant(f"group {again[0]} arrives twice in one step; every group is trained once")
        self._group_ids.update(ids)
        return groups

    def _take(self, group: list[TrainingRow]) -> list[Trained]:
        rewards = torch.tensor([[row.reward for row in group]], dtype=torch.float64)
        self._rewards += [row.reward for row in group]
        self._masked_rows += sum(row.masked for row in group)
        if equal_rewards(rewards).item():
            self._equal_groups += 1
            return []
        divide = self._config.divide_by_standard_deviation
        advantages = group_advantages(rewards, divide_by_standard_deviation=divide)[0].tolist()
        return [(row, value) for row, value in zip(group, advantages, strict=True) if row.num_trained_tokens]

    def _own(self, trained: list[Trained]) -> list[Trained]:
        """This rank's share; rows are numbered over the whole step."""
        first = self._trained_rows
        self._trained_rows += len(trained)
        return [row for index, row in enumerate(trained, first) if index % self._ranks.size == self._ranks.rank]

    def _accumulate_pending(self) -> None:
        while self._pending:
            self._accumulate(self._next_microbatch())

    def _next_microbatch(self) -> list[Trained]:
        size = self._config.microbatch_rows
        rows, self._pending = self._pending[:size], self._pending[size:]
        return rows

    def _accumulate(self, microbatch: list[Trained]) -> None:
        batch = pad_rows([row for row, _ in microbatch], device=self._device)
        of_rows = torch.tensor([value for _, value in microbatch], dtype=torch.float32, device=self._device)
        advantages = of_rows[batch.rows]
        scores = self._policy.score(batch)
        losses = clipped_policy_losses(
            scores.logprobs,
            batch.recorded_logprobs,
            advantages,
            clip_low=self._config.clip_low,
            clip_high=self._config.clip_high,
            importance_weight_cap=self._config.importance_weight_cap,
        )
        losses.sum().backward()
        self._statistics.add(
            losses=losses.detach(),
            log_ratio=scores.logprobs.detach() - batch.recorded_logprobs,
            advantages=advantages,
            entropies=scores.entropies,
            fresh=self._fresh(batch.versions),
        )

    def _fresh(self, versions: Tensor) -> Tensor:
        """Which tokens were generated under the version that is being trained (none while it is unknown)."""
        return torch.zeros_like(versions, dtype=torch.bool) if self._version is None else versions == self._version

    def _refuse_infinite_loss(self) -> None:
        if not self._statistics.loss_is_finite:
            self._usable = False
            raise BrokenInvariant(
                f"the loss is not finite after {self._statistics.num_tokens} tokens of {len(self._group_ids)} groups; "
                "nothing was updated; look at the weights (their last gradient norm) and at the rows' log-probabilities"
            )

    def _demand_usable(self) -> None:
        if not self._usable:
            raise StepOutOfOrder("the open step ended in an error or was applied; begin it again with begin_step")
