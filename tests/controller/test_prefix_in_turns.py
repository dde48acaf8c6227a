"""Level `prefix` in multi-turn episodes: real runner, table, calls and book around an engine that is stepped."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import Any

import pytest

from gpu_workers.controller.ports import GroupOrder, KnownCall, Peek, RolloutResult
from gpu_workers.generation.call_book import CallBook
from gpu_workers.generation.engine import Engine
from gpu_workers.generation.engine_requests import EngineRequests
from gpu_workers.generation.episode_runner import EpisodeRunner
from gpu_workers.generation.model_calls import ModelCalls
from gpu_workers.generation.sampling import sampling_settings
from storage.errors import WorkerDied
from storage.records import rollout_id
from tests.controller.playing import Player, Tally, tally_task
from tests.generation.fake_engine import STOP, FakeLlm, FakeSampling

SECTIONS: dict[str, Any] = {
    "rollout_recovery": {"target_level": "prefix"},
    "async_rl": {"max_lookahead_versions": 0, "retry_backoff_s": 0.001, "retry_backoff_max_s": 0.002},
    "generation": {"max_new_tokens": 10, "max_model_len": 128},
}


class CountingLlm(FakeLlm):
    """Counts every position of every call that is sampled, by the call's key; steps while it may."""

    def __init__(self) -> None:
        super().__init__()
        self.sampled: Counter[tuple[str, int]] = Counter()
        self.may_step: Callable[[], bool] = lambda: True
        self._stepping = asyncio.create_task(self._run())

    def step(self) -> None:
        for request in self.output_processor.request_states.values():
            key = "/".join(request.external_req_id.split("/")[:3])
            position = request.params.offset + len(request.detokenizer.output_token_ids)
            self.sampled[key, position] += 1
        super().step()

    async def _run(self) -> None:
        while not self.errored:
            await asyncio.sleep(0)
            if self.may_step():
                self.step()

    def end(self) -> None:
        self._stepping.cancel()


class EnginePlayer(Player):
    """A player whose calls are those of an engine."""

    def __init__(self, fake: Any, config: Any, task: Any) -> None:
        super().__init__(fake, config, task)
        self._config, self._task = config, task
        self.llms: list[CountingLlm] = []
        self.start_engine()

    def start_engine(self) -> None:
        """With an empty book, and the tables of a new process."""
        self.llm = CountingLlm()
        self.llms.append(self.llm)
        self.llm.label = str(self.fake.version) if self.fake.loads else "default"
        engine = Engine(self.llm, FakeSampling(sampling_settings(self._config, (STOP,))))
        self.book = CallBook(EngineRequests(self.llm), keeps=True)
        calls = ModelCalls(self._config, engine, "player", self.book)
        for table in self.tables:
            for episode in list(table._episodes):
                table.retire([episode])
            table._retired.clear()
        held = {table.instance: table for table in self.tables}
        self.runner = EpisodeRunner(self._config, calls, self._task, lambda order: held[self.home_of(order)], "player")

    async def generate(self, order: GroupOrder) -> AsyncGenerator[RolloutResult, None]:
        answers: asyncio.Queue[Any] = asyncio.Queue()
        self.orders.append(order)

        async def play(sibling: Any) -> None:
            try:
                answers.put_nowait(await self.runner.run(order, sibling, answers.put_nowait))
            except Exception as error:  # noqa: BLE001 -- it ends the group
                answers.put_nowait(error)
            finally:
                self.book.over(rollout_id(order.group_id, sibling.generation_index), sibling, forget=False)

        playing = [asyncio.create_task(play(sibling)) for sibling in order.siblings]
        self.playing += playing
        ended = 0
        try:
            while ended < len(playing):
                answer = await answers.get()
                if isinstance(answer, Exception):
                    raise WorkerDied("the engine died") from answer
                ended += hasattr(answer, "reward")
                yield answer
        finally:
            for task in playing:
                task.cancel()
            await asyncio.gather(*playing, return_exceptions=True)

    async def peek(self, wanted: Mapping[str, KnownCall]) -> Peek:
        return self.book.peek(wanted)

    async def load_weights(self, weights: Any) -> Any:
        self.llm.label = str(weights.version)
        return await super().load_weights(weights)

    @property
    def sampled(self) -> Counter[tuple[str, int]]:
        """Of all its engines."""
        return sum((llm.sampled for llm in self.llms), Counter())


@pytest.fixture
def players(make_world: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Worlds at level prefix whose rollouts are episodes of `Tally`, played with engines."""
    found = "gpu_workers.environments.environment_task.find_environment"
    monkeypatch.setattr(found, lambda name: Tally())
    started: list[EnginePlayer] = []

    def make(**sections: Any) -> Any:
        task = tally_task()
        world = make_world(dataset=task, **{**SECTIONS, **sections})
        new_fake = world.new_generator

        def new_player() -> EnginePlayer:
            started.append(EnginePlayer(new_fake(), world.config, task))
            return started[-1]

        world.new_generator = new_player
        return world

    yield make
    for player in started:
        for llm in player.llms:
            llm.end()


async def uninterrupted(world: Any) -> dict[int, str]:
    await world.start()
    await world.train(1, 3)
    return trained_rows(world)


def trained_rows(world: Any) -> dict[int, str]:
    return {step: event["rollouts_sha256"] for step, event in world.committed().items()}


async def stopped_after(world: Any, tokens: int) -> None:
    """Every engine of the world's player stands still once it has sampled so many tokens since its start."""
    llm = world.generator.llm
    before = llm.sampled.total()
    llm.may_step = lambda: llm.sampled.total() - before < tokens
    await world.settle(lambda: not llm.may_step())
    for _ in range(50):
        await asyncio.sleep(0)


async def running_with(world: Any, tokens: int) -> None:
    """A started run whose engine stands still after so many tokens."""
    world.boot()
    world.generator.llm.may_step = lambda: False
    await world.restore(world.plan())
    await stopped_after(world, tokens)


async def ends_like(world: Any, expected: Mapping[int, str], sampled: Counter[tuple[str, int]]) -> None:
    """Started again, the run trains the expected rows and samples nothing of what was sampled before."""
    await world.start()
    await world.train(1, 3)
    assert trained_rows(world) == expected
    assert max((sampled + world.generator.sampled).values()) == 1
    assert not world.audit().problems


@pytest.mark.parametrize("tokens", [30, 100, 170, 230])
async def test_an_episode_killed_within_a_turn_goes_on_within_it(players, tokens):
    expected = await uninterrupted(players())
    world = players()
    await running_with(world, tokens)
    bundle = await world.snapshot(1)
    turns = {episode.rollout_id: episode.turn for episode in bundle.state.episodes}
    assert bundle.state.partial_calls
    assert {call.rollout_id: call.turn for call in bundle.state.partial_calls}.items() <= turns.items()
    sampled = world.generator.sampled
    await world.kill()
    await ends_like(world, expected, sampled)


async def test_an_episode_killed_twice_within_one_turn_ends_like_one_that_was_never_killed(players):
    expected = await uninterrupted(players())
    world = players()
    sampled: Counter[tuple[str, int]] = Counter()
    for tokens in (40, 24, 24):
        await running_with(world, tokens)
        bundle = await world.snapshot(1)
        assert bundle.state.partial_calls
        sampled += world.generator.sampled
        await world.kill()
    await ends_like(world, expected, sampled)


async def test_episodes_whose_generator_dies_go_on_within_their_turn_in_another_one(players):
    expected = await uninterrupted(players())
    world = players()
    await running_with(world, 150)
    await world.controller._peeker.look()
    player, ledger = world.generator, world.controller.parts.ledger
    stood = {
        rollout: len(ledger.staged(rollout))
        for group in ledger.admitted()
        for sibling in group.siblings
        if sibling.sealed is None
        for rollout in [rollout_id(group.group_id, sibling.generation_index)]
    }
    assert max(stood.values()) > 0
    dead = player.llm
    player.start_engine()  # with it go the episodes of the old one
    dead.die()
    await world.train(1, 3)
    assert trained_rows(world) == expected
    assert max(player.sampled.values()) == 1
    interrupted = {event["rollout_id"]: event["turns"] for event in world.trace.of("attempt_interrupted")}
    assert interrupted == stood
    assert not world.trace.of("attempt_abandoned")
    assert not world.audit().problems


async def test_a_snapshot_while_no_generator_lives_holds_the_episodes_and_calls_of_the_dead_one(players):
    expected = await uninterrupted(players())
    world = players()
    await running_with(world, 150)
    await world.controller._peeker.look()
    player, generate, back = world.generator, world.generator.generate, asyncio.Event()

    async def waits(order: GroupOrder) -> AsyncGenerator[RolloutResult, None]:
        await back.wait()
        async for result in generate(order):
            yield result

    player.generate = waits
    dead = player.llm
    player.start_engine()  # with it go the episodes of the old one
    dead.die()
    running = world.controller.parts.ledger.admitted()
    owed = sum(sibling.sealed is None for group in running for sibling in group.siblings)
    await world.settle(lambda: len(world.trace.of("attempt_resumed")) == owed)
    bundle = await world.snapshot(1)
    stood = {event["rollout_id"]: event for event in world.trace.of("attempt_interrupted")}
    assert max(event["turns"] for event in stood.values()) > 0
    kept = {episode.rollout_id: episode.turn for episode in bundle.state.episodes}
    assert kept == {rollout: event["turns"] for rollout, event in stood.items() if event["turns"]}
    tokens = {call.rollout_id: call.num_tokens for call in bundle.state.partial_calls}
    assert tokens == {rollout: event["tokens"] for rollout, event in stood.items() if event["tokens"]}
    sampled = player.sampled
    await world.kill()
    await ends_like(world, expected, sampled)
