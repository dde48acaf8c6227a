"""A stand-in for vLLM's engine that is stepped by the test, and one life of a generator around it.

It has the shapes of `AsyncLLM` that are read here. A token depends on the weights, the seed, its position and
everything before it, so that nothing but the same prompt and the same offset can repeat it.
"""

import asyncio
import hashlib
import struct
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from gpu_workers.controller.ports import (
    DiscardedPartial,
    GroupOrder,
    KnownCall,
    PartialCompletion,
    Peek,
    PeekedCall,
    RolloutResult,
    SiblingOrder,
)
from gpu_workers.generation.call_book import CallBook
from gpu_workers.generation.capture import Completion
from gpu_workers.generation.engine import Engine
from gpu_workers.generation.engine_requests import EngineRequests
from gpu_workers.generation.model_calls import ModelCalls
from gpu_workers.generation.sampling import CounterSampling, sampling_settings
from storage.records import Prompt, PromptRef, rollout_id
from storage.run_config import RunConfig

STOP, SHORTEST = 1, 6
CONFIG = RunConfig(
    name="run",
    generation={"max_new_tokens": 24, "max_model_len": 64},
    rollout_recovery={"target_level": "prefix"},
)


class EngineDied(Exception):
    """What the fake's requests end with when it dies."""


class _Request:
    """Like vLLM's `RequestState`."""

    def __init__(self, name: str, context: list[int], params: Any) -> None:
        self.external_req_id = name
        self.detokenizer = SimpleNamespace(output_token_ids=[])
        self.logprobs_processor = SimpleNamespace(logprobs=SimpleNamespace(logprobs=[]))
        self.weight_version_starts: list[tuple[str, int]] = []
        self.params = params
        self.ended = asyncio.Event()
        self.finish_reason = ""
        self._context = context

    def sample(self, label: str) -> None:
        tokens = self.detokenizer.output_token_ids
        if not self.weight_version_starts or self.weight_version_starts[-1][0] != label:
            self.weight_version_starts.append((label, len(tokens)))
        drawn = f"{label}|{self.params.seed}|{self.params.offset + len(tokens)}|{self._context + tokens}"
        number, share = struct.unpack("<II", hashlib.sha256(drawn.encode()).digest()[:8])
        may_stop = self.params.offset + len(tokens) >= SHORTEST
        tokens.append(STOP if may_stop and number % 16 == 0 else 2 + number % 50)
        self.logprobs_processor.logprobs.logprobs.append(float(np.float32(-share / 2**32)))
        if tokens[-1] == STOP:
            self.finish_reason = "stop"
        elif len(tokens) == self.params.max_tokens:
            self.finish_reason = "length"

    def output(self) -> Any:
        completion = SimpleNamespace(
            token_ids=self.detokenizer.output_token_ids,
            logprobs=self.logprobs_processor.logprobs,
            weight_versions=[
                SimpleNamespace(version=label, start=start) for label, start in self.weight_version_starts
            ],
            finish_reason=self.finish_reason,
        )
        return SimpleNamespace(outputs=[completion])


class FakeLlm:
    """All running requests get one token per step."""

    def __init__(self, label: str = "default") -> None:
        self.label = label
        self.errored = False
        self.asked: list[str] = []
        self.output_processor = SimpleNamespace(request_states={}, external_req_ids=defaultdict(list))

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncIterator[Any]:
        if self.errored:
            raise EngineDied
        self.asked.append(request_id)
        request, internal = _Request(request_id, prompt["prompt_token_ids"], params), f"{len(self.asked)}"
        self.output_processor.request_states[internal] = request
        self.output_processor.external_req_ids[request_id].append(internal)
        try:
            await request.ended.wait()
        except asyncio.CancelledError:
            self._forget(internal)
            raise
        if self.errored:
            raise EngineDied  # vLLM forgets nothing then
        yield request.output()

    def step(self) -> None:
        """One token for each running request; like vLLM, those that end are forgotten before anyone is told."""
        for internal, request in list(self.output_processor.request_states.items()):
            request.sample(self.label)
            if request.finish_reason:
                self._forget(internal)
                request.ended.set()

    def die(self) -> None:
        self.errored = True
        for request in self.output_processor.request_states.values():
            request.ended.set()

    def _forget(self, internal: str) -> None:
        request = self.output_processor.request_states.pop(internal)
        self.output_processor.external_req_ids[request.external_req_id].remove(internal)


class FakeSampling(CounterSampling):
    """Budgets and offsets of the real one, without vLLM's class for parameters."""

    def params(self, seed: int, *, prompt_length: int, offset: int = 0) -> Any:
        return SimpleNamespace(seed=seed, offset=offset, max_tokens=self.budget(prompt_length) - offset)


@dataclass
class Life:
    """A generator from its start to its end: the engine with the weights of `label`, its book, what its calls said."""

    label: str = "default"
    config: RunConfig = CONFIG
    said: list[RolloutResult] = field(default_factory=list)
    rollouts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.llm = FakeLlm(self.label)
        engine = Engine(self.llm, FakeSampling(sampling_settings(self.config, (STOP,))))
        self.book = CallBook(EngineRequests(self.llm), keeps=True)
        self.calls = ModelCalls(self.config, engine, "generator 0", self.book)

    def start(self, sibling: SiblingOrder, *, prompt: tuple[int, ...] = (4, 5)) -> "asyncio.Task[Completion]":
        """The call of the sibling's next turn."""
        group = order(sibling)
        self.rollouts.append(rollout_id(group.group_id, sibling.generation_index))
        call = self.calls.complete(group, sibling, prompt, turn=sibling.turns, report=self.said.append)
        return asyncio.create_task(call)

    async def steps(self, count: int) -> None:
        """So many tokens for each running call."""
        await turns()
        for _ in range(count):
            self.llm.step()
        await turns()

    async def finish(self, call: "asyncio.Task[Completion]") -> Completion:
        """Step until the call has ended."""
        while not call.done():
            await self.steps(1)
        return call.result()

    def peek(self, known: KnownCall | None = None) -> Peek:
        """The calls of all siblings that were started."""
        return self.book.peek(dict.fromkeys(self.rollouts, known or KnownCall(0)))

    def peeked(self, known: KnownCall | None = None) -> PeekedCall:
        """The only readable call."""
        peek = self.peek(known)
        assert peek.unreadable == {}
        (call,) = peek.calls
        return call

    @property
    def discarded(self) -> list[DiscardedPartial]:
        """What could not be continued."""
        return [said for said in self.said if isinstance(said, DiscardedPartial)]


def order(*siblings: SiblingOrder) -> GroupOrder:
    """A group of one prompt."""
    return GroupOrder("e0-p0", Prompt(PromptRef(0, 0, ""), (4, 5), "{}"), siblings, keeps_running=True)


def partial_of(call: PeekedCall) -> PartialCompletion:
    """What a controller that knew nothing before would send."""
    assert call.start == 0
    return PartialCompletion(call.turn, call.prompt_digest, call.sampling, call.sampled)


async def turns() -> None:
    """Let everything happen that can."""
    for _ in range(20):
        await asyncio.sleep(0)
