"""The controller's end of one generator actor: orders go out as calls, finished siblings come back in one stream."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from gpu_workers.controller.ports import GroupOrder, KnownCall, Peek, RolloutResult, SiblingResult, WeightsRef
from gpu_workers.generation.peek_wire import unpack_peek
from gpu_workers.generation.wire import unpack

_Answer = RolloutResult | Exception


class GeneratorClient:
    """One Ray actor of `GeneratorActor`, for one event loop. The stream is read while any group waits for it."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._tickets = itertools.count()
        self._waiting: dict[int, asyncio.Queue[_Answer]] = {}
        self._reader: asyncio.Task[None] | None = None

    async def generate(self, order: GroupOrder) -> AsyncGenerator[RolloutResult, None]:
        """Run the group; yield each turn and each sibling as soon as it is finished. Leaving early ends the rest.

        Raises InfrastructureFailure when the engine is dead, and Ray's errors when the actor is.
        """
        ticket, answers = next(self._tickets), asyncio.Queue[_Answer]()
        self._waiting[ticket] = answers
        left = len(order.siblings)
        submission = asyncio.create_task(self._submit(ticket, order, answers))
        self._read()
        try:
            while left:
                answer = await answers.get()
                if isinstance(answer, Exception):
                    raise answer
                left -= isinstance(answer, SiblingResult)
                yield answer
        finally:
            submission.cancel()
            del self._waiting[ticket]
            if left:
                self._actor.abandon.remote(ticket)

    async def peek(self, wanted: Mapping[str, KnownCall] | None) -> Peek:
        """The running model calls of these rollouts; None: all of them, whole. See `CallBook.peek`."""
        fields = (
            None
            if wanted is None
            else {rollout: (known.environment_attempt, known.turn, known.tokens) for rollout, known in wanted.items()}
        )
        return unpack_peek(await self._actor.peek.remote(fields))

    async def load_weights(self, weights: WeightsRef) -> dict[str, float]:
        """Refit; see `EngineWeights.load`."""
        timings: dict[str, float] = await self._actor.load_weights.remote(weights)
        return timings

    async def abort(self, group_id: str) -> None:
        """End the group's running calls."""
        await self._actor.abort.remote(group_id)

    async def _submit(self, ticket: int, order: GroupOrder, answers: asyncio.Queue[_Answer]) -> None:
        try:
            await self._actor.submit.remote(ticket, order)
        except Exception as error:  # noqa: BLE001 -- the group would wait for ever
            answers.put_nowait(error)

    def _read(self) -> None:
        if self._reader is None or self._reader.done():
            self._reader = asyncio.create_task(self._deliver(), name="generator results")

    async def _deliver(self) -> None:
        """Takes messages from the actor, gives each result to the group that waits for it, ends with the actor."""
        try:
            async for reference in self._actor.results.options(num_returns="streaming").remote():
                for finished in unpack(await reference):
                    if finished.ticket in self._waiting:
                        self._waiting[finished.ticket].put_nowait(finished.result)
        except Exception as error:  # noqa: BLE001 -- whatever it is, the groups that wait must learn of it
            for answers in self._waiting.values():
                answers.put_nowait(error)
