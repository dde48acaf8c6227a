"""The demo's two `train` flow runs: the first is killed in mid-rollout, the second restores and trains to the end."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import ray
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from rich.console import Console

from flows.demo_kill import KillMoment, kill_all, victims_of
from flows.deployments import TRAIN, failure_of, is_completed, start_flow_run
from flows.failures import DemoFailed
from flows.following import facts, follow
from flows.home import Home
from flows.processes import ProcessId
from flows.service_state import ServiceState
from flows.train_command import ui_url
from storage.filesystem import Store
from storage.layout import RunLayout
from storage.manifests import Manifest, decode_manifest
from storage.run_config import RunConfig
from tasks.ray_runtime import RayRuntime
from tasks.run_progress import RunProgress, TraceFollower

KILLED_AT_SHARE = 0.4
TRACE_POLL_S = 0.02
STATE_POLL_S = 1.0
CRASH_DEADLINE_S = 90.0


@dataclass(frozen=True, slots=True)
class Killed:
    """When the kill happened (Unix seconds), and every process of both runtimes: none may be alive afterwards."""

    at: float
    processes: Mapping[str, ProcessId]


async def kill_and_continue(config: RunConfig, store: Store, state: ServiceState, console: Console) -> Killed:
    """Both flow runs. Raises DemoFailed when one of them goes another way than it should."""
    try:
        return await _kill_and_continue(config, store, state, console)
    finally:
        ray.shutdown()  # before its head ends: Ray ends a process that can't reach it for a minute


async def _kill_and_continue(config: RunConfig, store: Store, state: ServiceState, console: Console) -> Killed:
    # The kill is looked at before the run goes on, so that it must not do so by itself.
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"max_resumes": 0})})
    first = await _start(config, state, console)
    killed = await _kill_in_mid_rollout(first, config, store, console)
    await _await_crash(first)
    second = await _start(config, state, console)
    successors = asyncio.create_task(_processes_of(config))
    ended = await follow(second, config, Home.current(), console)
    if not is_completed(ended):
        successors.cancel()
        raise DemoFailed(f"the second train did not complete: {failure_of(ended)}")
    return Killed(killed.at, {**killed.processes, **await successors})


async def _start(config: RunConfig, state: ServiceState, console: Console) -> FlowRun:
    run = await start_flow_run(TRAIN, {"config": config.model_dump(mode="json")}, name=f"train-{config.name}")
    console.print(f"train: {ui_url(state, str(run.id))}", soft_wrap=True)
    return run


async def _kill_in_mid_rollout(run: FlowRun, config: RunConfig, store: Store, console: Console) -> Killed:
    """Follow the trace, and kill on a snapshot that holds sealed siblings of unfinished groups."""
    watching = asyncio.create_task(_await_end(run))
    victims = asyncio.create_task(_processes_of(config))
    try:
        with console.status("Training") as status:
            async for progress, snapshot in _snapshots_worth_a_kill(config, store):
                status.update(f"Training: step {progress.step}/{config.algorithm.max_steps}, {facts(progress)}")
                if watching.done():
                    raise DemoFailed(f"train ended before it could be killed: {failure_of(watching.result())}")
                if snapshot is not None and victims.done():
                    killed, dead = Killed(time.time(), victims.result()), kill_all(victims.result())
                    break
    finally:
        watching.cancel()
        victims.cancel()
    assert snapshot is not None
    console.print(
        f"SIGKILL after step {progress.step}: {', '.join(dead)}; snapshot {snapshot.sequence} was just published, its "
        f"unfinished groups hold {snapshot.counts['sealed_siblings']} sealed siblings",
        soft_wrap=True,
    )
    return killed


async def _snapshots_worth_a_kill(
    config: RunConfig, store: Store
) -> AsyncIterator[tuple[RunProgress, Manifest | None]]:
    """The progress many times a second, with the snapshot that was published just now if it is one to kill on."""
    layout, progress = RunLayout(config.name), RunProgress()
    follower = TraceFollower(store, layout)
    moment = KillMoment(after_step=int(KILLED_AT_SHARE * config.algorithm.max_steps))
    while True:
        events = await asyncio.to_thread(follower.poll)
        progress.add(events)
        found, snapshot = moment.find(events), None
        if found is not None:
            path = layout.manifest(int(found["sequence"]))
            snapshot = decode_manifest(store.read(path), path)
        yield progress, snapshot if snapshot is not None and snapshot.counts["sealed_siblings"] else None
        await asyncio.sleep(TRACE_POLL_S)


async def _processes_of(config: RunConfig) -> dict[str, ProcessId]:
    """The processes of the run's runtime, as soon as there is one with a driver."""
    runtime = RayRuntime(config.name, cache=Home.current().cache)
    while True:
        status = await runtime.status()
        if status is not None and status.driver is not None:
            return {f"{role} {found.pid}": found for role, found in victims_of(status).items()}
        await asyncio.sleep(STATE_POLL_S)


async def _await_end(run: FlowRun) -> FlowRun:
    async with get_client() as client:
        while True:
            current = await client.read_flow_run(run.id)
            if current.state is not None and current.state.is_final():
                return current
            await asyncio.sleep(STATE_POLL_S)


async def _await_crash(run: FlowRun) -> None:
    """Wait until Prefect has seen that the killed flow is gone."""
    try:
        ended = await asyncio.wait_for(_await_end(run), CRASH_DEADLINE_S)
    except TimeoutError as error:
        raise DemoFailed(
            f"Prefect did not notice within {CRASH_DEADLINE_S:.0f} s that {run.name} was killed"
        ) from error
    if ended.state is None or not ended.state.is_crashed():
        raise DemoFailed(f"flow run {run.name} was killed, but its state is {ended.state}")
