"""Environments behind HTTP: both Protocols, for one incarnation of a server."""

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar

import httpx
from pydantic import ValidationError

from gpu_workers.environments.http_messages import (
    CONTROL,
    DATA_FAILURE,
    EPISODES,
    INFRASTRUCTURE_FAILURE,
    BoundaryReply,
    CheckpointBody,
    CloseBody,
    Done,
    ErrorReply,
    ExportReply,
    ForgetBody,
    Message,
    OpenBody,
    RestoreBody,
    RetireBody,
    StatusReply,
    StepBody,
    TimedBody,
)
from gpu_workers.environments.ports import Boundary, CallRef, EpisodeId, EpisodeTask, Exported, InstanceStatus
from storage.errors import (
    BrokenInvariant,
    DataFailure,
    EnvironmentRefusal,
    EnvironmentUnreachable,
    InfrastructureFailure,
    MidflightError,
)
from storage.records import EpisodeRecord

Reply = TypeVar("Reply", bound=Message)


class EnvironmentConnection:
    """Requests to one server. Make a new one when the server was started again: pooled connections died with it."""

    def __init__(self, url: str, token: str | None = None, *, timeout_s: float = 30.0, pooled: bool = True) -> None:
        """Not `pooled`: each request has a connection of its own, so that restarts of the server don't matter."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64 if pooled else 0)
        # `trust_env`: a proxy for the internet is not the way to an environment.
        self._client = httpx.AsyncClient(base_url=url, headers=headers, limits=limits, trust_env=False)
        self._url = url
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Give back its connections."""
        await self._client.aclose()

    async def has(self, path: str) -> bool:
        """Whether the server knows the route."""
        return (await self._send("GET", path, None, self._timeout_s)).status_code != httpx.codes.NOT_FOUND

    async def get(self, kind: type[Reply], path: str) -> Reply:
        """One GET."""
        return _understood(kind, await self._send("GET", path, None, self._timeout_s), f"{self._url}{path}")

    async def post(self, kind: type[Reply], path: str, body: Message, timeout_s: float | None = None) -> Reply:
        """One POST, never sent twice. InfrastructureFailure: no connection, or no reply within `timeout_s`."""
        reply = await self._send("POST", path, body, timeout_s or self._timeout_s)
        return _understood(kind, reply, f"{self._url}{path}")

    async def _send(self, verb: str, path: str, body: Message | None, timeout_s: float) -> httpx.Response:
        headers = {"Content-Type": "application/json"}
        content = None if body is None else body.model_dump_json()
        try:
            return await self._client.request(verb, path, content=content, headers=headers, timeout=timeout_s)
        except httpx.HTTPError as error:
            told = f"{verb} {self._url}{path} failed with {type(error).__name__} (waited up to {timeout_s:.1f} s)"
            kind = EnvironmentUnreachable if isinstance(error, httpx.ConnectError) else InfrastructureFailure
            raise kind(f"{told}; see whether the environment's server lives") from error


class HttpEnvironmentControl:
    """`EnvironmentControl` over HTTP. `slack_s` is how long after its deadline a call may still be answered."""

    def __init__(
        self,
        instance: str,
        connection: EnvironmentConnection,
        *,
        slack_s: float = 5.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._instance = instance
        self._connection = connection
        self._slack_s = slack_s
        self._clock = clock

    @property
    def instance(self) -> str:
        """The name it was built with."""
        return self._instance

    async def aclose(self) -> None:
        """Give back its connections."""
        await self._connection.aclose()

    async def supports_checkpoints(self) -> bool:
        """False for a server without these routes: its episodes are `restart_only`."""
        return await self._connection.has(f"{CONTROL}/status")

    async def status(self) -> InstanceStatus:
        """See `EnvironmentControl`."""
        return self._own((await self._connection.get(StatusReply, f"{CONTROL}/status")).status)

    async def prepare(self, checkpoint_id: str, deadline_ts: float) -> InstanceStatus:
        """See `EnvironmentControl`."""
        return await self._timed("prepare", TimedBody(checkpoint_id=checkpoint_id, deadline_ts=deadline_ts))

    async def renew(self, checkpoint_id: str, deadline_ts: float) -> InstanceStatus:
        """See `EnvironmentControl`."""
        return await self._timed("renew", TimedBody(checkpoint_id=checkpoint_id, deadline_ts=deadline_ts))

    async def commit(self, checkpoint_id: str, deadline_ts: float) -> Exported:
        """See `EnvironmentControl`."""
        body = TimedBody(checkpoint_id=checkpoint_id, deadline_ts=deadline_ts)
        reply = await self._connection.post(ExportReply, f"{CONTROL}/commit", body, self._wait_s(deadline_ts))
        exported = reply.exported
        if (exported.instance, exported.checkpoint_id) != (self._instance, checkpoint_id):
            raise BrokenInvariant(
                f"commit of {checkpoint_id!r} by '{self._instance}' was answered for {exported.checkpoint_id!r} "
                f"by '{exported.instance}'; each instance needs an address of its own"
            )
        return exported

    async def restore(
        self, checkpoint_id: str, deadline_ts: float, episodes: Sequence[EpisodeRecord]
    ) -> InstanceStatus:
        """See `EnvironmentControl`."""
        body = RestoreBody(checkpoint_id=checkpoint_id, deadline_ts=deadline_ts, episodes=tuple(episodes))
        return await self._timed("restore", body)

    async def discard_restored(self, checkpoint_id: str) -> InstanceStatus:
        """See `EnvironmentControl`."""
        return await self._plain("discard_restored", checkpoint_id)

    async def resume(self, checkpoint_id: str) -> InstanceStatus:
        """See `EnvironmentControl`."""
        return await self._plain("resume", checkpoint_id)

    async def retire(self, episodes: Sequence[EpisodeId]) -> None:
        """See `EnvironmentControl`."""
        await self._connection.post(Done, f"{CONTROL}/retire", RetireBody(episodes=tuple(episodes)))

    async def forget(self, rollout_ids: Sequence[str]) -> None:
        """See `EnvironmentControl`."""
        await self._connection.post(Done, f"{CONTROL}/forget", ForgetBody(rollout_ids=tuple(rollout_ids)))

    async def _timed(self, verb: str, body: TimedBody) -> InstanceStatus:
        wait_s = self._wait_s(body.deadline_ts)
        return self._own((await self._connection.post(StatusReply, f"{CONTROL}/{verb}", body, wait_s)).status)

    async def _plain(self, verb: str, checkpoint_id: str) -> InstanceStatus:
        body = CheckpointBody(checkpoint_id=checkpoint_id)
        return self._own((await self._connection.post(StatusReply, f"{CONTROL}/{verb}", body)).status)

    def _wait_s(self, deadline_ts: float) -> float:
        return max(0.0, deadline_ts - self._clock()) + self._slack_s

    def _own(self, status: InstanceStatus) -> InstanceStatus:
        if status.instance != self._instance:
            raise BrokenInvariant(f"'{status.instance}' answered at the address of '{self._instance}'")
        return status


class HttpEpisodes:
    """`Episodes` over HTTP. `step_timeout_s` bounds a step with all the time it is held; it may be sent again then."""

    def __init__(self, connection: EnvironmentConnection, *, step_timeout_s: float = 600.0) -> None:
        self._connection = connection
        self._step_timeout_s = step_timeout_s

    async def aclose(self) -> None:
        """Give back its connections."""
        await self._connection.aclose()

    async def open(self, episode: EpisodeId, task: EpisodeTask) -> Boundary:
        """See `Episodes`."""
        body = OpenBody(episode=episode, task=task)
        return (await self._connection.post(BoundaryReply, f"{EPISODES}/open", body, self._step_timeout_s)).boundary

    async def step(self, episode: EpisodeId, turn: int, action: str, call: CallRef) -> Boundary:
        """See `Episodes`."""
        body = StepBody(episode=episode, turn=turn, action=action, call=call)
        return (await self._connection.post(BoundaryReply, f"{EPISODES}/step", body, self._step_timeout_s)).boundary

    async def close(self, episode: EpisodeId) -> None:
        """See `Episodes`."""
        await self._connection.post(Done, f"{EPISODES}/close", CloseBody(episode=episode))


def _understood(kind: type[Reply], reply: httpx.Response, where: str) -> Reply:
    if not reply.is_success:
        raise _error_of(reply, where)
    try:
        return kind.model_validate_json(reply.content)
    except ValidationError as error:
        raise BrokenInvariant(f"{where} answered no {kind.__name__}: {_first(error)}") from error


def _error_of(reply: httpx.Response, where: str) -> MidflightError:
    try:
        told = ErrorReply.model_validate_json(reply.content).error
    except ValidationError as error:
        if reply.status_code in (502, 503, 504):  # of a proxy, whose server is away
            return InfrastructureFailure(f"{where} answered {reply.status_code}; see whether its server lives")
        return BrokenInvariant(f"{where} answered {reply.status_code} without an error of ours: {_first(error)}")
    if told.code in EnvironmentRefusal.CODES:
        return EnvironmentRefusal(told.code, told.message)
    if told.code == DATA_FAILURE:
        return DataFailure(told.message)
    if told.code == INFRASTRUCTURE_FAILURE:
        return InfrastructureFailure(told.message)
    return BrokenInvariant(f"{where} answered {reply.status_code} {told.code}: {told.message}")


def _first(error: ValidationError) -> str:
    problem = error.errors(include_input=False, include_url=False)[0]
    return f"{'.'.join(map(str, problem['loc'])) or 'body'}: {problem['msg']}"
