"""How many failures a sibling survives, how long to pause before trying again, and when a run has given up too much."""

import math

from storage.errors import BatchIncomplete, DataFailure, InfrastructureFailure, RolloutFailure
from storage.records import Sibling
from storage.run_config import RunConfig


class FailurePolicy:
    """Two budgets per sibling (infrastructure, data), one for the run, and the smallest step."""

    def __init__(self, config: RunConfig) -> None:
        self._limits = config.async_rl
        self._step_size = config.algorithm.num_prompts_per_step

    def is_spent(self, sibling: Sibling) -> bool:
        """Whether the sibling has failed more often than it may."""
        return self.is_infrastructure_spent(sibling) or sibling.data_failures > self._limits.max_data_failures

    def is_infrastructure_spent(self, sibling: Sibling) -> bool:
        """Whether it is the budget of infrastructure failures that is spent."""
        return sibling.infrastructure_failures > self._limits.max_infrastructure_failures

    def pause_s(self, sibling: Sibling) -> float:
        """Seconds to wait before the next attempt: doubles with each infrastructure failure, up to a cap."""
        doublings = max(sibling.infrastructure_failures - 1, 0)
        pause = self._limits.retry_backoff_s * 2.0**doublings if sibling.infrastructure_failures else 0.0
        return min(pause, self._limits.retry_backoff_max_s)

    def require_skippable(self, group_id: str, *, already_skipped: int, infrastructure: bool, message: str) -> None:
        """Raise the original failure when the run may not give up one more prompt."""
        if already_skipped < self._limits.max_skipped_prompts:
            return
        failure: type[RolloutFailure] = InfrastructureFailure if infrastructure else DataFailure
        raise failure(
            f"group {group_id} failed for good ({message}) and async_rl.max_skipped_prompts "
            f"{self._limits.max_skipped_prompts} prompts were given up already; mend the cause and resume the run"
        )

    def require_step_size(self, target_step: int, *, shortfall: int) -> None:
        """Raise when a step would become smaller than it may."""
        floor = max(1, math.ceil(self._limits.min_step_batch_fraction * self._step_size))
        left = self._step_size - shortfall
        if left < floor:
            raise BatchIncomplete(
                f"train step {target_step + 1} would shrink to {left} of {self._step_size} groups; "
                f"async_rl.min_step_batch_fraction {self._limits.min_step_batch_fraction} demands {floor}. "
                "Mend the cause of the dropped prompts and resume the run"
            )
