"""Who drives a run: a flow run in a process on a host, written as the text that a live controller shows to others."""

import asyncio
import re
import socket
from dataclasses import dataclass
from uuid import UUID

import httpx
import prefect.runtime
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.states import Cancelling

from flows.processes import ProcessId

LEAVES_BY_ITSELF_S = 10.0
_POLL_S = 0.5

_PATTERN = re.compile(
    r"(?P<name>\S+) \(flow run (?P<flow_run>[0-9a-f-]{36}), pid (?P<pid>\d+) on (?P<host>\S+) since (?P<since>[\d.]+)\)"
)


@dataclass(frozen=True, slots=True)
class Driver:
    """The flow run and the process that drive a run."""

    name: str
    flow_run: str
    host: str
    process: ProcessId

    @staticmethod
    def this_flow_run() -> "Driver":
        """The calling flow run."""
        name, flow_run = str(prefect.runtime.flow_run.name), str(prefect.runtime.flow_run.id)
        return Driver(name.replace(" ", "-"), flow_run, socket.gethostname(), ProcessId.of_this())

    @staticmethod
    def parse(text: str) -> "Driver | None":
        """From `str(driver)`; None when it is something else."""
        match = _PATTERN.fullmatch(text)
        if match is None:
            return None
        process = ProcessId(pid=int(match["pid"]), start_time=float(match["since"]))
        return Driver(match["name"], match["flow_run"], match["host"], process)

    def __str__(self) -> str:
        process = self.process
        return (
            f"{self.name} (flow run {self.flow_run}, pid {process.pid} on {self.host} since {process.start_time:.2f})"
        )


async def owner_is_gone(text: str) -> bool:
    """Whether the driver with this text is certainly over: its process is dead, or Prefect saw its flow run end.

    A driver of another host whose flow run is unknown here may still live.
    """
    owner = Driver.parse(text)
    if owner is None:
        return False
    if owner.host == socket.gethostname():
        return not owner.process.is_alive()
    if owner.flow_run == str(prefect.runtime.flow_run.id):  # an earlier try of the flow run that asks
        return True
    try:
        async with get_client() as client:
            run = await client.read_flow_run(UUID(owner.flow_run))
    except ObjectNotFound:
        return False
    return run.state is not None and run.state.is_final()


async def send_away(text: str, *, leaves_within_s: float = LEAVES_BY_ITSELF_S) -> None:
    """Make sure that the flow run of a driver that was replaced ends.

    One that lives hears from the controller that it was replaced, and fails with that; one that does not is cancelled.
    A flow run of another Prefect server is left to the controller, which obeys it no more.
    """
    owner = Driver.parse(text)
    if owner is None:
        return
    try:
        async with get_client() as client:
            for _ in range(int(leaves_within_s / _POLL_S)):
                run = await client.read_flow_run(UUID(owner.flow_run))
                if run.state is not None and run.state.is_final():
                    return
                await asyncio.sleep(_POLL_S)
            await client.set_flow_run_state(UUID(owner.flow_run), Cancelling())
    except (ObjectNotFound, PrefectException, httpx.HTTPError):
        return
