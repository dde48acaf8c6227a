"""Tags of flow runs: in Prefect's UI all flow runs of one run are found by `run:NAME`."""

import asyncio

import httpx
import prefect.runtime
from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.exceptions import PrefectException

_DEADLINE_S = 5.0


async def tag_with_run(run: str) -> None:
    """Add `run:NAME` to the calling flow run's tags. A tag that can't be stored costs nothing else."""
    tag = f"run:{run}"
    tags = set(prefect.runtime.flow_run.tags or ())
    if tag in tags or prefect.runtime.flow_run.id is None:
        return
    try:
        async with get_client() as client, asyncio.timeout(_DEADLINE_S):
            await client.update_flow_run(prefect.runtime.flow_run.id, tags=sorted({*tags, tag}))
    except (httpx.HTTPError, PrefectException, TimeoutError) as error:
        get_run_logger().warning("tag %s was not stored: %s", tag, error)
