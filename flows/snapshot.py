"""Deployment `snapshot`: publish a snapshot of a live run now, whether or not anything changed."""

from typing import Any

from prefect import flow

from flows.home import Home
from storage.errors import ConfigurationError
from tasks.ray_runtime import RayRuntime
from tasks.runtime import Runtime
from tasks.snapshots import attempt_number, attempt_snapshot


@flow(name="snapshot", flow_run_name="snapshot-{run}", persist_result=False)
async def snapshot(run: str) -> dict[str, Any]:
    """Take one forced snapshot of a live run, whether or not anything changed.

    Args:
        run: Name of the live run.
    """
    return await force_snapshot(RayRuntime(run, cache=Home.current().cache))


async def force_snapshot(runtime: Runtime) -> dict[str, Any]:
    """The outcome of a forced attempt. Raises ConfigurationError when no such run is live."""
    status = await runtime.status()
    if status is None:
        raise ConfigurationError(f"run '{runtime.run}' is not live in this Ray cluster: check the name, or start it")
    return await attempt_snapshot(runtime, attempt_number(), True, status.incarnation)
