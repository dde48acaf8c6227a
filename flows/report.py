"""Deployment `report`: what the store and the trace say about a run, as pictures and tables in Prefect's UI.

It reads the store only, so that it works on a run that is live, over, or somebody else's.
"""

import asyncio
from typing import Annotated, Any

from prefect import flow
from pydantic import Field

from flows.home import Home
from flows.inspect_command import audit_facts
from flows.report_command import audit_of, bias_of
from flows.tags import tag_with_run
from storage.analytics.run_report import RunReport, read_report
from storage.audit import Audit
from storage.errors import BrokenInvariant
from storage.filesystem import open_store
from storage.restart_bias import Comparison
from storage.runs import RUN_NAME, layout_of
from tasks.bias_table import bias_tables
from tasks.report_pictures import report_pictures
from tasks.report_tables import report_tables
from tasks.reports import publish_run_report
from tasks.run_progress import RunProgress, progress_of

RunName = Annotated[str, Field(pattern=RUN_NAME)]


@flow(name="report", flow_run_name="report-{run}", persist_result=False)
async def report(run: RunName, against: list[RunName] | None = None, store_url: str | None = None) -> dict[str, Any]:
    """Curves, staleness, where time went, what each stop cost, and the exactly-once audit. Fails when the audit finds a
    broken promise.

    Args:
        run: Name of the run: its folder in the store. It may be live, over, or somebody else's.
        against: Runs of the same store that were never stopped, to tell how much later this one got its results.
        store_url: Folder or fsspec URL of the store. Empty: the store of this home.
    """
    await tag_with_run(run)
    url = store_url or str(Home.current().store)
    found, progress, audited, bias = await asyncio.to_thread(read_run, url, run, against or [])
    facts, problems = ({}, []) if audited is None else (audit_facts(audited), audited.problems)
    pictures = await asyncio.to_thread(report_pictures, found)
    await publish_run_report(run, progress, [*report_tables(found, facts), *bias_tables(bias)], pictures, problems)
    if problems:
        raise BrokenInvariant(f"the audit of run {run} found: {'; '.join(problems)}")
    return {"step": progress.step, "stops": found.stops.height, "audit": facts}


def read_run(
    store_url: str, run: str, against: list[str]
) -> tuple[RunReport, RunProgress, Audit | None, list[Comparison]]:
    """Report, progress and audit of a run, and what restarts did to its work. Raises NotFound, ConfigurationError."""
    store, layout = open_store(store_url), layout_of(run)
    found = read_report(store, layout, [layout_of(other) for other in against])
    return found, progress_of(store, run), audit_of(store, layout), bias_of(store, layout)
