"""Follows a flow run on the terminal: its states from Prefect, its steps and snapshots from the trace in the store."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from uuid import UUID

import httpx
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import FlowFilter, FlowFilterName
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import FlowRunSort
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from flows.deployments import cancel_flow_run, failure_of
from flows.failures import ServicesFailed
from flows.home import Home
from flows.local_services import require_services
from storage.errors import StoreError
from storage.filesystem import open_store
from storage.layout import RunLayout
from storage.run_config import RunConfig
from tasks.run_progress import RunProgress, TraceFollower

POLL_S = 0.3
LINE_EVERY_S = 10.0
CANCEL_DEADLINE_S = 45.0
GUARD_DEADLINE_S = 90.0
# A server that is started again answers well before.
SERVER_AWAY_S = 60.0
_ANSWER_S = 10.0

Show = Callable[[RunProgress], None]


async def follow(run: FlowRun, config: RunConfig, home: Home, console: Console) -> FlowRun:
    """Show progress until the flow run is over; returns it in its final state.

    Interrupted (Ctrl-C), it cancels the flow run and waits until that has ended. Raises ServicesFailed when the local
    services have ended, since the flow run would then wait for ever, or the server was away for `SERVER_AWAY_S`: the
    flow run itself goes on without it.
    """
    progress = RunProgress()
    follower = TraceFollower(open_store(config.store.url), RunLayout(config.name))
    async with get_client() as client:
        with _display(config, console) as show:
            try:
                async for current in states(run, lambda: client.read_flow_run(run.id), say=console.print):
                    with suppress(StoreError):  # the picture can wait for the store
                        progress.add(await asyncio.to_thread(follower.poll))
                    show(progress)
                    require_services(home)
                    if current.state is not None and current.state.is_final():
                        resumed = await resumed_after(client, current, config)
                        if not resumed:
                            return current
                        console.print(f"{run.name} crashed and goes on: {failure_of(current)}", soft_wrap=True)
            except asyncio.CancelledError:
                console.print("Cancelling: the run publishes what is unfinished and can be continued.")
                await _cancel(client, run.id)
                raise
    raise AssertionError("states end with a final one")


async def resumed_after(client: PrefectClient, run: FlowRun, config: RunConfig) -> bool:
    """Whether the guard starts this ended flow run again. Waits for its verdict, `GUARD_DEADLINE_S` at most."""
    if run.state is None or run.state.name != "Crashed" or config.cluster.max_resumes == 0:
        return False
    deadline = time.monotonic() + GUARD_DEADLINE_S
    while time.monotonic() < deadline:
        verdicts = await _guards_of(client, run)
        now = await client.read_flow_run(run.id)
        if now.state is None or not now.state.is_final():
            return True
        if any(guard.state is not None and guard.state.is_final() for guard in verdicts):
            return False
        await asyncio.sleep(POLL_S)
    return False


async def _guards_of(client: PrefectClient, run: FlowRun) -> list[FlowRun]:
    """The guard's flow runs that look after this end of the flow run."""
    assert run.state is not None
    guards = await client.read_flow_runs(
        flow_filter=FlowFilter(name=FlowFilterName(any_=["resume-guard"])),
        sort=FlowRunSort.EXPECTED_START_TIME_DESC,
        limit=50,
    )
    ended = run.state.timestamp
    return [
        guard
        for guard in guards
        if guard.parameters.get("flow_run_id") == str(run.id) and guard.created is not None and guard.created >= ended
    ]


async def states(
    run: FlowRun,
    read: Callable[[], Awaitable[FlowRun]],
    *,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[FlowRun]:
    """The flow run again and again; the last known one while the server does not answer.

    Raises ServicesFailed when it did not for `SERVER_AWAY_S`.
    """
    known, answered, is_away = run, clock(), False
    while True:
        try:
            known = await asyncio.wait_for(read(), _ANSWER_S)
        except (httpx.TransportError, httpx.HTTPStatusError, TimeoutError) as error:
            if isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500:
                raise
            if clock() - answered > SERVER_AWAY_S:
                raise ServicesFailed(
                    f"Prefect did not answer for {SERVER_AWAY_S:.0f} s ({error!r}); flow run {run.name} ({run.id}) "
                    "goes on as long as its process lives: look at it when the server is back"
                ) from error
            if not is_away:
                say("Prefect does not answer; the run goes on without it.")
            is_away = True
        else:
            if is_away:
                say("Prefect answers again.")
            answered, is_away = clock(), False
        yield known
        await asyncio.sleep(POLL_S)


async def _cancel(client: PrefectClient, flow_run_id: UUID) -> None:
    await cancel_flow_run(client, flow_run_id)
    deadline = time.monotonic() + CANCEL_DEADLINE_S
    while time.monotonic() < deadline:
        run = await client.read_flow_run(flow_run_id)
        if run.state is not None and run.state.is_final():
            return
        await asyncio.sleep(POLL_S)


@contextmanager
def _display(config: RunConfig, console: Console) -> Iterator[Show]:
    """A bar on a terminal, a line now and then in a log."""
    if not console.is_terminal:
        yield _line_printer(config, console)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("step {task.completed}/{task.total}"),
        TextColumn("{task.fields[facts]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bars:
        bar = bars.add_task(config.name, total=config.algorithm.max_steps, facts="starting")
        yield lambda progress: bars.update(bar, completed=progress.step, facts=facts(progress))


def _line_printer(config: RunConfig, console: Console) -> Show:
    printed_at, printed_step = 0.0, 0

    def show(progress: RunProgress) -> None:
        nonlocal printed_at, printed_step
        now = time.monotonic()
        if progress.step != printed_step and now - printed_at >= LINE_EVERY_S:
            printed_at, printed_step = now, progress.step
            console.print(f"{config.name}: step {progress.step}/{config.algorithm.max_steps}, {facts(progress)}")

    return show


def facts(progress: RunProgress) -> str:
    """Reward and snapshots in a few words."""
    reward = "no step yet" if progress.reward is None else f"reward {progress.reward:.3f}"
    replayed = f", {progress.replayed} steps replayed" if progress.replayed else ""
    return f"{reward}, {progress.checkpoints} checkpoints, {progress.snapshots} snapshots{replayed}"
