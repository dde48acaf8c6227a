"""Verification of a run's store as a task."""

import asyncio
from dataclasses import asdict
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from storage.filesystem import open_store
from storage.layout import RunLayout
from storage.run_config import StoreConfig
from tasks.bundle_checks import check_run
from tasks.retries import RETRIES, RETRY_DELAYS_S, retry_condition


@task(
    name="verify-store",
    persist_result=False,
    cache_policy=NO_CACHE,
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAYS_S,
    retry_condition_fn=retry_condition,
)
async def verify_store(run: str, store: StoreConfig) -> list[dict[str, Any]]:
    """`check_run` as plain dicts, one per bundle. Corruption is reported, not raised."""

    def check() -> list[dict[str, Any]]:
        opened = open_store(store.url, deadline_s=store.deadline_s)
        return [asdict(found) for found in check_run(opened, RunLayout(run))]

    return await asyncio.to_thread(check)
