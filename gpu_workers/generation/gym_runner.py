"""Runs one sibling whose rollout an agent of a Gym plays from beginning to end."""

import json
import time
from dataclasses import replace

from gpu_workers.controller.ports import DiscardedPartial, Failure, GroupOrder, SiblingOrder, SiblingResult
from gpu_workers.environments.gym_run import GymAgents
from gpu_workers.environments.gym_task import GymTask
from gpu_workers.environments.ports import EpisodeId
from gpu_workers.generation.gym_rollouts import GymRollouts
from gpu_workers.generation.model_calls import ModelCalls, Report, unreported
from storage.errors import DataFailure, RolloutFailure
from storage.records import rollout_id

PLAYED_BY_AGENT = "it is played by a Gym agent, which begins anew after an interruption"


class GymRunner:
    """Asks an agent for a rollout, and takes the model calls that it made meanwhile."""

    def __init__(self, calls: ModelCalls, task: GymTask, rollouts: GymRollouts, agents: GymAgents, name: str) -> None:
        """`name` is how errors call the generator."""
        self._calls = calls
        self._task = task
        self._rollouts = rollouts
        self._agents = agents
        self._name = name

    async def run(self, order: GroupOrder, sibling: SiblingOrder, report: Report = unreported) -> SiblingResult:
        """All captured calls and the agent's reward, or the failure. No partial call is continued.

        Raises InfrastructureFailure when the engine is dead, which no other call would survive either.
        """
        episode = EpisodeId(rollout_id(order.group_id, sibling.generation_index), sibling.environment_attempt)
        agent = self._task.agent(order.prompt.ref.prompt_id)
        if sibling.partial is not None:
            tokens = len(sibling.partial.sampled)
            report(DiscardedPartial(sibling.generation_index, sibling.attempt, tokens, PLAYED_BY_AGENT))
            sibling = replace(sibling, partial=None)
        began = time.perf_counter()
        try:
            with self._rollouts.running(episode, order, sibling) as rollout:
                outcome = await self._agents.run(agent, json.loads(order.prompt.task_json), episode)
                calls = rollout.calls()
            if calls is None:
                raise DataFailure(
                    f"{self._name}: Gym agent '{agent}' played {episode} without a model call that reached this "
                    "generator; set its model server's base URL to environment.gym_model_host and gym_model_port"
                )
        except RolloutFailure as error:
            if error.retryable and self._calls.engine_is_dead:
                raise
            return SiblingResult(
                sibling.generation_index, sibling.attempt, failure=Failure(error.retryable, str(error))
            )
        return SiblingResult(
            sibling.generation_index,
            sibling.attempt,
            calls=calls,
            reward=outcome.reward,
            masked=outcome.masked,
            generation_s=rollout.generation_s,
            environment_s=max(time.perf_counter() - began - rollout.generation_s, 0.0),
        )
