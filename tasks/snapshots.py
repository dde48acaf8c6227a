"""Snapshot attempts as tasks: each has a number, and doing one twice is doing it once."""

import time
from contextlib import suppress
from typing import Any

import anyio
from prefect import task
from prefect.cache_policies import NO_CACHE

from storage.errors import MidflightError
from tasks.retries import RETRIES, RETRY_DELAYS_S, retry_condition
from tasks.runtime import Runtime

LEAVING_DEADLINE_S = 15.0


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


async def publish_before_leaving(runtime: Runtime, incarnation: str) -> None:
    """A last forced snapshot for a flow that is being cancelled: bounded, and no reason to stay."""
    with anyio.move_on_after(LEAVING_DEADLINE_S, shield=True), suppress(MidflightError):
        await runtime.attempt_snapshot(attempt_number(), force=True, incarnation=incarnation)
