"""Deployment `report`: what the store and the trace say about a run, as pictures and tables in Prefect's UI.

It reads the store only, so that it works on a run that is live, over, or somebody else's.
"""

import asyncio
from typing import Annotated, Any

from prefect import flow
from pydantic import Field

from flows.home import Home
from flows.inspect_command import audit_facts, stop_facts
from flows.tags import tag_with_run
from storage.errors import BrokenInvariant, NoRestorableState
from storage.filesystem import open_store
from storage.layout import RunLayout
from storage.runs import RUN_NAME, layout_of
from storage.trace_analysis import stop_cost
from tasks.accounting import audit
from tasks.bundle_checks import log_of
from tasks.reports import publish_run_report
from tasks.run_progress import RunProgress, progress_of

RunName = Annotated[str, Field(pattern=RUN_NAME)]


@flow(name="report", flow_run_name="report-{run}", persist_result=False)
async def report(run: RunName, store_url: str | None = None) -> dict[str, Any]:
    """Curves, the cost of each stop, and the exactly-once audit. Fails when the audit finds a broken promise.

    Args:
        run: Name of the run: its folder in the store. It may be live, over, or somebody else's.
        store_url: Folder or fsspec URL of the store. Empty: the store of this home.
    """
    await tag_with_run(run)
    url = store_url or str(Home.current().store)
    progress, stops, facts, problems = await asyncio.to_thread(read_run, url, layout_of(run))
    await publish_run_report(run, progress, stops, facts)
    if problems:
        raise BrokenInvariant(f"the audit of run {run} found: {'; '.join(problems)}")
    return {"step": progress.step, "stops": len(stops), "audit": facts}


def read_run(
    store_url: str, layout: RunLayout
) -> tuple[RunProgress, list[dict[str, object]], dict[str, object], list[str]]:
    """Progress, facts of each stop, facts of the audit and its problems. Raises NotFound."""
    store = open_store(store_url)
    log_of(store, layout)
    stops = [{"stop": number, **stop_facts(cost)} for number, cost in enumerate(stop_cost(store, layout), start=1)]
    try:
        found = audit(store, layout)
    except NoRestorableState:  # nothing was published yet
        return progress_of(store, layout.run), stops, {}, []
    return progress_of(store, layout.run), stops, audit_facts(found), list(found.problems)
