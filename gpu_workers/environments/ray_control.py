"""Environments in Ray actors: both Protocols over one actor method, and a small actor that is nothing else."""

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorDiedError, ObjectLostError, RayActorError, RayTaskError

from gpu_workers.environments.control_plane import ControlPlane
from gpu_workers.environments.episode_table import EpisodeTable
from gpu_workers.environments.interface import Environment
from gpu_workers.environments.ports import (
    Boundary,
    CallRef,
    EnvironmentControl,
    EpisodeId,
    Episodes,
    EpisodeTask,
    Exported,
    InstanceStatus,
)
from gpu_workers.ray_ports import translate
from storage.errors import BrokenInvariant, EnvironmentUnreachable
from storage.records import EpisodeRecord

T = TypeVar("T")

CONTROL_VERBS = frozenset(
    {"status", "prepare", "renew", "commit", "restore", "discard_restored", "resume", "retire", "forget"}
)
EPISODE_VERBS = frozenset({"open", "step", "close"})


async def answer_control(control: EnvironmentControl, verb: str, *arguments: Any) -> Any:
    """What an actor's method `environment` does: one verb of `EnvironmentControl`."""
    return await _answer(control, CONTROL_VERBS, verb, arguments)


async def answer_episodes(episodes: Episodes, verb: str, *arguments: Any) -> Any:
    """What an actor's method `episode` does: one verb of `Episodes`."""
    return await _answer(episodes, EPISODE_VERBS, verb, arguments)


class RayEnvironmentControl:
    """`EnvironmentControl` of an actor that has a method `environment(verb, *arguments)`.

    Refusals come back as they are; a dead actor is an InfrastructureFailure.
    """

    def __init__(
        self, instance: str, actor: Any, translate_error: Callable[[Exception, str], Exception] = translate
    ) -> None:
        self._instance = instance
        self._actor = actor
        self._translate = translate_error

    @property
    def instance(self) -> str:
        """The name it was built with."""
        return self._instance

    async def status(self) -> InstanceStatus:
        """See `EnvironmentControl`."""
        return await self._call(InstanceStatus, "status")

    async def prepare(self, checkpoint_id: str, deadline_ts: float) -> InstanceStatus:
        """See `EnvironmentControl`."""
        return await self._call(InstanceStatus, "prepare", checkpoint_id, deadline_ts)

    async def renew(self, checkpoint_id: str, deadline_ts: float) -> InstanceStatus:
        """See `EnvironmentControl`."""
        return await self._call(InstanceStatus, "renew", checkpoint_id, deadline_ts)

    async def commit(self, checkpoint_id: str, deadline_ts: float) -> Exported:
        """See `EnvironmentControl`."""
        return await self._call(Exported, "commit", checkpoint_id, deadline_ts)

    async def restore(
        self, checkpoint_id: str, deadline_ts: float, episodes: Sequence[EpisodeRecord]
    ) -> InstanceStatus:
        """See `EnvironmentControl`."""
        return await self._call(InstanceStatus, "restore", checkpoint_id, deadline_ts, tuple(episodes))

    async def discard_restored(self, checkpoint_id: str) -> InstanceStatus:
        """See `EnvironmentControl`."""
        return await self._call(InstanceStatus, "discard_restored", checkpoint_id)

    async def resume(self, checkpoint_id: str) -> InstanceStatus:
        """See `EnvironmentControl`."""
        return await self._call(InstanceStatus, "resume", checkpoint_id)

    async def retire(self, episodes: Sequence[EpisodeId]) -> None:
        """See `EnvironmentControl`."""
        await self._call(type(None), "retire", tuple(episodes))

    async def forget(self, rollout_ids: Sequence[str]) -> None:
        """See `EnvironmentControl`."""
        await self._call(type(None), "forget", tuple(rollout_ids))

    async def _call(self, kind: type[T], verb: str, *arguments: Any) -> T:
        what = f"{verb} of environment '{self._instance}'"
        return await _called(kind, self._actor.environment.remote(verb, *arguments), what, self._translate)


class RayEpisodes:
    """`Episodes` of an actor that has a method `episode(verb, *arguments)`."""

    def __init__(self, instance: str, actor: Any) -> None:
        self._instance = instance
        self._actor = actor

    async def open(self, episode: EpisodeId, task: EpisodeTask) -> Boundary:
        """See `Episodes`."""
        return await self._call(Boundary, "open", episode, task)

    async def step(self, episode: EpisodeId, turn: int, action: str, call: CallRef) -> Boundary:
        """See `Episodes`."""
        return await self._call(Boundary, "step", episode, turn, action, call)

    async def close(self, episode: EpisodeId) -> None:
        """See `Episodes`."""
        await self._call(type(None), "close", episode)

    async def _call(self, kind: type[T], verb: str, *arguments: Any) -> T:
        what = f"{verb} of an episode of environment '{self._instance}'"
        return await _called(kind, self._actor.episode.remote(verb, *arguments), what, translate)


class EnvironmentActor:
    """A table with its control plane; make it an actor with `ray.remote(EnvironmentActor)`.

    Held steps occupy a call each: give the actor as much `max_concurrency` as it has episodes, and some more.
    """

    def __init__(self, instance: str, find: Callable[[str], Environment], grace_s: float = 10.0) -> None:
        self._table = EpisodeTable(instance, find)
        self._control = ControlPlane(self._table, grace_s=grace_s)

    def pid(self) -> int:
        """Its process."""
        return os.getpid()

    async def environment(self, verb: str, *arguments: Any) -> Any:
        """One verb of the control plane."""
        return await answer_control(self._control, verb, *arguments)

    async def episode(self, verb: str, *arguments: Any) -> Any:
        """One verb of the table."""
        return await answer_episodes(self._table, verb, *arguments)


def start_environment_actor(
    instance: str, find: Callable[[str], Environment], *, grace_s: float = 10.0, max_concurrency: int = 4096
) -> Any:
    """An `EnvironmentActor` in the running Ray; its handle."""
    options = {"num_cpus": 0, "max_concurrency": max_concurrency}
    return ray.remote(EnvironmentActor).options(**options).remote(instance, find, grace_s)


async def _answer(target: object, verbs: frozenset[str], verb: str, arguments: Sequence[Any]) -> Any:
    if verb not in verbs:
        raise BrokenInvariant(f"an environment was asked for {verb!r}; it knows {sorted(verbs)}")
    return await getattr(target, verb)(*arguments)


async def _called(kind: type[T], reference: Any, what: str, translated: Callable[[Exception, str], Exception]) -> T:
    try:
        reply = await reference
    except ActorDiedError as error:
        raise EnvironmentUnreachable(str(translated(error, what))) from error
    except (RayActorError, RayTaskError, ObjectLostError) as error:
        raise translated(error, what) from error
    if not isinstance(reply, kind):
        raise BrokenInvariant(f"{what} answered {type(reply).__name__} instead of {kind.__name__}")
    return reply
