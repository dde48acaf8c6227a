"""Runs one sibling of a single-turn task from its model call to its reward."""

import time

from gpu_workers.controller.failures import is_infrastructure
from gpu_workers.controller.ports import Failure, GroupOrder, SiblingOrder, SiblingResult
from gpu_workers.environments.tasks import Task
from gpu_workers.generation.capture import Completion, staged_call
from gpu_workers.generation.model_calls import ModelCalls, Report, unreported
from storage.errors import DataFailure, InfrastructureFailure, RolloutFailure
from storage.run_config import RunConfig

_TURN = 0


class SiblingRunner:
    """Samples completions and scores them with a task."""

    def __init__(self, config: RunConfig, calls: ModelCalls, task: Task, name: str) -> None:
        """`name` is how errors call the generator."""
        self._config = config
        self._calls = calls
        self._task = task
        self._name = name

    async def run(self, order: GroupOrder, sibling: SiblingOrder, report: Report = unreported) -> SiblingResult:
        """The sibling's captured call and reward, or its failure. A partial call that is discarded goes to `report`.

        Raises InfrastructureFailure when the engine is dead, which no other call would survive either.
        """
        prompt, began = order.prompt.token_ids, time.perf_counter()
        try:
            completion = await self._calls.complete(order, sibling, prompt, turn=_TURN, report=report)
            sampled = time.perf_counter()
            reward = self._score(order, completion)
        except RolloutFailure as error:
            if error.retryable and self._calls.engine_is_dead:
                raise
            failure = Failure(infrastructure=error.retryable, message=str(error))
            return SiblingResult(sibling.generation_index, sibling.attempt, failure=failure)
        scored = time.perf_counter()
        return SiblingResult(
            sibling.generation_index,
            sibling.attempt,
            calls=staged_call(order, sibling, completion, prompt=prompt, turn=_TURN),
            reward=reward,
            generation_s=sampled - began,
            environment_s=scored - sampled,
        )

    def _score(self, order: GroupOrder, completion: Completion) -> float:
        try:
            return float(self._task.score(order.prompt.task_json, completion.token_ids))
        except Exception as error:
            if is_infrastructure(error):
                raise InfrastructureFailure(
                    f"{self._name}: task {self._config.data.task!r} could not score prompt "
                    f"{order.prompt.ref.prompt_id}: {error!r}; try again"
                ) from error
            raise DataFailure(
                f"prompt {order.prompt.ref.prompt_id} can't be scored by task {self._config.data.task!r}: {error!r}; "
                "correct the task's score or its prompt"
            ) from error
