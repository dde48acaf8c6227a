"""A generator whose engine only takes time: the real runners, episode table and model calls on a simulated engine.

Each token takes a set while. Requests are counted by what they sampled of which response.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from benchmarks.length_distribution import LengthDistribution
from benchmarks.simulated_engine import SimulatedEngine, simulated
from gpu_workers.controller.ports import (
    GroupOrder,
    KnownCall,
    Peek,
    RolloutResult,
    SiblingOrder,
    SiblingResult,
    StepResult,
    WeightsRef,
)
from gpu_workers.environments.control_plane import ControlPlane
from gpu_workers.environments.environment_task import EnvironmentTask
from gpu_workers.environments.episode_table import EpisodeTable
from gpu_workers.environments.tasks import Task
from gpu_workers.generation.call_book import CallBook
from gpu_workers.generation.engine_requests import EngineRequests
from gpu_workers.generation.episode_runner import EpisodeRunner
from gpu_workers.generation.model_calls import ModelCalls
from gpu_workers.generation.sibling_runner import SiblingRunner
from gpu_workers.models.tokenizer import CharTokenizer
from storage.records import RecoveryLevel, rollout_id
from storage.run_config import RunConfig

Call = tuple[str, int]
Span = tuple[int, int]


class TimedPlayer:
    """The port `Generator`: `sequences` requests together, a token of each every `token_s` seconds."""

    def __init__(
        self, config: RunConfig, task: Task, lengths: LengthDistribution, *, sequences: int, token_s: float
    ) -> None:
        self.engine = SimulatedEngine(lengths, capacity=sequences, text=CharTokenizer().encode("7"))
        self.looked: dict[Call, Span] = {}
        self._token_s = token_s
        self._book = CallBook(EngineRequests(self.engine), keeps=config.rollout_recovery.uses(RecoveryLevel.PREFIX))
        calls = ModelCalls(config, simulated(config, self.engine, task.stop_token_ids), "player", self._book)
        self.environments: list[ControlPlane] = []
        self._runner: SiblingRunner | EpisodeRunner = SiblingRunner(config, calls, task, "player")
        if isinstance(task, EnvironmentTask):
            table = EpisodeTable("player", lambda name: task.environment)
            self.environments.append(ControlPlane(table))
            self._runner = EpisodeRunner(config, calls, task, lambda _order: table, "player")
        self._ticking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Let time pass."""
        self._ticking = asyncio.create_task(self._tick())

    async def stop(self) -> None:
        """No more tokens."""
        if self._ticking is not None:
            self._ticking.cancel()
            with suppress(asyncio.CancelledError):
                await self._ticking

    async def _tick(self) -> None:
        began, ticks = asyncio.get_running_loop().time(), 0
        while True:
            await asyncio.sleep(self._token_s)
            due = int((asyncio.get_running_loop().time() - began) / self._token_s)
            for _ in range(ticks, due):
                self.engine.tick()
                await asyncio.sleep(0)  # what has ended is followed by the next call
            ticks = due

    def sampled(self) -> dict[Call, Span]:
        """By rollout and turn: from which to which token of the response has been sampled here."""
        spans: dict[Call, Span] = {}
        for one in self.engine.sampled():
            rollout, _, turn, *_ = one.request.split("/")
            call = rollout, int(turn.removeprefix("t"))
            start, end = spans.get(call, (one.start, one.end))
            spans[call] = min(start, one.start), max(end, one.end)
        return spans

    async def generate(self, order: GroupOrder) -> AsyncGenerator[RolloutResult, None]:
        """All siblings together."""
        answers: asyncio.Queue[RolloutResult] = asyncio.Queue()

        async def play(sibling: SiblingOrder) -> None:
            try:
                answers.put_nowait(await self._runner.run(order, sibling, answers.put_nowait))
            finally:
                self._book.over(rollout_id(order.group_id, sibling.generation_index), sibling, forget=False)

        playing = [asyncio.create_task(play(sibling)) for sibling in order.siblings]
        left = len(playing)
        try:
            while left:
                answer = await answers.get()
                left -= isinstance(answer, SiblingResult)
                yield answer
        finally:
            for task in playing:
                task.cancel()
            await asyncio.gather(*playing, return_exceptions=True)

    async def peek(self, wanted: Mapping[str, KnownCall]) -> Peek:
        """At once. What had been sampled by then is `looked` from now on."""
        self.looked = self.sampled()
        return self._book.peek(wanted)

    async def load_weights(self, weights: WeightsRef) -> Mapping[str, float]:
        """Takes any; responses stay the same."""
        return {}

    async def abort(self, group_id: str) -> None:
        """Closing the stream is enough."""


class NoModel:
    """A trainer that has nothing to train; each step takes a while."""

    async def begin_step(self, step: int) -> None:
        """Nothing to begin."""

    async def train_microbatch(self, rows: Sequence[Any]) -> Mapping[str, float]:
        """As long as a short forward and backward pass."""
        await asyncio.sleep(0.02)
        return {}

    async def flush_microbatches(self) -> None:
        """Nothing waits."""

    async def finish_step(self, step: int) -> StepResult:
        """Nothing changes."""
        return StepResult(step)

    async def publish_weights(self, version: int) -> WeightsRef:
        """A name."""
        return WeightsRef(version, "none")

    async def begin_save(self, prefix: str) -> None:
        """Nothing to save."""

    async def finish_save(self, prefix: str) -> Sequence[Mapping[str, Any]]:
        """No files."""
        return []

    async def restore(self, files: Sequence[Mapping[str, Any]] | None) -> None:
        """Nothing to load."""
