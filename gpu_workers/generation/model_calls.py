"""The model calls of rollouts: seeded by who samples and which turn, never by time or attempt, and continued from the
tokens that an interrupted one had.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from gpu_workers.controller.failures import is_infrastructure
from gpu_workers.controller.ports import DiscardedPartial, GroupOrder, RolloutResult, SampledTokens, SiblingOrder
from gpu_workers.controller.sampled_tokens import NO_TOKENS, joined
from gpu_workers.generation.call_book import BookedCall, CallBook
from gpu_workers.generation.capture import Completion, completion_from, completion_of, tokens_of
from gpu_workers.generation.counter_seeds import sampling_seed
from gpu_workers.generation.engine import Engine
from gpu_workers.generation.engine_requests import EngineRequests
from gpu_workers.generation.model_call import ModelCall
from storage.errors import DataFailure, InfrastructureFailure
from storage.run_config import RunConfig

Report = Callable[[RolloutResult], None]


def unreported(_result: RolloutResult) -> None:
    """For a caller that does not ask what happens before a sibling's end."""


class ModelCalls:
    """Samples completions from an engine."""

    def __init__(self, config: RunConfig, engine: Engine, name: str, book: CallBook | None = None) -> None:
        """`name` is how errors call the generator; `book` is where its running calls can be read, if anywhere."""
        self._config = config
        self._engine = engine
        self._name = name
        self._book = CallBook(EngineRequests(engine.llm), keeps=False) if book is None else book

    @property
    def engine_is_dead(self) -> bool:
        """Whether no call can succeed any more."""
        return bool(self._engine.llm.errored)

    def has_room(self, token_ids: tuple[int, ...]) -> bool:
        """Whether a completion of at least one token fits behind these."""
        return len(token_ids) < self._config.generation.max_model_len

    async def complete(
        self,
        order: GroupOrder,
        sibling: SiblingOrder,
        token_ids: tuple[int, ...],
        *,
        turn: int,
        report: Report = unreported,
    ) -> Completion:
        """Sample what follows `token_ids`, or what is missing of it, where the sibling brings a part that fits.

        A part that does not fit is discarded, and reported. The attempt is part of the request's name only, never of
        its seed.
        """
        ref = order.prompt.ref
        if not self.has_room(token_ids):
            raise DataFailure(
                f"prompt {ref.prompt_id} has {len(token_ids)} tokens, which leaves no room in "
                f"generation.max_model_len {self._config.generation.max_model_len}; raise it or drop the prompt"
            )
        call = self._call(order, sibling, token_ids, turn)
        partial, refusal = call.partial, ""
        if partial is not None and (refusal := call.refusal(partial)):
            tokens = len(partial.sampled)
            report(DiscardedPartial(sibling.generation_index, sibling.attempt, tokens, refusal))
        begun = NO_TOKENS if partial is None or refusal else partial.sampled
        with self._book.opened(call, begun, sampled_anew=bool(refusal)) as booked:
            completion = await self._continued(call, begun, booked)
            booked.end(completion)
            return completion

    def _call(self, order: GroupOrder, sibling: SiblingOrder, token_ids: tuple[int, ...], turn: int) -> ModelCall:
        ref, sampling = order.prompt.ref, self._engine.sampling
        seed = sampling_seed(
            self._config.seed,
            prompt_id=ref.prompt_id,
            epoch=ref.epoch,
            generation_index=sibling.generation_index,
            turn=turn,
        )
        budget = sampling.budget(len(token_ids))
        return ModelCall(order, sibling, turn, token_ids, sampling.call_sampling(seed), budget)

    async def _continued(self, call: ModelCall, begun: SampledTokens, booked: BookedCall) -> Completion:
        """The whole completion, of which `begun` is the beginning."""
        if reason := call.finish_reason(begun):
            return completion_from(begun, reason)
        params = self._engine.sampling.params(call.sampling.seed, prompt_length=len(call.prompt), offset=len(begun))
        token_ids = [*call.prompt, *begun.token_ids.tolist()]
        asked = asyncio.create_task(self._last_output(token_ids, params, call.request_id))
        try:
            await asyncio.sleep(0)  # vLLM registers a request before it first waits
            booked.asked()
            sampled = completion_of(await asked)
        finally:
            asked.cancel()
        if sampled.finish_reason not in ("stop", "length"):
            raise InfrastructureFailure(
                f"{self._name}: {call.request_id} ended with {sampled.finish_reason!r}; try again"
            )
        return completion_from(joined((begun, tokens_of(sampled))), sampled.finish_reason) if len(begun) else sampled

    async def _last_output(self, token_ids: list[int], params: Any, request: str) -> Any:
        """vLLM's finished output; its errors become failures of this project."""
        tokens = {"type": "token", "prompt_token_ids": token_ids}
        try:
            outputs = [output async for output in self._engine.llm.generate(tokens, params, request)]
        except Exception as error:
            if self.engine_is_dead:
                raise InfrastructureFailure(
                    f"{self._name}: its engine died during {request}; start it again"
                ) from error
            if is_infrastructure(error):
                raise InfrastructureFailure(
                    f"{self._name}: {request} failed: {error.__cause__ or error!r}; try again"
                ) from error
            raise DataFailure(f"{self._name}: vLLM refuses {request}: {error!r}; correct its prompt") from error
        return outputs[-1].outputs[0]
