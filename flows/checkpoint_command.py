"""`midflight checkpoint`: ask a live run for a trainer checkpoint, and wait until it is durable."""

import asyncio
import os

from rich.console import Console

from flows.home import Home
from flows.preflight import environment_of_running_ray
from storage.errors import ConfigurationError


def save_checkpoint_of(run: str, console: Console) -> None:
    """Save one at the next step boundary. Raises ConfigurationError when no such run is live."""
    home = Home.current()
    environment = environment_of_running_ray(home)
    if environment is None:
        raise ConfigurationError(
            f"run '{run}' is not live: no services run for {home.root} and RAY_ADDRESS is not set; start it with "
            "`midflight train`, or set RAY_ADDRESS"
        )
    os.environ.update(environment)
    # Ray reads its settings from the environment when it is imported.
    import ray

    from tasks.ray_runtime import RayRuntime

    async def ask() -> dict[str, object]:
        runtime = RayRuntime(run, cache=home.cache)
        status = await runtime.status()
        if status is None:
            raise ConfigurationError(f"run '{run}' is not live in this Ray cluster: check the name, or start it")
        return await runtime.checkpoint(incarnation=status.incarnation)

    try:
        with console.status(f"Waiting for the next step boundary of {run}"):
            outcome = asyncio.run(ask())
    finally:
        ray.shutdown()
    if outcome["outcome"] == "completed":
        console.print(f"Checkpoint {outcome['sequence']} of step {outcome['step']} is durable.")
    else:
        console.print(f"Nothing to save: step {outcome['step']} is durable already.")
