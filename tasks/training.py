"""Train steps as tasks: one task run drives the numbered steps `first` to `last`."""

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.retries import RETRIES, RETRY_DELAYS_S, retry_condition
from tasks.runtime import Runtime

# Where steps are faster, a task run is a segment of about this long: Prefect keeps up with one task run a second.
SEGMENT_S = 10.0
STEP_WORTH_A_TASK_S = 1.0


def segment_end(first: int, *, max_steps: int, step_s: float | None) -> int:
    """The last step of the segment that starts with `first`, given the seconds that steps take (None: not known)."""
    is_slow = step_s is None or step_s >= STEP_WORTH_A_TASK_S
    length = 1 if is_slow else max(1, int(SEGMENT_S / max(step_s or 0.0, 1e-3)))
    return min(first + length - 1, max_steps)


@task(
    name="train-steps",
    task_run_name="train-steps-{first}-{last}",
    persist_result=False,
    cache_policy=NO_CACHE,
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAYS_S,
    retry_condition_fn=retry_condition,
)
async def train_steps(runtime: Runtime, first: int, last: int, incarnation: str) -> list[dict[str, Any]]:
    """Reports of the steps `first` to `last`. Committed steps are not trained again, so that a retry is harmless.

    Fewer reports than steps mean that the data ended. Raises StepOutOfOrder, StaleIncarnation, and what the run
    failed with.
    """
    return await runtime.train_steps(first, last, incarnation)
