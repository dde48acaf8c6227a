"""Environment servers that hold the episodes of a run: who they are, and how a rollout reaches its episode there."""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
from pydantic import ValidationError

from gpu_workers.environments.http_control import EnvironmentConnection, HttpEnvironmentControl, HttpEpisodes
from gpu_workers.environments.http_messages import CONTROL, TOKEN_VARIABLE, StatusReply
from gpu_workers.environments.ports import EpisodeId
from storage.errors import ConfigurationError

_ANSWERS_S = 10.0


@dataclass(frozen=True, slots=True)
class ServedInstance:
    """One server. Without `saves_episodes` it has no checkpoint routes: its episodes are run again after a restart."""

    name: str
    url: str
    saves_episodes: bool


def served_instances(urls: Sequence[str]) -> tuple[ServedInstance, ...]:
    """Ask each server of `environment.servers` for its name. Blocking, at start-up.

    Raises ConfigurationError for one that can't be reached, refuses the token, or has the name of another.
    """
    found = tuple(_asked(url) for url in urls)
    for name, count in Counter(instance.name for instance in found).items():
        if count > 1:
            same = [instance.url for instance in found if instance.name == name]
            raise ConfigurationError(
                f"environment.servers {same} all call themselves '{name}'; start each with an --instance of its own"
            )
    return found


def _asked(url: str) -> ServedInstance:
    headers = {"Authorization": f"Bearer {token}"} if (token := os.environ.get(TOKEN_VARIABLE)) else {}
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=_ANSWERS_S, trust_env=False) as client:
            reply = client.get(f"{CONTROL}/status")
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ConfigurationError(
            f"environment.servers names {url!r}, which can't be reached ({type(error).__name__}); start it, or correct "
            "the URL"
        ) from error
    if reply.status_code == httpx.codes.NOT_FOUND:
        return ServedInstance(url, url, saves_episodes=False)
    if reply.status_code == httpx.codes.UNAUTHORIZED:
        raise ConfigurationError(f"the environment server {url!r} refuses the token; set {TOKEN_VARIABLE} to its own")
    try:
        return ServedInstance(StatusReply.model_validate_json(reply.content).status.instance, url, saves_episodes=True)
    except ValidationError as error:
        raise ConfigurationError(
            f"environment.servers names {url!r}, which answered {reply.status_code} and no status of an environment; "
            "correct the URL"
        ) from error


def _connection(instance: ServedInstance) -> EnvironmentConnection:
    """One that survives restarts of its server: nothing is kept open between two requests."""
    return EnvironmentConnection(instance.url, os.environ.get(TOKEN_VARIABLE), pooled=False)


def control_of(instance: ServedInstance) -> HttpEnvironmentControl:
    """The controller's side of a server."""
    return HttpEnvironmentControl(instance.name, _connection(instance))


class ServedEpisodes(HttpEpisodes):
    """The rollout's side of a server, with a bound for model calls between two turns."""

    def __init__(self, instance: ServedInstance, *, deadline_s: float) -> None:
        super().__init__(_connection(instance))
        self._deadline_s = deadline_s

    @asynccontextmanager
    async def deadline(self, _episode: EpisodeId) -> AsyncIterator[None]:
        """TimeoutError for a model call that takes longer than a whole rollout may. The server, which knows how long it
        was closed, refuses a turn after the episode's deadline.
        """
        async with asyncio.timeout(self._deadline_s):
            yield
