"""Deployment `verify`: read every published bundle of a run and compare it with its manifest."""

from typing import Any

from prefect import flow

from flows.home import Home
from storage.run_config import StoreConfig
from tasks.bundle_checks import BundleCheck, corruption
from tasks.reports import publish_verification
from tasks.verification import verify_store


@flow(name="verify", flow_run_name="verify-{run}", persist_result=False)
async def verify(run: str, store_url: str | None = None) -> list[dict[str, Any]]:
    """Fails with every defect when one bundle is not what was published. By default in this home's store."""
    rows = await verify_store(run, StoreConfig(url=store_url or str(Home.current().store)))
    await publish_verification(rows, run)
    error = corruption(run, [BundleCheck(**row) for row in rows])
    if error is not None:
        raise error
    return rows
