"""`midflight train`: services, deployment, one `train` flow run, followed to its end."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
from rich.console import Console

from flows.failures import DeploymentFailed, ServicesFailed, TrainFailed
from flows.home import Home
from flows.local_services import local_services, require_services
from flows.preflight import check, refuse_another_dataset, refuse_when_held, trained_steps
from flows.restore_plan_command import show_outcome, show_plan
from flows.service_state import ServiceState
from storage.run_config import RunConfig


def train_run(config: RunConfig, console: Console, *, take_over: bool = False) -> None:
    """Train `config`'s run from where it stands to its end. Raises TrainFailed with the flow run's reason.

    Refused while somebody else holds the run, unless `take_over`.
    """
    home = Home.current()
    check(config)
    if not take_over:
        with console.status("Looking whether somebody holds the run"):
            refuse_when_held(config, home)
    refuse_another_dataset(config)
    if (steps := trained_steps(config)) >= config.algorithm.max_steps:
        console.print(f"{config.name} is trained already: {steps} steps; raise algorithm.max_steps to train on")
        return
    with console.status("Looking what a restore would come to"):
        planned = show_plan(config, console)
    with deployed_services(home, console) as state:
        try:
            asyncio.run(_train(config, home, state, console, take_over))
        except asyncio.CancelledError:  # by SIGTERM; Ctrl-C arrives as a KeyboardInterrupt already
            raise KeyboardInterrupt from None
        finally:
            if planned is not None:
                show_outcome(config, planned, console)


@contextmanager
def deployed_services(home: Home, console: Console) -> Iterator[ServiceState]:
    """Services with the deployments in place; this process's environment leads to them from now on."""
    with ExitStack() as stack:
        with console.status("Starting Prefect and Ray"):
            state = stack.enter_context(local_services(home, os.environ))
            os.environ.update(state.environment(home))
        with console.status("Deploying the flows"):
            # Prefect reads its settings from the environment when it is imported.
            from flows.deployments import deploy_if_needed

            deploy_if_needed(home.deployed)
        try:
            yield state
        except httpx.HTTPStatusError as error:
            raise DeploymentFailed(f"Prefect at {state.prefect_api_url} refused: {error.response.text}") from error
        except httpx.HTTPError as error:
            require_services(home)
            raise ServicesFailed(f"Prefect at {state.prefect_api_url} does not answer ({error!r})") from error


async def _train(config: RunConfig, home: Home, state: ServiceState, console: Console, take_over: bool) -> None:
    from flows.deployments import TRAIN, failure_of, is_completed, refuse_unfinished, start_flow_run
    from flows.following import follow

    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    name = f"train-{config.name}"
    if not take_over:
        await refuse_unfinished(name)
    parameters = {"config": config.model_dump(mode="json"), "take_over": take_over}
    run = await start_flow_run(TRAIN, parameters, name=name)
    console.print(f"Flow run {run.name}: {ui_url(state, str(run.id))}", soft_wrap=True)
    ended = await follow(run, config, home, console)
    if not is_completed(ended):
        raise TrainFailed(failure_of(ended))
    console.print(f"{config.name} is trained; its store is {config.store.url}")


def ui_url(state: ServiceState, flow_run_id: str) -> str:
    """Where the Prefect UI shows a flow run."""
    return f"{state.prefect_api_url.removesuffix('/api')}/runs/flow-run/{flow_run_id}"
