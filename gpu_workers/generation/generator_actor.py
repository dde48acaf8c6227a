"""The generator: a vLLM engine that runs whole prompt groups and returns siblings as soon as they are finished.

A plain class. On a cluster it becomes an asynchronous Ray actor:

    ray.remote(GeneratorActor).options(**GENERATOR_ACTOR_OPTIONS, runtime_env={"env_vars": generator_env(config)})
"""

import os
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from gpu_workers.controller.ports import (
    Failure,
    GroupOrder,
    KnownCall,
    RolloutResult,
    SiblingOrder,
    SiblingResult,
    WeightsRef,
)
from gpu_workers.environments.control_plane import ControlPlane
from gpu_workers.environments.environment_task import EnvironmentTask
from gpu_workers.environments.episode_table import EpisodeTable
from gpu_workers.environments.gym_run import GymAgents
from gpu_workers.environments.gym_task import GymTask
from gpu_workers.environments.http_messages import TOKEN_VARIABLE
from gpu_workers.environments.http_server import token_for
from gpu_workers.environments.interface import Environment
from gpu_workers.environments.ports import PlayedEpisodes
from gpu_workers.environments.ray_control import answer_control
from gpu_workers.environments.served import ServedEpisodes, served_instances
from gpu_workers.environments.tasks import Task, build_task
from gpu_workers.generation.call_book import CallBook, blames_prompt
from gpu_workers.generation.engine import start_engine
from gpu_workers.generation.engine_requests import EngineRequests
from gpu_workers.generation.engine_weights import EngineWeights
from gpu_workers.generation.episode_runner import EpisodeRunner
from gpu_workers.generation.gym_rollouts import GymRollouts
from gpu_workers.generation.gym_runner import PLAYED_BY_AGENT, GymRunner
from gpu_workers.generation.model_calls import ModelCalls
from gpu_workers.generation.model_server import ModelServer, build_model_app
from gpu_workers.generation.peek_wire import PeekMessage, pack_peek
from gpu_workers.generation.running_calls import RunningCalls
from gpu_workers.generation.sibling_runner import SiblingRunner
from gpu_workers.generation.supervised_environment import instance_name
from gpu_workers.generation.wire import Message, pack
from gpu_workers.worker_logs import forward_logs
from storage.records import rollout_id
from storage.run_config import RunConfig

# One event loop serves everything (vLLM's client is bound to it), so there are no concurrency groups, which would
# bring a loop each. Control calls don't queue because the bound is far above the groups that can be in flight.
GENERATOR_ACTOR_OPTIONS: dict[str, Any] = {"max_concurrency": 10_000}


class GeneratorActor:
    """One engine with the task that its completions answer."""

    def __init__(self, config: RunConfig, model_dir: Path, index: int) -> None:
        """Starts the engine (9 to 15 s on the CPU) on a Hugging Face folder, whose weights count as version 0."""
        forward_logs(config.name, f"generator {index}")
        task = build_task(config.data)
        self._name = f"generator {index}"
        self._index = index
        self._config = config
        self._task = task
        self._engine = start_engine(config, Path(model_dir), stop_token_ids=task.stop_token_ids)
        self._table = EpisodeTable(instance_name(index), lambda name: _environment_of(task, name))
        self._control = ControlPlane(self._table, grace_s=config.environment.lease_grace_s)
        self._book = CallBook(
            EngineRequests(self._engine.llm),
            keeps=True,
            unreadable=PLAYED_BY_AGENT if isinstance(task, GymTask) else "",
        )
        calls = ModelCalls(config, self._engine, self._name, self._book)
        self._siblings: SiblingRunner | EpisodeRunner | GymRunner = SiblingRunner(config, calls, task, self._name)
        if isinstance(task, EnvironmentTask):
            self._siblings = EpisodeRunner(config, calls, task, self._holders(), self._name)
        self._model_server: ModelServer | None = None
        if isinstance(task, GymTask):
            self._siblings, self._model_server = self._gym(calls, task)
        self._weights = EngineWeights(self._engine.llm, self._name)
        self._calls: RunningCalls[SiblingOrder, RolloutResult] = RunningCalls(_aborted)

    def _holders(self) -> Callable[[GroupOrder], PlayedEpisodes]:
        """Where a group's episodes are held: here, or by one of the environment servers."""
        deadline_s = self._config.async_rl.rollout_timeout_s
        found = served_instances(self._config.environment.servers)
        served = {instance.name: ServedEpisodes(instance, deadline_s=deadline_s) for instance in found}
        names = sorted(served)
        if not names:
            return lambda _order: self._table
        return lambda order: served[order.instance or names[order.prompt.ref.prompt_id % len(names)]]

    def _gym(self, calls: ModelCalls, task: GymTask) -> tuple[GymRunner, ModelServer]:
        """Rollouts that agents of a Gym play, and where their model calls are answered."""
        environment = self._config.environment
        host, token = environment.gym_model_host, os.environ.get(TOKEN_VARIABLE)
        rollouts = GymRollouts(calls, task)
        agents = GymAgents(environment.gym_agents, token, timeout_s=self._config.async_rl.rollout_timeout_s)
        app = build_model_app(
            rollouts,
            max_model_len=self._config.generation.max_model_len,
            token=token_for(host, without_token=True),
        )
        server = ModelServer(app, host=host, port=environment.gym_model_port)
        return GymRunner(calls, task, rollouts, agents, self._name), server

    async def ready(self) -> dict[str, Any]:
        """`pid`, `engine_pids`, `index` and the loaded weights' `version` (None: those of the model's folder)."""
        if self._model_server is not None:
            await self._model_server.start()
        await self._engine.llm.get_supported_tasks()  # vLLM's first request would wait for it, and be unknown meanwhile
        return {
            "pid": os.getpid(),
            "engine_pids": self._engine.pids,
            "index": self._index,
            "version": self._weights.version,
        }

    async def is_alive(self) -> bool:
        """Whether the engine's process lives. A dead one fails every call; only a new actor helps."""
        return not self._engine.llm.errored

    async def submit(self, ticket: int, order: GroupOrder) -> None:
        """Start the group's siblings together and return; what becomes of each appears in `results` under `ticket`."""
        calls = {sibling: self._run(ticket, order, sibling) for sibling in order.siblings}
        self._calls.start(ticket, order.group_id, calls)

    async def _run(self, ticket: int, order: GroupOrder, sibling: SiblingOrder) -> SiblingResult:
        rollout = rollout_id(order.group_id, sibling.generation_index)
        result: SiblingResult | None = None
        try:
            result = await self._siblings.run(order, sibling, lambda said: self._calls.report(ticket, said))
            return result
        finally:
            self._book.over(rollout, sibling, forget=blames_prompt(result))

    async def peek(self, wanted: Mapping[str, tuple[int, int, int]] | None) -> PeekMessage:
        """The running model calls of these rollouts, given with the fields of a `KnownCall`; None: all of them, whole.

        Asks nothing of the engine's process, and works when that is dead. See `CallBook.peek`.
        """
        known = None if wanted is None else {rollout: KnownCall(*fields) for rollout, fields in wanted.items()}
        return pack_peek(self._book.peek(known))

    async def environment(self, verb: str, *arguments: Any) -> Any:
        """One verb of `EnvironmentControl`: of the episodes that run here."""
        return await answer_control(self._control, verb, *arguments)

    async def results(self) -> AsyncIterator[Message]:
        """The stream of everything that finishes; it ends when another one is opened.

        A message costs Ray about 1 ms of CPU whatever it holds, so each holds all that finished since the last.
        """
        reader = self._calls.open_reader()
        while (finished := await self._calls.take(reader)) is not None:
            yield pack(finished)

    async def load_weights(self, ref: WeightsRef) -> dict[str, float]:
        """Exchange the weights while calls are running; see `EngineWeights.load`."""
        return await self._weights.load(ref)

    async def abort(self, group_id: str) -> None:
        """End the group's running calls: each yields an infrastructure failure. Unknown groups are ignored."""
        self._calls.abort(group_id)

    async def abandon(self, ticket: int) -> None:
        """End what still runs under a ticket that nobody waits for."""
        self._calls.abandon(ticket)

    async def stop(self) -> None:
        """End the engine's process. Not needed where the actor itself is ended."""
        self._engine.llm.shutdown()


def _environment_of(task: Task, name: str) -> Environment:
    """The one environment that is played here."""
    if not isinstance(task, EnvironmentTask) or task.environment.name != name:
        raise KeyError(name)
    return task.environment


def _aborted(group_id: str, sibling: SiblingOrder) -> SiblingResult:
    failure = Failure(infrastructure=True, message=f"group {group_id} was aborted")
    return SiblingResult(sibling.generation_index, sibling.attempt, failure=failure)
