"""Deployment `prune`: show, or apply, what retention would free in a run or in a whole store."""

import asyncio
from typing import Annotated, Any

from prefect import flow, get_run_logger
from prefect.runtime import flow_run
from pydantic import Field

from flows.home import Home
from flows.preflight import refuse_when_live
from storage.errors import ConfigurationError, NotFound, RunAlreadyLive
from storage.run_config import RunConfig, StoreConfig
from storage.runs import RUN_NAME, layout_of
from tasks.pruning import prune_stored_run
from tasks.reports import publish_pruning
from tasks.verification import list_runs

RunName = Annotated[str, Field(pattern=RUN_NAME)]


def name_of_run() -> str:
    """What the flow run is about."""
    parameters = flow_run.parameters
    what = parameters.get("run") or "store"
    return f"prune-{what}" if parameters.get("apply") else f"prune-{what}-dry-run"


@flow(name="prune", flow_run_name=name_of_run, persist_result=False)
async def prune(
    run: RunName | None = None, store_url: str | None = None, apply: bool = False, take_over: bool = False
) -> list[dict[str, Any]]:
    """Show what retention would free. A run that may be live is left alone: it does this by itself.

    Args:
        run: Name of the run to prune. Empty: every run of the store.
        store_url: Folder or fsspec URL of the store. Empty: the store of this home.
        apply: Delete. Off: a dry run, which shows what would be deleted and changes nothing.
        take_over: With apply and a run: prune although its controller may be live, which fences it.
    """
    if take_over and not (apply and run is not None):
        raise ConfigurationError("take_over is for one run and with apply: give `run` and `apply`, or leave it out")
    store = StoreConfig(url=store_url or str(Home.current().store))
    found: list[dict[str, Any]] = []
    for name in await list_runs(store, may_be_empty=store_url is None) if run is None else [run]:
        try:
            if apply and not take_over:
                config = RunConfig(name=layout_of(name).run)
                await asyncio.to_thread(refuse_when_live, config, Home.current())
            found.append(await prune_stored_run(name, store, apply=apply, take_over=take_over))
        except (RunAlreadyLive, NotFound) as error:
            if run is not None:
                raise
            get_run_logger().warning("run %s is left alone: %s", name, error)
            found.append({"run": name, "left_alone": str(error)})
    await publish_pruning(found, run, store.url, applied=apply)
    return found
