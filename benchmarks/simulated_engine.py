"""An engine without a model, where vLLM's stands for a generator: it samples only when a response ends.

Its surface is what the generator uses of vLLM's `AsyncLLM`. Time is a number of ticks that whoever holds the engine
makes pass; each tick gives one token to each running request. Whether a token is the one that ends the response
depends on noise of (call seed, position, weight version) and on how often responses of that length end, so that the
lengths of whole responses have a distribution that is known exactly.
"""

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.length_distribution import LengthDistribution
from gpu_workers.generation.counter_seeds import mixed_seeds, row_seeds, seeds_at
from gpu_workers.generation.engine import Engine
from gpu_workers.generation.sampling import COUNTER_ARGUMENT, CounterSampling, sampling_settings
from storage.run_config import RunConfig

_NOISE = float(2**63)


@dataclass(frozen=True, slots=True)
class _Params:
    """What the engine reads of vLLM's `SamplingParams`, which take longer to make than all else about a call."""

    max_tokens: int
    stop_token_ids: tuple[int, ...]
    extra_args: Mapping[str, Any]


class SimulatedSampling(CounterSampling):
    """The sampling that goes with the engine: everything is as on the CPU, apart from the class of the parameters."""

    def params(self, seed: int, *, prompt_length: int, offset: int = 0) -> _Params:
        """See `Sampling`."""
        rest = self.budget(prompt_length) - offset
        return _Params(rest, self._settings.stop_token_ids, {COUNTER_ARGUMENT: {"seed": seed, "offset": offset}})


def simulated(config: RunConfig, llm: "SimulatedEngine", stop_token_ids: tuple[int, ...]) -> Engine:
    """The engine where `gpu_workers.generation.engine.start_engine` puts vLLM's."""
    return Engine(llm, SimulatedSampling(sampling_settings(config, stop_token_ids)))


@dataclass(frozen=True, slots=True)
class _Span:
    """Like vLLM's `WeightVersionSpan`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _Logprobs:
    """Like vLLM's `FlatLogprobs` with one log-probability per token."""

    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class _Completion:
    """Like vLLM's `CompletionOutput`."""

    token_ids: list[int]
    logprobs: _Logprobs
    weight_versions: list[_Span]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class _Output:
    """Like vLLM's `RequestOutput`; there is one at the end only."""

    outputs: tuple[_Completion, ...]
    finished: bool = True


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Like vLLM's detokenizer and logprobs processor of a request, which hold its tokens so far."""

    request: "_Request"

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens so far; the last may end the response."""
        if self.request.completion is not None:
            return self.request.completion.token_ids
        first = self.request.offset
        return self.request.engine.text[first : first + self.num_output_tokens()]

    @property
    def logprobs(self) -> _Logprobs:
        """Their log-probabilities."""
        if self.request.completion is not None:
            return self.request.completion.logprobs
        first = self.request.offset
        return _Logprobs(self.request.engine.going_on[first : first + self.num_output_tokens()])

    def num_output_tokens(self) -> int:
        """How many there are."""
        if self.request.completion is not None:
            return len(self.request.completion.token_ids)
        return self.request.engine.position(self.request) - self.request.offset


@dataclass(slots=True, eq=False)
class _Request:
    """Like vLLM's `RequestState`. `row` is its place in the engine's arrays, -1 while it waits for one; since `started`
    it has had a token at each tick.
    """

    engine: "SimulatedEngine"
    request_id: str
    external_req_id: str
    prompt_token_ids: list[int]
    seed: int
    offset: int
    budget: int
    stop_token_id: int
    ended: "asyncio.Future[_Output]"
    row: int = -1
    started: int = 0
    completion: _Completion | None = None

    @property
    def prompt_len(self) -> int:
        """Tokens that it was asked with."""
        return len(self.prompt_token_ids)

    @property
    def detokenizer(self) -> _Tokens:
        """What holds its tokens."""
        return _Tokens(self)

    @property
    def logprobs_processor(self) -> _Tokens:
        """What holds their log-probabilities."""
        return _Tokens(self)

    @property
    def weight_version_starts(self) -> list[tuple[str, int]]:
        """Versions with the index of the first token of each."""
        if self.completion is not None:
            return [(span.version, span.start) for span in self.completion.weight_versions]
        return self.engine.version_starts(self)


@dataclass(frozen=True, slots=True)
class _OutputProcessor:
    """Like vLLM's `OutputProcessor`, which knows the requests by their internal ids."""

    request_states: dict[str, _Request] = field(default_factory=dict)
    external_req_ids: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens `start` to `end` (exclusive) of a response, which the request of this name sampled."""

    request: str
    start: int
    end: int


class SimulatedEngine:
    """Runs at most `capacity` requests together; others wait, in order."""

    def __init__(self, lengths: LengthDistribution, *, capacity: int, text: Sequence[int] = range(3, 13)) -> None:
        """`text`: ids of tokens that may stand in a response; they follow one another by position."""
        self.errored = False
        self.output_processor = _OutputProcessor()
        self.over: list[Sampled] = []
        self.text = [text[position % len(text)] for position in range(lengths.limit)]
        self.going_on = np.log1p(-np.minimum(lengths.hazard, 1 - 1e-9)).tolist()
        self._log_hazard = np.log(np.maximum(lengths.hazard, 1e-300)).tolist()
        self._ends_below = (lengths.hazard * _NOISE).astype(np.int64)
        self._version = self._ticks = 0
        self._refits = [(0, "0")]  # before which tick's tokens, and the version
        self._numbers = count()
        self._waiting: deque[_Request] = deque()
        self._free = list(range(capacity))
        self._running: list[_Request | None] = [None] * capacity
        self._seeds = np.zeros(capacity, np.uint64)
        self._mixed = np.zeros(capacity, np.uint64)
        self._positions = np.zeros(capacity, np.int64)
        self._last = np.zeros(capacity, np.int64)
        self._is_running = np.zeros(capacity, bool)

    async def generate(self, prompt: Mapping[str, Any], params: Any, request_id: str) -> AsyncIterator[_Output]:
        """The finished output, when its last token has been sampled."""
        counter = params.extra_args[COUNTER_ARGUMENT]
        request = _Request(
            self,
            f"{request_id}-{next(self._numbers):08x}",
            request_id,
            prompt["prompt_token_ids"],
            seed=counter["seed"],
            offset=counter["offset"],
            budget=params.max_tokens,
            stop_token_id=params.stop_token_ids[0],
            ended=asyncio.get_running_loop().create_future(),
        )
        self.output_processor.request_states[request.request_id] = request
        self.output_processor.external_req_ids.setdefault(request_id, []).append(request.request_id)
        self._waiting.append(request)
        try:
            yield await request.ended
        finally:
            self._forget(request)

    def sampled(self) -> list[Sampled]:
        """What each request has sampled so far, whether it is over or runs."""
        running = (request for request in self._running if request is not None)
        return [*self.over, *(self._sampled(request) for request in running)]

    def _sampled(self, request: _Request) -> Sampled:
        return Sampled(request.external_req_id, request.offset, self.position(request))

    @property
    def num_requests(self) -> int:
        """Requests that run or wait."""
        return len(self.output_processor.request_states)

    def position(self, request: _Request) -> int:
        """How many tokens of the response there are, with those that it was continued from."""
        return request.offset if request.row < 0 else int(self._positions[request.row])

    def version_starts(self, request: _Request) -> list[tuple[str, int]]:
        """Weight versions of a running request's tokens, with the index of the first token of each."""
        if request.row < 0 or request.started == self._ticks:
            return []
        newest = bisect_left(self._refits, (self._ticks, ""))  # later ones have no tokens yet
        first = bisect_left(self._refits, (request.started + 1, "")) - 1
        spans = self._refits[first:newest]
        return [(version, max(0, tick - request.started)) for tick, version in spans]

    def refit(self, version: int) -> None:
        """New weights: every token from now on has their noise."""
        if self._refits[-1][0] == self._ticks:
            self._refits.pop()
        self._refits.append((self._ticks, str(version)))
        self._version = version
        self._mixed = self._noise(self._seeds)

    def tick(self) -> int:
        """One token for each running request; how many tokens that were. Responses that end are delivered."""
        if self._free and self._waiting:
            self._start([self._waiting.popleft() for _ in range(min(len(self._free), len(self._waiting)))])
        running, positions = len(self._running) - len(self._free), self._positions
        stops = self._is_running & (seeds_at(self._mixed, positions.view(np.uint64)) < self._ends_below[positions])
        positions += self._is_running
        self._ticks += 1
        for row in np.flatnonzero(stops | (self._is_running & (positions == self._last))).tolist():
            self._end(row, "stop" if stops[row] else "length")
        return running

    def _noise(self, seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
        versions = np.full(len(seeds), self._version, np.uint64)
        return mixed_seeds(row_seeds(seeds, versions).view(np.uint64))

    def _start(self, requests: list[_Request]) -> None:
        rows = [self._free.pop() for _ in requests]
        for row, request in zip(rows, requests, strict=True):
            self._running[row] = request
            request.row, request.started = row, self._ticks
        self._seeds[rows] = [request.seed for request in requests]
        self._mixed[rows] = self._noise(self._seeds[rows])
        self._positions[rows] = [request.offset for request in requests]
        self._last[rows] = [request.offset + request.budget for request in requests]
        self._is_running[rows] = True

    def _end(self, row: int, reason: str) -> None:
        request = self._running[row]
        assert request is not None
        first, after = request.offset, int(self._positions[row])
        token_ids, logprobs = self.text[first:after], self.going_on[first:after]
        if reason == "stop":
            token_ids[-1], logprobs[-1] = request.stop_token_id, self._log_hazard[after - 1]
        starts = self.version_starts(request)
        ends = [*(start for _, start in starts[1:]), after - first]
        spans = [_Span(version, start, end) for (version, start), end in zip(starts, ends, strict=True)]
        request.completion = _Completion(token_ids, _Logprobs(logprobs), spans, reason)
        self._forget(request)
        if not request.ended.done():
            request.ended.set_result(_Output((request.completion,)))

    def _forget(self, request: _Request) -> None:
        """What vLLM keeps of a request, and its row, are free again; twice is once."""
        if self.output_processor.request_states.pop(request.request_id, None) is None:
            return
        internal = self.output_processor.external_req_ids[request.external_req_id]
        internal.remove(request.request_id)
        if not internal:
            del self.output_processor.external_req_ids[request.external_req_id]
        if request.row < 0:
            self._waiting.remove(request)
            return
        self.over.append(self._sampled(request))
        self._running[request.row] = None
        self._is_running[request.row] = False
        self._positions[request.row] = 0
        self._free.append(request.row)
        request.row = -1
