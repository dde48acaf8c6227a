"""`/run` of a NeMo Gym: what an agent, or an environment server, is sent for one rollout, and what its reply comes to.

It runs the whole rollout. Its model calls come back to the generator that asked for it (`generation/model_server.py`),
which knows them by the rollout's key.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from gpu_workers.environments.gym_task import create_params, extra_body_of, is_materialized
from gpu_workers.environments.ports import EpisodeId
from storage.errors import DataFailure, InfrastructureFailure, RolloutFailure

# The field of a model call that carries the key of its rollout. A Gym's model server adds what `metadata.extra_body`
# holds to the body that it sends on.
ROLLOUT_FIELD = "midflight_rollout"

_ATTEMPT = re.compile(r"-a(\d+)$")
_TOLD = 300


@dataclass(frozen=True, slots=True)
class GymOutcome:
    """How a rollout ended. `masked`: its reward measures nothing, so that it is not trained."""

    reward: float
    masked: bool


class _Scored(BaseModel):
    """What a resources server's `/verify` says; there is more, which is not needed."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    reward: float
    mask_sample: bool = False


class _Failed(BaseModel):
    """Why an environment server could not play an episode."""

    model_config = ConfigDict(extra="ignore")

    failure_reason: str
    terminal: bool


class _Result(BaseModel):
    """An environment server's result: the score itself, or one level below."""

    model_config = ConfigDict(extra="ignore")

    score: _Scored

    @model_validator(mode="before")
    @classmethod
    def _find_score(cls, value: Any) -> Any:
        inner = value.get("verification") if isinstance(value, dict) else None
        return {"score": value if inner is None else inner}


class _Episode(BaseModel):
    """The object form of an episode's id."""

    rollout_id: str
    attempt: int = 0


class _EpisodeReply(BaseModel):
    """An environment server's reply: a result or a failure. An id may be given as a key."""

    model_config = ConfigDict(extra="ignore")

    episode_id: str | _Episode
    result: _Result | None = None
    failure: _Failed | None = None


def run_body(row: Mapping[str, Any], episode: EpisodeId) -> dict[str, Any]:
    """The body of `/run`. Model calls of the rollout will carry `str(episode)` as ROLLOUT_FIELD."""
    identity = {"episode_id": {"rollout_id": episode.rollout_id, "attempt": episode.attempt}}
    params = _with_key(create_params(row), str(episode))
    if is_materialized(row):
        task_input = {**row["task_input"], "responses_create_params": params}
        return {**identity, "task": {"task_id": row["task_id"], "task_input": task_input}}
    names = {"_ng_rollout_id": episode.rollout_id, "_ng_attempt_index": episode.attempt}
    return {**row, **names, **identity, "responses_create_params": params}


def outcome_of(reply: Any, row: Mapping[str, Any], episode: EpisodeId, agent: str) -> GymOutcome:
    """Understand a reply. Raises InfrastructureFailure or DataFailure for a failed or another episode, DataFailure for
    a reply that is none.
    """
    try:
        scored = _episode_score(reply, episode, agent) if is_materialized(row) else _Scored.model_validate(reply)
    except ValidationError as error:
        (first, *_) = error.errors()
        where = ".".join(map(str, first["loc"])) or "the reply"
        raise DataFailure(
            f"Gym agent '{agent}' answered /run of {episode} with something else: {where}: {first['msg']}; "
            "see whether its version speaks this protocol"
        ) from error
    return GymOutcome(scored.reward, scored.mask_sample)


def episode_of_key(key: str) -> EpisodeId:
    """The episode of a key; the bare rollout id is its attempt 0."""
    found = _ATTEMPT.search(key)
    return EpisodeId(key, 0) if found is None else EpisodeId(key[: found.start()], int(found[1]))


class GymAgents:
    """The agents and environment servers of `environment.gym_agents`. A request is never sent twice."""

    def __init__(self, urls: Mapping[str, str], token: str | None, *, timeout_s: float) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # Connections are not kept: one to a server that was started again would fail a request that can't be repeated.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(headers=headers, limits=limits, timeout=timeout_s, trust_env=False)
        self._urls = urls

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Give back its connections."""
        await self._client.aclose()

    async def run(self, agent: str, row: Mapping[str, Any], episode: EpisodeId) -> GymOutcome:
        """Have an agent play one rollout.

        Raises InfrastructureFailure (no answer in time, 5xx, 408, 429) or DataFailure.
        """
        url = f"{self._urls[agent].rstrip('/')}/run"
        try:
            reply = await self._client.post(url, json=run_body(row, episode))
        except httpx.HTTPError as error:
            raise InfrastructureFailure(
                f"Gym agent '{agent}' did not answer /run of {episode}: {type(error).__name__}; see whether {url} lives"
            ) from error
        if reply.status_code != httpx.codes.OK:
            raise _refusal(agent, episode, reply)
        try:
            told = reply.json()
        except ValueError as error:
            raise DataFailure(
                f"Gym agent '{agent}' answered /run of {episode} with no JSON: {reply.text[:_TOLD]!r}"
            ) from error
        return outcome_of(told, row, episode, agent)


def _episode_score(reply: Any, episode: EpisodeId, agent: str) -> _Scored:
    told = _EpisodeReply.model_validate(reply)
    named = told.episode_id
    found = episode_of_key(named) if isinstance(named, str) else EpisodeId(named.rollout_id, named.attempt)
    if found != episode:
        raise DataFailure(f"Gym agent '{agent}' was asked for episode {episode} and answered for {found}")
    if told.failure is not None:
        kind = DataFailure if told.failure.terminal else InfrastructureFailure
        raise kind(f"Gym agent '{agent}' could not play {episode}: {told.failure.failure_reason[:_TOLD]}")
    if told.result is None:
        raise DataFailure(f"Gym agent '{agent}' answered /run of {episode} with neither a result nor a failure")
    return told.result.score


def _refusal(agent: str, episode: EpisodeId, reply: httpx.Response) -> RolloutFailure:
    status = reply.status_code
    infrastructure = status >= 500 or status in (httpx.codes.REQUEST_TIMEOUT, httpx.codes.TOO_MANY_REQUESTS)
    kind = InfrastructureFailure if infrastructure else DataFailure
    return kind(f"Gym agent '{agent}' answered /run of {episode} with {status}: {reply.text[:_TOLD]!r}")


def _with_key(params: Mapping[str, Any], key: str) -> dict[str, Any]:
    extra = json.dumps({**extra_body_of(params), ROLLOUT_FIELD: key})
    return {**params, "metadata": {**(params.get("metadata") or {}), ROLLOUT_FIELD: key, "extra_body": extra}}
