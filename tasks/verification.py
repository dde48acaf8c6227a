"""Verification of a store as tasks, one for each run."""

import asyncio
from dataclasses import asdict
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from storage.errors import NotFound
from storage.filesystem import open_store
from storage.run_config import StoreConfig
from storage.runs import layout_of
from tasks.bundle_checks import runs_of, verify_run
from tasks.restore_drill import Drill
from tasks.retries import RETRIES, RETRY_DELAYS_S, retry_condition


@task(
    name="list-runs",
    persist_result=False,
    cache_policy=NO_CACHE,
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAYS_S,
    retry_condition_fn=retry_condition,
)
async def list_runs(store: StoreConfig, *, may_be_empty: bool) -> list[str]:
    """The runs of a store. Raises NotFound when it holds none, unless it `may_be_empty`: a home that is new."""
    try:
        return await asyncio.to_thread(lambda: runs_of(open_store(store.url, deadline_s=store.deadline_s)))
    except NotFound:
        if may_be_empty:
            return []
        raise


@task(
    name="verify-run",
    task_run_name="verify-{run}",
    persist_result=False,
    cache_policy=NO_CACHE,
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAYS_S,
    retry_condition_fn=retry_condition,
)
async def verify_stored_run(run: str, store: StoreConfig, *, drill: bool, record: bool) -> dict[str, Any]:
    """`verify_run` as plain values: `run`, `checks`, `warnings`. Corruption is reported, not raised."""

    def verify() -> dict[str, Any]:
        opened = open_store(store.url, deadline_s=store.deadline_s)
        return asdict(verify_run(opened, layout_of(run), drill=Drill() if drill else None, record=record))

    return await asyncio.to_thread(verify)
