"""A made-up multi-turn environment, and a generator that plays it with the real runner, table and control plane.

Only the model is a stand-in, whose tokens are a function of who samples and which turn.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gpu_workers.controller.ports import GroupOrder, SiblingOrder, SiblingResult, TurnResult
from gpu_workers.controller.restorer import RestorePlan
from gpu_workers.environments.control_plane import ControlPlane
from gpu_workers.environments.environment_task import EnvironmentTask
from gpu_workers.environments.episode_table import EpisodeTable
from gpu_workers.environments.interface import Environment, Json, Step
from gpu_workers.generation.capture import Completion
from gpu_workers.generation.episode_runner import EpisodeRunner
from gpu_workers.models.tokenizer import END_TOKEN_ID, CharTokenizer
from storage.records import AttemptStatus, rollout_id
from storage.run_config import DataConfig, RunConfig

TURNS = 4
applied: Counter[tuple[str, int]] = Counter()


class Tally(Environment):
    """Each action adds its length to a sum; every applied turn leaves a mark outside, to be counted."""

    name = "tally"

    def reset(self, task: Json, rng: np.random.Generator) -> Step:
        return Step({"id": str(rng.integers(10**9)), "sum": 0, "turn": 0}, "go")

    def step(self, state: Json, action: str, rng: np.random.Generator) -> Step:
        applied[state["id"] + action, state["turn"]] += 1
        turn, total = state["turn"] + 1, state["sum"] + len(action)
        return Step({**state, "turn": turn, "sum": total}, f"{total}", reward=0.25, done=turn == TURNS)


class Calls:
    """Stands for the model: an action that depends on prompt, sibling and turn. Calls can be held."""

    engine_is_dead = False

    def __init__(self, generator: "Player") -> None:
        self.sampled: list[tuple[str, int]] = []
        self.held: Callable[[str, int], bool] = lambda rollout, turn: False
        self._generator = generator
        self._released = asyncio.Event()

    def release(self) -> None:
        self.held = lambda rollout, turn: False
        self.let_pass()

    def let_pass(self) -> None:
        """Let those that are held now go on."""
        self._released.set()
        self._released = asyncio.Event()

    def has_room(self, token_ids: tuple[int, ...]) -> bool:
        return True

    async def complete(
        self, order: GroupOrder, sibling: SiblingOrder, token_ids: tuple[int, ...], *, turn: int, report: Any = None
    ) -> Completion:
        rollout = rollout_id(order.group_id, sibling.generation_index)
        await asyncio.sleep(0)
        if self.held(rollout, turn):
            await self._released.wait()
        self.sampled.append((rollout, turn))
        text = "x" * (1 + (order.prompt.ref.prompt_id + sibling.generation_index + turn) % 5) + f"{sum(token_ids) % 10}"
        tokens = (*CharTokenizer().encode(text), END_TOKEN_ID)
        return Completion(tokens, (-0.5,) * len(tokens), (0,), (self._generator.version,), "stop")


class Player:
    """A generator of the real runner and the real table. `slow_to_submit` keeps orders on their way."""

    def __init__(
        self,
        fake: Any,
        config: RunConfig,
        task: EnvironmentTask,
        holders: Mapping[str, Any] | None = None,
        environments: Sequence[Any] = (),
    ) -> None:
        """Two tables of its own hold the episodes, unless others do (`holders`, by the names of `environments`)."""
        self.fake = fake
        self.calls = Calls(self)
        self.tables = [EpisodeTable(f"generator-{n}", lambda name: task.environment) for n in range(2)]
        self.environments: list[Any] = list(environments) or [ControlPlane(table) for table in self.tables]
        held = holders or {table.instance: table for table in self.tables}
        self.names = sorted(held)
        self.runner = EpisodeRunner(config, self.calls, task, lambda order: held[self.home_of(order)], "player")  # type: ignore[arg-type]
        self.playing: list[asyncio.Task[None]] = []
        self.on_the_way: asyncio.Event | None = None
        self.orders: list[GroupOrder] = []

    def home_of(self, order: GroupOrder) -> str:
        return order.instance or self.names[order.prompt.ref.prompt_id % 2]

    @property
    def version(self) -> int:
        return int(self.fake.version)

    async def generate(self, order: GroupOrder) -> AsyncGenerator[SiblingResult | TurnResult, None]:
        if self.on_the_way is not None:
            await self.on_the_way.wait()
        self.orders.append(order)
        answers: asyncio.Queue[Any] = asyncio.Queue()

        async def play(sibling: SiblingOrder) -> None:
            answers.put_nowait(await self.runner.run(order, sibling, answers.put_nowait))

        tasks = [asyncio.create_task(play(sibling)) for sibling in order.siblings]
        self.playing += tasks
        left = len(tasks)
        try:
            while left:
                answer = await answers.get()
                left -= isinstance(answer, SiblingResult)
                yield answer
        finally:
            for task in tasks:
                task.cancel()

    async def load_weights(self, weights: Any) -> Any:
        return await self.fake.load_weights(weights)

    async def peek(self, wanted: Any) -> Any:
        return await self.fake.peek(wanted)

    async def abort(self, group_id: str) -> None:
        await self.fake.abort(group_id)


def tally_task(num_prompts: int = 40) -> EnvironmentTask:
    return EnvironmentTask(DataConfig(task="tests.controller.test_episodes:Tally", num_prompts=num_prompts))


def stand_at(world: Any, turn: int) -> None:
    """Hold every episode before this turn."""
    world.generator.calls.held = lambda rollout, at: at >= turn


def all_wait(world: Any, turn: int) -> bool:
    """Whether all siblings that were dispatched wait before this turn."""
    ledger = world.controller.parts.ledger
    running = [
        rollout_id(group.group_id, sibling.generation_index)
        for group in ledger.admitted()
        for sibling in group.siblings
        if sibling.status is AttemptStatus.DISPATCHED
    ]
    return bool(running) and all(len(ledger.staged(rollout)) == turn for rollout in running)


async def begun(world: Any, turn: int = 2) -> None:
    """A started run all of whose episodes stand before `turn`."""
    world.boot()
    stand_at(world, turn)
    await world.restore(RestorePlan())
    await world.settle(lambda: all_wait(world, turn))
