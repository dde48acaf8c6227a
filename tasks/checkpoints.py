"""Trainer checkpoints on request, as a task."""

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.retries import RETRIES, RETRY_DELAYS_S, retry_condition
from tasks.runtime import Runtime


@task(
    name="save-checkpoint",
    persist_result=False,
    cache_policy=NO_CACHE,
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAYS_S,
    retry_condition_fn=retry_condition,
)
async def save_checkpoint(runtime: Runtime, incarnation: str) -> dict[str, Any]:
    """The outcome: completed with step and sequence, or skipped because the step is durable already. Repeating it is
    harmless."""
    return await runtime.checkpoint(incarnation=incarnation)
