"""Snapshot attempts as tasks: each has a number, and doing one twice is doing it once."""

import time
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.retries import RETRIES, RETRY_DELAYS_S, retry_condition
from tasks.runtime import Runtime


def attempt_number() -> int:
    """A number no earlier attempt of any driver had: whole milliseconds since the epoch. A retry keeps its number."""
    return time.time_ns() // 1_000_000


@task(
    name="attempt-snapshot",
    task_run_name="snapshot-attempt-{number}",
    persist_result=False,
    cache_policy=NO_CACHE,
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAYS_S,
    retry_condition_fn=retry_condition,
)
async def attempt_snapshot(runtime: Runtime, number: int, force: bool, incarnation: str) -> dict[str, Any]:
    """The outcome of attempt `number`: completed with a sequence, or skipped with a reason (also a success)."""
    return await runtime.attempt_snapshot(number, force=force, incarnation=incarnation)
