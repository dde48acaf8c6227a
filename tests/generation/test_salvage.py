"""Looking at the calls of several generators, of which some are slow, and of one that has just died."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import pytest

from gpu_workers.controller.ports import (
    GroupOrder,
    KnownCall,
    Peek,
    PeekedCall,
    SiblingOrder,
    SiblingResult,
    WeightsRef,
)
from gpu_workers.controller.sampled_tokens import sampled_tokens
from gpu_workers.generation.peeks import Salvage, merged
from gpu_workers.generation.supervision import SupervisedGenerators
from storage.errors import InfrastructureFailure, WorkerDied
from storage.records import CallSampling, Prompt, PromptRef
from storage.run_config import RunConfig

KNOWN = KnownCall(0)


def peeked(rollout: str, *, executed: int = 0, turn: int = 0, tokens: int = 3) -> PeekedCall:
    sampled = sampled_tokens(range(tokens), [-0.5] * tokens, (0,), (executed,))
    sampling = CallSampling("counter", 7, 1.0, 1.0, (1,))
    return PeekedCall(rollout, 0, executed, turn, 2, "digest", sampling, 0, sampled)


class Looked:
    """A generator whose engine may die while its actor answers on; `answer` is what a peek finds, or raises."""

    def __init__(self, index: int) -> None:
        self.facts = {"index": index}
        self.engine_lives = True
        self.answer: Peek | Exception = Peek()
        self.waits: asyncio.Event | None = None
        self.asked: list[Mapping[str, KnownCall] | None] = []
        self.running = asyncio.Event()
        self.died = asyncio.Event()

    async def generate(self, order: GroupOrder) -> AsyncGenerator[SiblingResult, None]:
        self.running.set()
        await self.died.wait()
        raise InfrastructureFailure("its engine died")
        yield

    async def peek(self, wanted: Mapping[str, KnownCall] | None) -> Peek:
        self.asked.append(wanted)
        if self.waits is not None:
            await self.waits.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def load_weights(self, weights: WeightsRef) -> Mapping[str, float]:
        return {}

    async def abort(self, group_id: str) -> None: ...

    async def is_alive(self) -> bool:
        await asyncio.sleep(0)
        return self.engine_lives

    def die(self) -> None:
        self.engine_lives = False
        self.died.set()


class Scene:
    """Generators that can be looked at; a started one takes the place of a dead one, whose actor then is gone."""

    def __init__(self, count: int = 1, *, level: str = "prefix", deadline_s: float = 60.0) -> None:
        config = RunConfig(
            name="run",
            async_rl={"retry_backoff_s": 0.001, "retry_backoff_max_s": 0.004},
            rollout_recovery={"peek_deadline_s": deadline_s},
        )
        self.keeps_running = level == "prefix"
        self.lives = [Looked(index) for index in range(count)]
        self.events: list[dict[str, Any]] = []
        self.generators = SupervisedGenerators(config, self, list(self.lives), trace=self)

    async def start(self, index: int) -> Looked:
        gone = self.lives[index]
        gone.answer = InfrastructureFailure("the actor is gone")
        self.lives[index] = Looked(index)
        return self.lives[index]

    def record(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, **fields})

    def of(self, event: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == event]

    async def run(self, group_id: str) -> None:
        async for _ in self.generators.generate(self._order(group_id)):
            pass

    def _order(self, group_id: str) -> GroupOrder:
        prompt = Prompt(PromptRef(0, 0, ""), (4,), "{}")
        return GroupOrder(group_id, prompt, (SiblingOrder(0, 0),), keeps_running=self.keeps_running)

    async def kill(self, index: int = 0, groups: int = 1) -> "list[asyncio.Task[None]]":
        """The groups that run there when the engine dies."""
        running = [asyncio.create_task(self.run(f"g{n}")) for n in range(groups)]
        await self.lives[index].running.wait()
        self.lives[index].die()
        return running


async def until(predicate: Callable[[], bool]) -> None:
    for _ in range(20_000):
        if predicate():
            return
        await asyncio.sleep(0)
    raise AssertionError("the awaited condition never came true")


def found(peek: Peek) -> dict[str, tuple[int, int]]:
    """By rollout: where the tokens begin, and how many there are."""
    return {call.rollout_id: (call.start, len(call.sampled)) for call in peek.calls}


async def test_all_living_generators_are_asked_together_and_their_answers_are_one():
    scene = Scene(2)
    scene.lives[0].answer = Peek((peeked("a"),), {"c": "played by an agent"})
    scene.lives[1].answer = Peek((peeked("b", tokens=5),))
    wanted = {"a": KNOWN, "b": KNOWN, "c": KNOWN}
    peek = await scene.generators.peek(wanted)
    assert (found(peek), peek.unreadable) == ({"a": (0, 3), "b": (0, 5)}, {"c": "played by an agent"})
    assert [live.asked for live in scene.lives] == [[wanted], [wanted]]


async def test_a_generator_that_fails_or_does_not_answer_is_left_out_and_named():
    scene = Scene(3, deadline_s=0.01)
    scene.lives[0].answer = Peek((peeked("a"),))
    scene.lives[1].answer = InfrastructureFailure("the connection broke")
    scene.lives[2].waits = asyncio.Event()
    assert found(await scene.generators.peek({"a": KNOWN})) == {"a": (0, 3)}
    failed = {event["index"]: event["reason"] for event in scene.of("peek_failed")}
    assert failed == {1: "the connection broke", 2: "no answer within 0.008 s"}


async def test_what_a_dead_engine_s_actor_knows_is_there_when_its_groups_are_told_until_all_of_it_is_known():
    scene = Scene()
    dead = scene.lives[0]
    dead.answer = Peek((peeked("a"), peeked("b")), {"c": "played by an agent"})
    dead.waits = asyncio.Event()
    groups = await scene.kill(groups=3)
    await until(lambda: dead.asked == [None])
    assert not any(group.done() for group in groups)
    assert scene.lives == [dead]  # it is not ended before it has answered
    dead.waits.set()
    assert [type(e) for e in await asyncio.gather(*groups, return_exceptions=True)] == [WorkerDied] * 3
    assert dead.asked == [None]
    first = await scene.generators.peek({"a": KnownCall(0, tokens=1), "c": KNOWN})
    assert (found(first), first.unreadable) == ({"a": (1, 2)}, {"c": "played by an agent"})
    assert found(await scene.generators.peek({"a": KnownCall(0, tokens=1)})) == {"a": (1, 2)}  # the answer was lost
    assert found(await scene.generators.peek({"a": KnownCall(0, tokens=3), "b": KNOWN})) == {"b": (0, 3)}
    assert found(await scene.generators.peek({"a": KNOWN})) == {}
    await until(lambda: bool(scene.of("generator_restarted")))
    await scene.generators.close()


async def test_an_actor_that_is_gone_leaves_nothing_and_holds_no_restart_up():
    scene = Scene()
    scene.lives[0].answer = InfrastructureFailure("the actor died")
    (group,) = await scene.kill()
    with pytest.raises(WorkerDied):
        await group
    await until(lambda: bool(scene.of("generator_restarted")))
    assert [event["reason"] for event in scene.of("peek_failed")] == ["the actor died"]
    assert await scene.generators.peek({"a": KNOWN}) == Peek()


async def test_an_actor_that_does_not_answer_holds_a_restart_up_no_longer_than_a_few_looks_may_take():
    scene = Scene(deadline_s=0.0125)
    scene.lives[0].waits = asyncio.Event()
    (group,) = await scene.kill()
    with pytest.raises(WorkerDied):
        await group
    await until(lambda: bool(scene.of("generator_restarted")))
    assert [event["reason"] for event in scene.of("peek_failed")] == ["no answer within 0.05 s"]


async def test_below_level_prefix_a_dead_generator_is_asked_for_nothing():
    scene = Scene(level="turn")
    dead = scene.lives[0]
    (group,) = await scene.kill()
    with pytest.raises(WorkerDied):
        await group
    await until(lambda: bool(scene.of("generator_restarted")))
    assert dead.asked == []


async def test_a_group_at_level_prefix_keeps_it_when_the_configuration_asks_for_less_by_now():
    scene = Scene(level="prefix")
    scene.lives[0].answer = Peek((peeked("a"),))
    (group,) = await scene.kill()
    with pytest.raises(WorkerDied):
        await group
    assert found(await scene.generators.peek({"a": KNOWN})) == {"a": (0, 3)}
    await scene.generators.close()


async def test_closing_ends_a_look_at_a_dead_generator():
    scene = Scene()
    scene.lives[0].waits = asyncio.Event()
    (group,) = await scene.kill()
    await until(lambda: scene.lives[0].asked == [None])
    await scene.generators.close()
    with pytest.raises(WorkerDied):
        await group


def test_of_two_answers_the_later_execution_s_counts_and_reading_beats_not_reading():
    peek = merged(
        [
            Peek((peeked("a", executed=1, tokens=2), peeked("b", turn=1, tokens=1))),
            Peek((peeked("a", tokens=9), peeked("b", tokens=9)), {"a": "unknown", "d": "unknown"}),
        ]
    )
    assert (found(peek), peek.unreadable) == ({"a": (0, 2), "b": (0, 1)}, {"d": "unknown"})


def test_salvage_of_an_older_execution_is_forgotten_unsaid():
    salvage = Salvage(Peek((peeked("a"), peeked("b", turn=1))))
    assert salvage.take({"a": KnownCall(1), "b": KnownCall(0, turn=2)}) == Peek()
    assert salvage.take({"a": KNOWN, "b": KNOWN}) == Peek()
