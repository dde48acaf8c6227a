"""`Runtime` over Ray: the controller is found by name at each call, and Ray's errors become Midflight's."""

import asyncio
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ray

from gpu_workers.runtime_names import CONTROLLER, CONTROLLER_ANSWERS_S, namespace_of
from storage.errors import (
    ConfigurationError,
    ControllerSilent,
    InfrastructureFailure,
    MidflightError,
    StaleIncarnation,
)
from storage.run_config import RunConfig
from tasks.retries import domain_error
from tasks.runtime import RuntimeStatus

CONNECT_DEADLINE_S = 10.0


class RayRuntime:
    """The runtime of one run in the Ray cluster of RAY_ADDRESS. `cache` holds tiny models.

    Calls are made on behalf of `driver`, and refused once it does not drive the run any more; None is a caller that
    never does, such as a snapshot on request.
    """

    def __init__(self, run: str, *, cache: Path, driver: str | None = None) -> None:
        self._run = run
        self._cache = cache
        self._driver = driver

    @property
    def run(self) -> str:
        """Name of the run."""
        return self._run

    async def status(self) -> RuntimeStatus | None:
        """What lives now under the run's name, or None."""
        await asyncio.to_thread(connect)
        controller = await asyncio.to_thread(self._controller)
        if controller is None:
            return None
        try:
            with translated_errors(self.run):
                described = await asyncio.wait_for(controller.describe.remote(), CONTROLLER_ANSWERS_S)
        except TimeoutError as error:
            raise ControllerSilent(
                f"the controller of run {self.run} does not answer within {CONTROLLER_ANSWERS_S:.0f} s: wait, or "
                "replace it with `midflight train --take-over`, which restores what it published"
            ) from error
        except StaleIncarnation:  # killed, but still listed
            return None
        known = RuntimeStatus.__dataclass_fields__
        return RuntimeStatus(**{name: value for name, value in described.items() if name in known})

    async def launch(self, config: RunConfig, incarnation: str, *, take_over: bool = False) -> None:
        """Make the model if it is missing, then start controller and workers."""
        await asyncio.to_thread(connect)
        launcher = self._driver or _this_process()
        with translated_errors(self.run):
            await asyncio.to_thread(_launch, config, incarnation, self._cache, launcher, take_over)

    async def end(self, incarnation: str) -> None:
        """End controller and workers of one incarnation, whatever their state."""
        await asyncio.to_thread(connect)
        with translated_errors(self.run):
            await asyncio.to_thread(_end, self.run, incarnation, self._driver or _this_process())

    async def attach(self, driver: str, *, take_over: bool = False) -> None:
        """Become the driver."""
        await self._call("attach_driver", driver, take_over)

    async def detach(self, driver: str) -> None:
        """Stop being the driver."""
        await self._call("detach_driver", driver)

    async def heartbeat(self, driver: str) -> None:
        """Tell the controller that its driver lives."""
        await self._call("heartbeat", driver)

    async def read_logs(self) -> Mapping[str, Any]:
        """What the run's processes have logged since the last call."""
        result: Mapping[str, Any] = await self._call("read_logs")
        return result

    async def restore_link(self, link: str, plan: Mapping[str, Any], incarnation: str) -> dict[str, Any]:
        """Reset and apply one link of the restore chain."""
        result: dict[str, Any] = await self._call("restore_link", link, dict(plan), incarnation, self._driver)
        return result

    async def train_steps(self, first: int, last: int, incarnation: str) -> list[dict[str, Any]]:
        """Reports of the steps `first` to `last`."""
        result: list[dict[str, Any]] = await self._call("train_steps", first, last, incarnation, self._driver)
        return result

    async def attempt_snapshot(self, number: int, *, force: bool, incarnation: str) -> dict[str, Any]:
        """One numbered snapshot attempt."""
        result: dict[str, Any] = await self._call("attempt_snapshot", number, force, incarnation, self._driver)
        return result

    async def checkpoint(self, *, incarnation: str) -> dict[str, Any]:
        """A trainer checkpoint at the next step boundary."""
        result: dict[str, Any] = await self._call("checkpoint", incarnation)
        return result

    async def close(self, *, snapshot: bool) -> dict[str, Any]:
        """Stop the pumps."""
        result: dict[str, Any] = await self._call("close", snapshot, self._driver)
        return result

    async def preempt(self, reason: str) -> None:
        """Publish what is in flight, then end controller and workers."""
        await self._call("preempt", reason, self._driver)

    async def _call(self, verb: str, *arguments: Any) -> Any:
        await asyncio.to_thread(connect)
        controller = await asyncio.to_thread(self._controller)
        if controller is None:
            raise StaleIncarnation(
                f"run {self.run} has no controller in this Ray cluster: start `train` again, it restores the run"
            )
        with translated_errors(self.run):
            return await getattr(controller, verb).remote(*arguments)

    def _controller(self) -> Any | None:
        # By its own name: a handle of a worker would import torch to be read.
        try:
            return ray.get_actor(CONTROLLER, namespace=namespace_of(self.run))
        except ValueError:
            return None


def _launch(config: RunConfig, incarnation: str, cache: Path, launcher: str, take_over: bool) -> None:
    # torch and the workers' code take seconds to import, and only a launch needs them.
    from gpu_workers.launch import launch_runtime
    from gpu_workers.models.tiny import ensure_model

    model_dir = ensure_model(config, cache)
    launch_runtime(config, incarnation=incarnation, model_dir=model_dir, launcher=launcher, take_over=take_over)


def _end(run: str, incarnation: str, caller: str) -> None:
    from gpu_workers.launch import end_runtime

    end_runtime(run, incarnation=incarnation, caller=caller)


def _this_process() -> str:
    return f"pid {os.getpid()} on {socket.gethostname()}"


@contextmanager
def translated_errors(run: str) -> Iterator[None]:
    """Raise the MidflightError that a Ray error stands for, with the Ray error as its cause."""
    try:
        yield
    except MidflightError as error:
        # Ray raises a class made of its own and the original one, whose text is a remote traceback.
        cause = vars(error).get("cause")
        if isinstance(cause, MidflightError):
            raise cause from error
        raise
    except ray.exceptions.RayTaskError as error:
        cause = domain_error(error)
        if cause is None:
            raise
        raise cause from error
    except ray.exceptions.ActorDiedError as error:
        raise StaleIncarnation(f"the controller of run {run} died: start `train` again, it restores the run") from error
    except (ray.exceptions.RayActorError, ray.exceptions.RaySystemError, ConnectionError) as error:
        raise InfrastructureFailure(f"Ray does not answer for run {run}: {error}") from error


def connect() -> None:
    """Join the Ray cluster of RAY_ADDRESS, once per process. Raises ConfigurationError, InfrastructureFailure."""
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS", "")
    if not address:
        raise ConfigurationError(
            "RAY_ADDRESS is not set, so no Ray cluster is known: use `midflight train`, which starts one, "
            "or set it in the worker's environment"
        )
    _require_listener(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error", ignore_reinit_error=True)
    except (ConnectionError, RuntimeError) as error:
        raise InfrastructureFailure(f"Ray at {address} refused the connection: {error}") from error


def _require_listener(address: str) -> None:
    """ray.init waits for minutes when nobody listens; this takes a moment."""
    parts = urlsplit(address if "//" in address else f"//{address}")
    if parts.hostname is None or parts.port is None:
        return  # "auto" and the like
    try:
        socket.create_connection((parts.hostname, parts.port), timeout=CONNECT_DEADLINE_S).close()
    except OSError as error:
        raise InfrastructureFailure(
            f"RAY_ADDRESS is {address}, but nothing answers there ({error}): start Ray or correct the address"
        ) from error
