"""A fake generator behind the controller's port: tokens without a model, at the pace that a test sets."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from gpu_workers.controller.ports import (
    DiscardedPartial,
    Failure,
    GroupOrder,
    KnownCall,
    PartialCompletion,
    Peek,
    PeekedCall,
    SampledTokens,
    SiblingOrder,
    SiblingResult,
    WeightsRef,
)
from storage.records import CallSampling, RowKind, call_key, rollout_id
from storage.schemas import STAGED_CALLS, prompt_digest, row_digest

SAMPLING = CallSampling("counter", 7, 1.0, 1.0, (0,))


class FakeGenerator:
    """Tokens are a pure function of (prompt, epoch, generation index). Siblings can be held, delayed and failed.

    `had`: how many tokens of a held sibling's call are there to be peeked at; those of a dead generator stay readable.
    `sampled` counts every position that was sampled and went into a result or a peek.
    """

    environments: Sequence[Any] = ()

    def __init__(self) -> None:
        self.version = 0
        self.orders: list[GroupOrder] = []
        self.generated: list[str] = []
        self.failures: dict[str, list[Failure | Exception]] = {}
        self.held: Callable[[str, int], bool] = lambda group_id, index: False
        self._released = asyncio.Event()
        self.loads: list[int] = []
        self.refit_failures: list[Exception] = []
        self.aborted: list[str] = []
        self.closed: list[str] = []
        self.had: Callable[[str], int] = lambda rollout: 0
        self.sampled: Counter[tuple[str, int]] = Counter()
        self.unreadable: dict[str, str] = {}
        self.peek_gate: asyncio.Event | None = None
        self.calls: dict[str, tuple[GroupOrder, SiblingOrder]] = {}
        self.discards: Callable[[str], str] = lambda rollout: ""

    def release(self) -> None:
        """Let every held sibling go on, and hold none from now on."""
        self.held = lambda group_id, index: False
        self._released.set()
        self._released = asyncio.Event()

    async def generate(self, order: GroupOrder) -> AsyncGenerator[SiblingResult | DiscardedPartial, None]:
        self.orders.append(order)
        try:
            for sibling in order.siblings:
                rollout = rollout_id(order.group_id, sibling.generation_index)
                await asyncio.sleep(0)
                if sibling.partial is not None and (reason := self.discards(rollout)):
                    tokens = len(sibling.partial.sampled)
                    yield DiscardedPartial(sibling.generation_index, sibling.attempt, tokens, reason)
                    sibling = replace(sibling, partial=None)  # noqa: PLW2901
                self.calls[rollout] = order, sibling
                if self.held(order.group_id, sibling.generation_index):
                    await self._released.wait()
                if self.failures.get(rollout):
                    failure = self.failures[rollout].pop(0)
                    if isinstance(failure, Exception):
                        raise failure
                    yield SiblingResult(sibling.generation_index, sibling.attempt, failure=failure)
                    continue
                self.generated.append(rollout)
                result = self._continued(order, sibling)
                if result.calls is not None:
                    self._count(rollout, sibling.partial, result.calls.column("token_ids")[0].values.to_pylist())
                yield result
        finally:
            self.closed.append(order.group_id)

    def _count(self, rollout: str, partial: PartialCompletion | None, tokens: list[int]) -> None:
        """The positions that were sampled here: those behind what was continued."""
        had = [] if partial is None else partial.sampled.token_ids.tolist()
        assert tokens[: len(had)] == had
        for position in range(len(had), len(tokens)):
            self.sampled[rollout, position] = 1  # a peek has counted it already

    async def peek(self, wanted: Mapping[str, KnownCall]) -> Peek:
        if self.peek_gate is not None:
            await self.peek_gate.wait()
        await asyncio.sleep(0)
        running = {rollout: self.calls[rollout] for rollout in wanted if rollout in self.calls}
        calls = [self._peeked(rollout, *running[rollout], known=wanted[rollout]) for rollout in running]
        return Peek(tuple(call for call in calls if call is not None), self.unreadable)

    def _peeked(self, rollout: str, order: GroupOrder, sibling: SiblingOrder, *, known: KnownCall) -> PeekedCall | None:
        if sibling.environment_attempt != known.environment_attempt or rollout in self.unreadable:
            return None
        row = self._continued(order, sibling).calls
        tokens, logprobs, starts, versions = (
            row.column(name)[0].as_py() for name in ("token_ids", "logprobs", "version_starts", "versions")
        )
        begun = 0 if sibling.partial is None else len(sibling.partial.sampled)
        had = max(begun, min(len(tokens), self.had(rollout)))
        self._count(rollout, sibling.partial, tokens[:had])
        spans = [(start, version) for start, version in zip(starts, versions, strict=True) if start < had]
        start = known.tokens if known.turn == 0 and known.tokens <= had else 0
        within = [(max(first - start, 0), version) for first, version in spans if first > start]
        at_start = [version for first, version in spans if first <= start][-1:] if start < had else []
        within = [*((0, version) for version in at_start), *within]
        sampled = SampledTokens(
            np.array(tokens[start:had], np.int32),
            np.array(logprobs[start:had], np.float32),
            tuple(first for first, _ in within),
            tuple(version for _, version in within),
        )
        return PeekedCall(
            rollout,
            sibling.attempt,
            sibling.environment_attempt,
            0,
            len(order.prompt.token_ids),
            prompt_digest(order.prompt.token_ids),
            SAMPLING,
            start,
            sampled,
            "stop" if had == len(tokens) else "",
        )

    def _continued(self, order: GroupOrder, sibling: SiblingOrder) -> SiblingResult:
        """The result, in which the tokens that were continued keep their versions."""
        result, partial = self.result(order, sibling.generation_index, sibling.attempt), sibling.partial
        if partial is None:
            return result
        (row,) = result.calls.to_pylist()
        starts, versions = [*partial.sampled.version_starts], [*partial.sampled.versions]
        if versions[-1] != self.version and len(partial.sampled) < len(row["token_ids"]):
            starts, versions = [*starts, len(partial.sampled)], [*versions, self.version]
        row |= {"version_starts": starts, "versions": versions}
        row["digest"] = row_digest(RowKind.STAGED_CALL, row)
        return replace(result, calls=pa.RecordBatch.from_pylist([row], schema=STAGED_CALLS))

    def result(self, order: GroupOrder, index: int, attempt: int) -> SiblingResult:
        ref = order.prompt.ref
        rng = np.random.default_rng([ref.prompt_id, ref.epoch, index])
        tokens = rng.integers(1, 50, size=3 + int(rng.integers(0, 4))).tolist()
        rollout = rollout_id(order.group_id, index)
        row: dict[str, Any] = {"rollout_id": rollout, "group_id": order.group_id, "attempt": attempt, "turn": 0}
        row |= {"row_id": call_key(rollout, attempt=attempt, turn=0), "parent_key": None, "finish_reason": "stop"}
        row |= {"prompt_token_ids": list(order.prompt.token_ids), "token_ids": tokens}
        row |= {"logprobs": [float(np.float32(-t / 7)) for t in tokens]}
        row |= {"version_starts": [0], "versions": [self.version]}
        row["digest"] = row_digest(RowKind.STAGED_CALL, row)
        calls = pa.RecordBatch.from_pylist([row], schema=STAGED_CALLS)
        return SiblingResult(index, attempt, calls=calls, reward=(tokens[0] % 10) / 10)

    async def load_weights(self, weights: WeightsRef) -> Mapping[str, float]:
        await asyncio.sleep(0)
        if self.refit_failures:
            raise self.refit_failures.pop(0)
        self.version = weights.version
        self.loads.append(weights.version)
        return {"load_s": 0.0}

    async def abort(self, group_id: str) -> None:
        await asyncio.sleep(0)
        self.aborted.append(group_id)
