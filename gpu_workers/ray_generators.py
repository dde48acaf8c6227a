"""Generator actors in Ray: how one is started under its name, and started again when it died."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from gpu_workers.controller.ports import GroupOrder, KnownCall, Peek, RolloutResult, WeightsRef
from gpu_workers.environments.ray_control import RayEnvironmentControl
from gpu_workers.generation.generator_actor import GENERATOR_ACTOR_OPTIONS, GeneratorActor
from gpu_workers.generation.generator_client import GeneratorClient
from gpu_workers.generation.runtime_env import generator_env
from gpu_workers.generation.supervised_environment import instance_name
from gpu_workers.ray_ports import translate
from gpu_workers.runtime_names import actors_of, named
from storage.errors import InfrastructureFailure
from storage.run_config import RunConfig

_ANSWER_S = 60.0


class RayGenerator:
    """A generator actor that answered; see `supervision.LiveGenerator`."""

    def __init__(self, actor: Any, facts: Mapping[str, Any]) -> None:
        """`facts` are those of `GeneratorActor.ready`."""
        self.facts = facts
        self._actor = actor
        self._client = GeneratorClient(actor)
        self._name = f"generator {facts['index']}"
        self.environment = RayEnvironmentControl(instance_name(facts["index"]), actor)

    async def generate(self, order: GroupOrder) -> AsyncGenerator[RolloutResult, None]:
        """Stream the siblings of one group, each as soon as it is finished."""
        try:
            async with contextlib.aclosing(self._client.generate(order)) as results:
                async for result in results:
                    yield result
        except RayError as error:
            raise translate(error, self._name) from error

    async def peek(self, wanted: Mapping[str, KnownCall] | None) -> Peek:
        """The tokens so far of running calls."""
        try:
            return await self._client.peek(wanted)
        except RayError as error:
            raise translate(error, f"peek of {self._name}") from error

    async def load_weights(self, weights: WeightsRef) -> Mapping[str, float]:
        """Refit the engine."""
        try:
            return await self._client.load_weights(weights)
        except RayError as error:
            raise translate(error, f"refit of {self._name}") from error

    async def abort(self, group_id: str) -> None:
        """Stop a group's running calls."""
        try:
            await self._client.abort(group_id)
        except RayError as error:
            raise translate(error, f"abort of {group_id} on {self._name}") from error

    async def is_alive(self) -> bool:
        """Whether the actor answers and its engine's process lives."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                return bool(await self._actor.is_alive.remote())
        except (RayError, TimeoutError):
            return False


class RayGeneratorHost:
    """Starts the generators of one run. Blocking calls to Ray are made in a thread."""

    def __init__(self, config: RunConfig, model_dir: Path) -> None:
        self._config = config
        self._model_dir = model_dir

    def create(self, index: int) -> Any:
        """A new generator actor, detached and named; it may still be starting."""
        actor: Any = ray.remote(GeneratorActor)
        return actor.options(
            **named(self._config.name, _name(index)),
            **GENERATOR_ACTOR_OPTIONS,
            num_cpus=self._config.cluster.cpus_per_generator,
            num_gpus=self._config.cluster.gpus_per_generator,
            runtime_env={"env_vars": generator_env(self._config)},
        ).remote(self._config, str(self._model_dir), index)

    async def start(self, index: int) -> RayGenerator:
        """End what is left under the name and start the generator with the same options."""
        await asyncio.to_thread(self._end, index)
        try:
            actor = await asyncio.to_thread(self.create, index)
            return RayGenerator(actor, await actor.ready.remote())
        except RayError as error:
            raise translate(error, f"start of generator {index}") from error

    def _end(self, index: int) -> None:
        deadline = time.monotonic() + _ANSWER_S
        while (actor := actors_of(self._config.name).get(_name(index))) is not None:
            ray.kill(actor, no_restart=True)
            if time.monotonic() > deadline:
                raise InfrastructureFailure(f"actor {_name(index)} did not end within {_ANSWER_S} s")
            time.sleep(0.05)


def _name(index: int) -> str:
    return f"generator-{index}"
