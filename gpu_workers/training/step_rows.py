"""Which rows of a step are trained: groups are checked, compared, masked and counted, in the order they arrive."""

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import torch

from gpu_workers.training.advantages import equal_rewards, group_advantages
from gpu_workers.training.batches import TrainingRow, read_groups
from storage.algorithm_config import AlgorithmConfig
from storage.errors import BrokenInvariant


@dataclass(frozen=True, slots=True)
class TrainedRow:
    """A row that enters the loss: its number among those of the step, and its advantage (0 where a critic tells)."""

    number: int
    row: TrainingRow
    advantage: float


@dataclass(frozen=True, slots=True)
class Taken:
    """What one call brought: its groups, all their rows, those that are trained and their sampled tokens."""

    num_groups: int
    num_rows: int
    trained: tuple[TrainedRow, ...]
    num_tokens: int


class StepRows:
    """All rows of the open step. Every rank sees all of them, so that these figures are the same on each."""

    def __init__(self, config: AlgorithmConfig, *, vocabulary_size: int) -> None:
        self._config = config
        self._vocabulary_size = vocabulary_size
        self._group_ids: set[str] = set()
        self._rewards: list[float] = []
        self._equal_groups = 0
        self._masked_rows = 0
        self._truncated_rows = 0
        self._lengths: list[int] = []
        self._row_ids: list[str] = []

    @property
    def num_groups(self) -> int:
        """Groups so far."""
        return len(self._group_ids)

    @property
    def lengths(self) -> Sequence[int]:
        """Trained tokens of each trained row, by its number."""
        return self._lengths

    @property
    def row_ids(self) -> Sequence[str]:
        """Id of each trained row, by its number."""
        return self._row_ids

    @property
    def num_tokens(self) -> int:
        """Trained tokens of the whole step, all ranks."""
        return sum(self._lengths)

    def take(self, batches: Sequence[pa.RecordBatch]) -> Taken:
        """Add whole groups. Raises: BrokenInvariant, with nothing added, for rows that `read_groups` refuses and for a
        group that came before."""
        size = self._config.num_generations_per_prompt
        groups = read_groups(batches, group_size=size, vocabulary_size=self._vocabulary_size)
        self._refuse_second_arrival([group[0].group_id for group in groups])
        trained = tuple(row for group in groups for row in self._take_group(group))
        tokens = sum(self._lengths[row.number] for row in trained)
        return Taken(len(groups), sum(len(group) for group in groups), trained, tokens)

    def metrics(self) -> dict[str, float]:
        """Counts, and the mean reward of all rows."""
        return {
            "reward": sum(self._rewards) / max(len(self._rewards), 1),
            "groups": float(self.num_groups),
            "equal_reward_groups": float(self._equal_groups),
            "rows": float(len(self._rewards)),
            "trained_rows": float(len(self._lengths)),
            "masked_rows": float(self._masked_rows),
            "truncated_rows": float(self._truncated_rows),
        }

    def _refuse_second_arrival(self, ids: Sequence[str]) -> None:
        for index, group_id in enumerate(ids):
            if group_id in self._group_ids or group_id in ids[:index]:
                raise BrokenInvariant(f"group {group_id} arrives twice in one step; every group is trained once")
        self._group_ids.update(ids)

    def _take_group(self, group: list[TrainingRow]) -> list[TrainedRow]:
        rewards = torch.tensor([[row.reward for row in group]], dtype=torch.float64)
        is_equal = len(group) > 1 and bool(equal_rewards(rewards).item())
        masked = [row.masked or (self._config.mask_truncated and row.is_truncated) for row in group]
        self._rewards += [row.reward for row in group]
        self._equal_groups += is_equal
        self._masked_rows += sum(masked)
        self._truncated_rows += sum(row.is_truncated for row in group)
        if self._config.kind == "ppo":
            advantages = [0.0] * len(group)
        elif is_equal and self._config.filter_equal_rewards:
            return []
        else:
            advantages = self._compare(rewards)
        kept = zip(group, advantages, masked, strict=True)
        return [self._number(row, value) for row, value, mask in kept if not mask and row.num_sampled_tokens]

    def _compare(self, rewards: torch.Tensor) -> list[float]:
        divide, baseline = self._config.divide_by_standard_deviation, self._config.baseline
        found = group_advantages(rewards, divide_by_standard_deviation=divide, baseline=baseline)
        values: list[float] = found[0].tolist()
        return values

    def _number(self, row: TrainingRow, advantage: float) -> TrainedRow:
        self._lengths.append(row.num_sampled_tokens)
        self._row_ids.append(row.row_id)
        return TrainedRow(len(self._lengths) - 1, row, advantage)
