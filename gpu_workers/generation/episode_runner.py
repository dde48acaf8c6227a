"""Runs one sibling of a multi-turn environment: model call, environment turn, and so on to the end of its episode.

Each finished turn is reported at once, with its captured call, so that it is staged where a snapshot finds it.
"""

import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from gpu_workers.controller.ports import Failure, GroupOrder, SiblingOrder, SiblingResult, TurnResult
from gpu_workers.environments.environment_task import EnvironmentTask
from gpu_workers.environments.ports import Boundary, CallRef, EpisodeId, EpisodeTask, PlayedEpisodes
from gpu_workers.generation.capture import Completion, staged_call
from gpu_workers.generation.model_calls import ModelCalls, Report
from storage.canonical import canonical_json
from storage.errors import EnvironmentRefusal, InfrastructureFailure, MidflightError, RolloutFailure
from storage.records import call_key, rollout_id
from storage.run_config import RunConfig

_CLOSED = "environment_closed"
# The prompt is not to blame for these: another attempt may well succeed.
_OF_THE_SYSTEM = frozenset({"unknown_episode", "stale_attempt", "turn_conflict"})


class EpisodeRunner:
    """Plays episodes with one engine."""

    def __init__(
        self,
        config: RunConfig,
        calls: ModelCalls,
        task: EnvironmentTask,
        episodes_of: Callable[[GroupOrder], PlayedEpisodes],
        name: str,
    ) -> None:
        """`episodes_of` finds where a group's episodes are held; `name` is how errors call the generator."""
        self._config = config
        self._calls = calls
        self._task = task
        self._episodes_of = episodes_of
        self._name = name

    async def run(self, order: GroupOrder, sibling: SiblingOrder, report: Report) -> SiblingResult:
        """The last turn's call and the sum of all turns' rewards, or the failure. The other turns go to `report`,
        and so does a partial call that is discarded.

        Raises InfrastructureFailure when the engine is dead, which no other call would survive either.
        """
        episode = EpisodeId(rollout_id(order.group_id, sibling.generation_index), sibling.environment_attempt)
        episodes = self._episodes_of(order)
        try:
            return await self._play(episodes, episode, order, sibling, report)
        except RolloutFailure as error:
            if error.retryable and self._calls.engine_is_dead:
                raise
            code = error.code if isinstance(error, EnvironmentRefusal) else ""
            failure = Failure(error.retryable or code in _OF_THE_SYSTEM, str(error), refused=code == _CLOSED)
            return SiblingResult(sibling.generation_index, sibling.attempt, failure=failure)
        finally:
            with suppress(MidflightError):  # an episode that can't be closed is retired or forgotten by the controller
                await episodes.close(episode)

    async def _play(
        self, episodes: PlayedEpisodes, episode: EpisodeId, order: GroupOrder, sibling: SiblingOrder, report: Report
    ) -> SiblingResult:
        opened, generation_s = time.perf_counter(), 0.0
        boundary = await episodes.open(episode, self._opening(order, sibling))
        if boundary.turn != sibling.turns:
            raise InfrastructureFailure(
                f"{self._name}: episode {episode} stands at turn {boundary.turn}, but the controller holds "
                f"{sibling.turns} of its turns; it is run again"
            )
        history = sibling.history
        while self._goes_on(boundary, history):
            tokens = (*history, *self._task.observation_tokens(boundary.observation))
            asked = time.perf_counter()
            async with self._bounded(episodes, episode):
                completion = await self._calls.complete(order, sibling, tokens, turn=boundary.turn, report=report)
            generation_s += time.perf_counter() - asked
            call = staged_call(order, sibling, completion, prompt=tokens, turn=boundary.turn)
            action, history = self._task.action_text(completion.token_ids), (*tokens, *completion.token_ids)
            boundary = await episodes.step(
                episode, boundary.turn, action, _reference(episode, sibling, boundary.turn, completion)
            )
            saved = boundary.record if order.keeps_running else None
            report(TurnResult(sibling.generation_index, sibling.attempt, call, saved))
        return SiblingResult(
            sibling.generation_index,
            sibling.attempt,
            reward=sum(boundary.record.rewards),
            generation_s=generation_s,
            environment_s=time.perf_counter() - opened - generation_s,
        )

    def _opening(self, order: GroupOrder, sibling: SiblingOrder) -> EpisodeTask:
        fields: dict[str, Any] = json.loads(order.prompt.task_json)
        return EpisodeTask(
            environment=fields["environment"],
            task_json=canonical_json(fields["task"]).decode(),
            seed=fields["seed"],
            generation_index=sibling.generation_index,
            deadline_s=self._config.async_rl.rollout_timeout_s,
            saved=sibling.episode,
        )

    def _goes_on(self, boundary: Boundary, history: tuple[int, ...]) -> bool:
        """Until the environment is done, or has had its turns, or the sequence is full. The first turn is always tried:
        a prompt without room is an error.
        """
        if boundary.done or boundary.turn >= self._task.environment.max_turns:
            return False
        return boundary.turn == 0 or self._calls.has_room(
            (*history, *self._task.observation_tokens(boundary.observation))
        )

    @asynccontextmanager
    async def _bounded(self, episodes: PlayedEpisodes, episode: EpisodeId) -> AsyncIterator[None]:
        try:
            async with episodes.deadline(episode):
                yield
        except TimeoutError as error:
            raise InfrastructureFailure(
                f"{self._name}: episode {episode} was not finished within async_rl.rollout_timeout_s "
                f"{self._config.async_rl.rollout_timeout_s}, pauses not counted"
            ) from error


def _reference(episode: EpisodeId, sibling: SiblingOrder, turn: int, completion: Completion) -> CallRef:
    key = call_key(episode.rollout_id, attempt=sibling.attempt, turn=turn)
    return CallRef(key, max(completion.versions, default=0))
