"""When a trainer checkpoint is due and why, and the metrics that go with it."""

import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from storage.errors import ConfigurationError
from storage.run_config import RunConfig


class Trigger(StrEnum):
    """Why a trainer checkpoint is saved. Several at one step boundary are one checkpoint."""

    PERIOD = "period"
    LAST_STEP = "last_step"
    END_OF_DATA = "end_of_data"
    DEADLINE = "deadline"
    REQUEST = "request"


class CheckpointSchedule:
    """Asked at each step boundary. `clock` gives seconds; the deadline counts from the construction."""

    def __init__(self, config: RunConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._period = config.checkpointing.save_period
        self._max_steps = config.algorithm.max_steps
        after_s = config.checkpointing.must_save_by_s
        self._clock = clock
        self._deadline = None if after_s is None else clock() + after_s
        self._boundary: float | None = None
        self._longest_s = 0.0

    def begin_step(self) -> None:
        """A step begins. Only the first one is measured from here, the others from the boundary before."""
        if self._boundary is None:
            self._boundary = self._clock()

    def due(self, step: int, *, saved_step: int, end_of_data: bool = False) -> Trigger | None:
        """Why the committed step `step` is to be saved now, if it is; `saved_step` is the newest saved one."""
        self._measure()
        if step <= saved_step:
            return None
        if end_of_data:
            return Trigger.END_OF_DATA
        if step >= self._max_steps:
            return Trigger.LAST_STEP
        if self._is_late():
            return Trigger.DEADLINE
        return Trigger.PERIOD if step // self._period > saved_step // self._period else None

    def served(self, trigger: Trigger) -> None:
        """A checkpoint was saved; the deadline demands one once."""
        if trigger is Trigger.DEADLINE or self._is_late():
            self._deadline = None

    def _measure(self) -> None:
        """The longest time between two boundaries: a step with the checkpoint before it."""
        now = self._clock()
        if self._boundary is not None:
            self._longest_s = max(self._longest_s, now - self._boundary)
        self._boundary = now

    def _is_late(self) -> bool:
        """Whether the next boundary, as far away as the farthest so far, might come after the deadline."""
        return self._deadline is not None and self._clock() + self._longest_s >= self._deadline


def step_metrics(report: Mapping[str, Any]) -> dict[str, float]:
    """Every number that says how good a step was, by name."""
    own = {name: report[name] for name in ("rewards_mean", "batch_age") if name in report}
    return {**report.get("metrics", {}), **own}


def require_metric(name: str | None, metrics: Mapping[str, float]) -> None:
    """Raise `ConfigurationError` when retention is to choose by a metric that train steps don't report."""
    if name is not None and name not in metrics:
        raise ConfigurationError(
            f"checkpointing.metric_name is '{name}', but train steps report {', '.join(sorted(metrics))}; choose one "
            "of these and resume the run"
        )
