"""Snapshot attempts as tasks: each has a number, and doing one twice is doing it once."""

import time
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed

from tasks.retries import RETRIES, RETRY_DELAYS_S, retry_condition
from tasks.runtime import Runtime


def attempt_number() -> int:
    """A number no earlier attempt of any driver had: whole milliseconds since the epoch. A retry keeps its number."""
    return time.time_ns() // 1_000_000


async def attempt_snapshot(runtime: Runtime, number: int, force: bool, incarnation: str) -> dict[str, Any]:
    """The outcome of attempt `number`: completed with a sequence, or skipped with a reason (also a success)."""
    attempt: Any = _attempt  # Prefect's type says that awaiting it gives no state
    state = await attempt(runtime, number, force, incarnation, return_state=True)
    outcome: dict[str, Any] = await state.aresult()
    return outcome


@task(
    name="attempt-snapshot",
    task_run_name="snapshot-attempt-{number}",
    persist_result=False,
    cache_policy=NO_CACHE,
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAYS_S,
    retry_condition_fn=retry_condition,
)
async def _attempt(runtime: Runtime, number: int, force: bool, incarnation: str) -> State[dict[str, Any]]:
    """The outcome, in a state that says in the UI what became of the attempt."""
    outcome = await runtime.attempt_snapshot(number, force=force, incarnation=incarnation)
    if outcome["outcome"] == "completed":
        return Completed(data=outcome, message=f"snapshot {outcome['sequence']}")
    return Completed(data=outcome, name="Skipped", message=outcome["reason"])
