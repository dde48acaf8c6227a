"""The live runtime of a run, as the flows see it: find or launch it, hold it as its driver, close it."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import anyio
from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from storage.errors import ControllerSilent, MidflightError, RunAlreadyLive, StaleIncarnation
from storage.identity import identity
from storage.run_config import RunConfig
from tasks.retries import RETRY_DELAYS_S, retry_condition

# A runtime in one of these states can't train any more; what it published can be restored by a new one.
FINISHED_STATES = frozenset({"failed", "ended"})
# Before the last restore link nothing runs, and the chain may be applied (again).
UNRESTORED_STATES = frozenset({"empty", "restoring"})
RELEASE_DEADLINE_S = 20.0


@dataclass(frozen=True, slots=True)
class RuntimeStatus:
    """What a controller says about itself (`describe`)."""

    run: str
    incarnation: str
    state: str
    train_steps: int
    trainer_version: int
    max_steps: int
    driver: str | None = None
    pids: Mapping[str, Any] = field(default_factory=dict)
    failure: str | None = None
    config_fingerprint: str = ""

    def fits(self, config: RunConfig) -> bool:
        """Whether the runtime computes what this configuration asks for."""
        same = self.config_fingerprint == identity(config).fingerprint
        return same and self.max_steps == config.algorithm.max_steps


class Runtime(Protocol):
    """One run's controller, found by name at each call. Errors are MidflightErrors; `retryable` tells which help."""

    @property
    def run(self) -> str:
        """Name of the run."""
        ...

    async def status(self) -> RuntimeStatus | None:
        """What lives now under the run's name, or None."""
        ...

    async def launch(self, config: RunConfig, incarnation: str, *, take_over: bool = False) -> None:
        """Start controller and workers. Returns when they answer.

        Raises RunAlreadyLive when another one lives or is being started, and, unless `take_over`, when one in another
        cluster holds the run in the store. What another caller started is never ended.
        """
        ...

    async def end(self, incarnation: str) -> None:
        """End controller and workers of one incarnation, whatever their state; one that followed it stays."""
        ...

    async def attach(self, driver: str, *, take_over: bool = False) -> None:
        """Become the driver. Raises RunAlreadyLive while another one is, unless `take_over`."""
        ...

    async def detach(self, driver: str) -> None:
        """Stop being the driver; another one may attach at once."""
        ...

    async def heartbeat(self, driver: str) -> None:
        """Tell the controller that its driver lives."""
        ...

    async def read_logs(self) -> Mapping[str, Any]:
        """`records` (`t`, `level`, `source`, `message`) of the run's processes since the last call; `lost` more."""
        ...

    async def restore_link(self, link: str, plan: Mapping[str, Any], incarnation: str) -> dict[str, Any]:
        """Reset and apply one link of the restore chain."""
        ...

    async def train_steps(self, first: int, last: int, incarnation: str) -> list[dict[str, Any]]:
        """Reports of the steps `first` to `last`: driven, joined, or read again if committed already."""
        ...

    async def attempt_snapshot(self, number: int, *, force: bool, incarnation: str) -> dict[str, Any]:
        """One numbered snapshot attempt."""
        ...

    async def checkpoint(self, *, incarnation: str) -> dict[str, Any]:
        """A trainer checkpoint at the next step boundary."""
        ...

    async def close(self, *, snapshot: bool) -> dict[str, Any]:
        """Stop the pumps; with `snapshot`, publish what is unfinished."""
        ...

    async def preempt(self, reason: str) -> None:
        """Publish what is unfinished, then end controller and workers, within `cluster.grace_s`."""
        ...


OwnerIsGone = Callable[[str], Awaitable[bool]]
SendAway = Callable[[str], Awaitable[None]]


@task(
    name="ensure-runtime",
    persist_result=False,
    cache_policy=NO_CACHE,
    retries=1,  # a launch takes long, and most reasons to fail stay
    retry_delay_seconds=RETRY_DELAYS_S[0],
    retry_condition_fn=retry_condition,
)
async def ensure_runtime(
    runtime: Runtime,
    config: RunConfig,
    driver: str,
    owner_is_gone: OwnerIsGone,
    send_away: SendAway | None = None,
) -> RuntimeStatus:
    """A runtime that this driver holds: the living one, or a new incarnation.

    A runtime that failed or ended, or that was started with another configuration, is replaced: the store has what it
    published. Raises RunAlreadyLive when another driver holds it and `owner_is_gone` does not say otherwise; with
    `send_away` the run is taken over from whoever holds it, and that one's flow run is sent away.
    """
    take_over = send_away is not None
    try:
        status = await runtime.status()
    except ControllerSilent:
        if not take_over:
            raise
        status = None
    if status is not None:
        await become_driver(runtime, status, driver, owner_is_gone, send_away)
        if status.state not in FINISHED_STATES and status.fits(config):
            return status
        get_run_logger().info("runtime %s is %s and is replaced", status.incarnation, status.state)
        if status.state not in FINISHED_STATES:
            await runtime.close(snapshot=True)
        await runtime.end(status.incarnation)
    await runtime.launch(config, new_incarnation(), take_over=take_over)
    await runtime.attach(driver)
    launched = await runtime.status()
    if launched is None:
        raise StaleIncarnation(f"run {runtime.run}: its controller ended right after it was started; see Ray's logs")
    return launched


async def become_driver(
    runtime: Runtime, status: RuntimeStatus, driver: str, owner_is_gone: OwnerIsGone, send_away: SendAway | None
) -> None:
    """Become the driver of a living runtime, in the place of one whose flow run is over or, with `send_away`, of any.

    The other is sent away after the change: what it does on its way out is not obeyed any more.
    """
    try:
        await runtime.attach(driver)
    except RunAlreadyLive:
        owner = status.driver
        if owner is not None and await owner_is_gone(owner):
            await runtime.detach(owner)  # not by force: somebody else may have followed it meanwhile
            await runtime.attach(driver)
        elif send_away is None:
            raise
        else:
            await runtime.attach(driver, take_over=True)
            get_run_logger().warning("run %s is taken over from %s", runtime.run, owner)
            if owner is not None:
                await send_away(owner)


@task(name="close-runtime", persist_result=False, cache_policy=NO_CACHE)
async def close_runtime(runtime: Runtime, snapshot: bool) -> dict[str, Any]:
    """Publish what is unfinished, then end controller and workers."""
    closed = await runtime.close(snapshot=snapshot)
    await runtime.end(closed["incarnation"])
    return closed


@asynccontextmanager
async def held(runtime: Runtime, driver: str, *, every_s: float) -> AsyncIterator[None]:
    """Send heartbeats while the block runs, and bring the run's logs into the flow run's own.

    Afterwards let go, so that the next driver can attach at once.

    Letting go is best effort and bounded: a runtime that does not answer notices the silence by itself.
    """

    async def beat() -> None:
        while True:
            await asyncio.sleep(every_s)
            with suppress(MidflightError):  # the calls that need the controller tell what is wrong with it
                await runtime.heartbeat(driver)
                await relay_logs(runtime)

    beating = asyncio.create_task(beat())
    try:
        yield
    finally:
        beating.cancel()
        with anyio.move_on_after(RELEASE_DEADLINE_S, shield=True):
            with suppress(MidflightError):
                await relay_logs(runtime)
            with suppress(MidflightError):
                await runtime.detach(driver)


async def leave(runtime: Runtime, reason: str, *, grace_s: float) -> None:
    """Publish and end a run's runtime on behalf of a flow that is being cancelled: bounded, and no reason to stay.

    A runtime that another driver has taken over stays as it is. One SIGTERM can cancel more than once; the runtime is
    told until it has heard.
    """
    deadline = time.monotonic() + grace_s
    while (left := deadline - time.monotonic()) > 0:
        with suppress(asyncio.CancelledError):
            with suppress(MidflightError, TimeoutError):
                async with asyncio.timeout(left):
                    await runtime.preempt(reason)
            return


async def relay_logs(runtime: Runtime) -> None:
    """Log what the run's processes have logged since the last time; the controller bounds how much that is."""
    logs = await runtime.read_logs()
    logger = get_run_logger()
    for record in logs["records"]:
        logger.log(logging.getLevelName(record["level"]), "%s: %s", record["source"], record["message"])
    if logs["lost"]:
        logger.warning("%d more records were not kept; Ray's logs have them", logs["lost"])


def new_incarnation() -> str:
    """The id of a new runtime; nothing that was meant for another one is accepted by it."""
    return uuid.uuid4().hex[:12]


def reached_end_of_data(reports: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last of these step reports says that the dataset is used up."""
    return bool(reports) and bool(reports[-1].get("end_of_data", False))
