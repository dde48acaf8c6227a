"""Deployment `audit`: account for every prompt and row of a run, from its trace, manifests and dataset alone."""

import asyncio
from typing import Annotated, Any

from prefect import flow
from pydantic import Field

from flows.audit_command import audit_document, finding_rows
from flows.home import Home
from flows.inspect_command import audit_facts, require_whole
from flows.tags import tag_with_run
from storage.filesystem import open_store
from storage.runs import RUN_NAME, layout_of
from tasks.accounting import audit as account
from tasks.audit_artifact import publish_audit

RunName = Annotated[str, Field(pattern=RUN_NAME)]


@flow(name="audit", flow_run_name="audit-{run}", persist_result=False)
async def audit(run: RunName, store_url: str | None = None) -> dict[str, Any]:
    """Account for every prompt and every trained row. Fails with every broken promise and the first that break it.

    Args:
        run: Name of the run: its folder in the store. It may be live, over, or somebody else's.
        store_url: Folder or fsspec URL of the store. Empty: the store of this home.
    """
    await tag_with_run(run)
    store = open_store(store_url or str(Home.current().store))
    found = await asyncio.to_thread(account, store, layout_of(run))
    facts = [{"what": name, "number": value, "first": ""} for name, value in audit_facts(found).items()]
    unproven = [{**row, "what": f"not to be proved: {row['what']}"} for row in finding_rows(found.unproven)]
    await publish_audit(run, [*facts, *finding_rows(found.found), *unproven])
    require_whole(run, found)
    return audit_document(found)
