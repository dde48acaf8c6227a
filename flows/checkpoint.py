"""Deployment `checkpoint`: save a trainer checkpoint of a live run at its next step boundary."""

from typing import Any

from prefect import flow

from flows.home import Home
from storage.errors import ConfigurationError
from tasks.checkpoints import save_checkpoint
from tasks.ray_runtime import RayRuntime
from tasks.runtime import Runtime


@flow(name="checkpoint", flow_run_name="checkpoint-{run}", persist_result=False)
async def checkpoint(run: str) -> dict[str, Any]:
    """Save one trainer checkpoint of a live run; durable when the flow run ends.

    Args:
        run: Name of the live run.
    """
    return await request_checkpoint(RayRuntime(run, cache=Home.current().cache))


async def request_checkpoint(runtime: Runtime) -> dict[str, Any]:
    """The outcome. Raises ConfigurationError when no such run is live."""
    status = await runtime.status()
    if status is None:
        raise ConfigurationError(f"run '{runtime.run}' is not live in this Ray cluster: check the name, or start it")
    return await save_checkpoint(runtime, status.incarnation)
