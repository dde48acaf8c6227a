"""Deployment `verify`: read every published bundle of a run, or of a whole store, and compare it with its manifest."""

from collections.abc import Mapping
from typing import Annotated, Any

from prefect import flow, get_run_logger
from prefect.runtime import flow_run
from pydantic import Field

from flows.home import Home
from storage.run_config import StoreConfig
from storage.runs import RUN_NAME
from tasks.bundle_checks import BundleCheck, RunReport, corruption_of
from tasks.reports import publish_verification
from tasks.verification import list_runs, verify_stored_run

RunName = Annotated[str, Field(pattern=RUN_NAME)]


def name_of_run() -> str:
    """What the flow run is about."""
    parameters: Mapping[str, Any] = flow_run.parameters
    what = parameters.get("run") or "store"
    return f"drill-{what}" if parameters.get("drill") else f"verify-{what}"


@flow(name="verify", flow_run_name=name_of_run, persist_result=False)
async def verify(
    run: RunName | None = None, store_url: str | None = None, drill: bool = False, record: bool = True
) -> list[dict[str, Any]]:
    """Read every published bundle and compare it with its manifest. Fails with every defect when one is bad.

    Args:
        run: Name of the run to verify. Empty: every run of the store.
        store_url: Folder or fsspec URL of the store. Empty: the store of this home.
        drill: Also restore each bundle into a scratch runtime and compare the restored state. Uses no GPU.
        record: Keep the results beside the manifests, so that a bad bundle is not restored. Off: nothing is written.
    """
    store = StoreConfig(url=store_url or str(Home.current().store))
    names = await list_runs(store, may_be_empty=store_url is None) if run is None else [run]
    found = [await verify_stored_run(name, store, drill=drill, record=record) for name in names]
    for report in found:
        bad = sum(bool(check["problem"]) for check in report["checks"])
        get_run_logger().info("%s: %d bundles, of them %d bad", report["run"], len(report["checks"]), bad)
        for warning in report["warnings"]:
            get_run_logger().warning("%s: %s", report["run"], warning)
    rows = [{"run": report["run"], **check} for report in found for check in report["checks"]]
    await publish_verification(rows, run, store.url)
    error = corruption_of([_report(report) for report in found])
    if error is not None:
        raise error
    return rows


def _report(plain: Mapping[str, Any]) -> RunReport:
    return RunReport(plain["run"], [BundleCheck(**check) for check in plain["checks"]], list(plain["warnings"]))
