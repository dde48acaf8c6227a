"""One model call of a rollout: seeded by who samples and which turn, never by time or attempt."""

from typing import Any

from gpu_workers.controller.failures import is_infrastructure
from gpu_workers.controller.ports import GroupOrder, SiblingOrder
from gpu_workers.generation.capture import Completion, completion_of
from gpu_workers.generation.counter_seeds import sampling_seed
from gpu_workers.generation.engine import Engine
from storage.errors import DataFailure, InfrastructureFailure
from storage.records import call_key, rollout_id
from storage.run_config import RunConfig


class ModelCalls:
    """Samples completions from an engine."""

    def __init__(self, config: RunConfig, engine: Engine, name: str) -> None:
        """`name` is how errors call the generator."""
        self._config = config
        self._engine = engine
        self._name = name

    @property
    def engine_is_dead(self) -> bool:
        """Whether no call can succeed any more."""
        return bool(self._engine.llm.errored)

    def has_room(self, token_ids: tuple[int, ...]) -> bool:
        """Whether a completion of at least one token fits behind these."""
        return len(token_ids) < self._config.generation.max_model_len

    async def complete(
        self, order: GroupOrder, sibling: SiblingOrder, token_ids: tuple[int, ...], *, turn: int
    ) -> Completion:
        """Sample what follows `token_ids`. The attempt is part of the request's name only, never of its seed."""
        ref = order.prompt.ref
        if not self.has_room(token_ids):
            raise DataFailure(
                f"prompt {ref.prompt_id} has {len(token_ids)} tokens, which leaves no room in "
                f"generation.max_model_len {self._config.generation.max_model_len}; raise it or drop the prompt"
            )
        seed = sampling_seed(
            self._config.seed,
            prompt_id=ref.prompt_id,
            epoch=ref.epoch,
            generation_index=sibling.generation_index,
            turn=turn,
        )
        params = self._engine.sampling.params(seed, prompt_length=len(token_ids))
        request = call_key(rollout_id(order.group_id, sibling.generation_index), attempt=sibling.attempt, turn=turn)
        if sibling.environment_attempt != sibling.attempt:
            request = f"{request}/{sibling.environment_attempt}"  # the engine may still know the one before
        completion = completion_of(await self._call(token_ids, params, request))
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
