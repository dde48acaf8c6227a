"""Runs one sibling from its model call to its reward. Single-turn: one call per sibling."""

from typing import Any

from gpu_workers.controller.failures import is_infrastructure
from gpu_workers.controller.ports import Failure, GroupOrder, SiblingOrder, SiblingResult
from gpu_workers.environments.tasks import Task
from gpu_workers.generation.capture import Completion, completion_of, staged_call
from gpu_workers.generation.counter_seeds import sampling_seed
from gpu_workers.generation.engine import Engine
from storage.errors import DataFailure, InfrastructureFailure, RolloutFailure
from storage.records import call_key, rollout_id
from storage.run_config import RunConfig

_TURN = 0


class SiblingRunner:
    """Samples completions from an engine and scores them with a task."""

    def __init__(self, config: RunConfig, engine: Engine, task: Task, name: str) -> None:
        """`name` is how errors call the generator."""
        self._config = config
        self._engine = engine
        self._task = task
        self._name = name

    async def run(self, order: GroupOrder, sibling: SiblingOrder) -> SiblingResult:
        """The sibling's captured call and reward, or its failure.

        Raises InfrastructureFailure when the engine is dead, which no other call would survive either.
        """
        try:
            completion = await self._complete(order, sibling)
            reward = self._score(order, completion)
        except RolloutFailure as error:
            if error.retryable and self._engine.llm.errored:
                raise
            failure = Failure(infrastructure=error.retryable, message=str(error))
            return SiblingResult(sibling.generation_index, sibling.attempt, failure=failure)
        calls = staged_call(order, sibling, completion, turn=_TURN)
        return SiblingResult(sibling.generation_index, sibling.attempt, calls=calls, reward=reward)

    async def _complete(self, order: GroupOrder, sibling: SiblingOrder) -> Completion:
        """Sample a completion. The attempt is part of the request's name only, never of its seed."""
        prompt = order.prompt
        if len(prompt.token_ids) >= self._config.generation.max_model_len:
            raise DataFailure(
                f"prompt {prompt.ref.prompt_id} has {len(prompt.token_ids)} tokens, which leaves no room in "
                f"generation.max_model_len {self._config.generation.max_model_len}; raise it or drop the prompt"
            )
        seed = sampling_seed(
            self._config.seed,
            prompt_id=prompt.ref.prompt_id,
            epoch=prompt.ref.epoch,
            generation_index=sibling.generation_index,
            turn=_TURN,
        )
        params = self._engine.sampling.params(seed, prompt_length=len(prompt.token_ids))
        request = call_key(rollout_id(order.group_id, sibling.generation_index), attempt=sibling.attempt, turn=_TURN)
        completion = completion_of(await self._call(prompt.token_ids, params, request))
        if completion.finish_reason not in ("stop", "length"):
            raise InfrastructureFailure(f"{self._name}: {request} ended with {completion.finish_reason!r}; try again")
        return completion

    async def _call(self, token_ids: tuple[int, ...], params: Any, request: str) -> Any:
        """vLLM's finished output; its errors become failures of this project."""
        from vllm.v1.engine.exceptions import EngineDeadError

        tokens = {"type": "token", "prompt_token_ids": list(token_ids)}
        try:
            outputs = [output async for output in self._engine.llm.generate(tokens, params, request)]
        except EngineDeadError as error:
            raise InfrastructureFailure(f"{self._name}: its engine died during {request}; start it again") from error
        except Exception as error:
            if is_infrastructure(error):
                raise InfrastructureFailure(
                    f"{self._name}: {request} failed: {error.__cause__ or error!r}; try again"
                ) from error
            raise DataFailure(f"{self._name}: vLLM refuses {request}: {error!r}; correct its prompt") from error
        return outputs[-1].outputs[0]

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
