"""Retention from outside as a task, one for each run."""

import asyncio
from dataclasses import asdict
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from storage.filesystem import open_store
from storage.pruning import plan_prune, prune
from storage.run_config import StoreConfig
from storage.runs import layout_of
from tasks.retries import RETRIES, RETRY_DELAYS_S, retry_condition


@task(
    name="prune-run",
    task_run_name="prune-{run}",
    persist_result=False,
    cache_policy=NO_CACHE,
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAYS_S,
    retry_condition_fn=retry_condition,
)
async def prune_stored_run(run: str, store: StoreConfig, *, apply: bool, take_over: bool = False) -> dict[str, Any]:
    """The plan as plain values with `bytes` and `may_be_live`, and what was `done` (None: it was only looked at).

    Raises: NotFound; RunAlreadyLive when it is to be applied to a run that may be live, before anything is deleted.
    """

    def work() -> dict[str, Any]:
        opened, layout = open_store(store.url, deadline_s=store.deadline_s), layout_of(run)
        if apply:
            plan, done = prune(opened, layout, take_over=take_over)
        else:
            plan, done = plan_prune(opened, layout), None
        facts = {**asdict(plan), "bytes": plan.bytes, "may_be_live": plan.may_be_live}
        return {**facts, "done": None if done is None else asdict(done)}

    return await asyncio.to_thread(work)
