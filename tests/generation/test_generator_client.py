"""The controller's end of a generator actor, and the messages between them. The actor is a double without Ray."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from gpu_workers.controller.ports import (
    DiscardedPartial,
    Failure,
    GroupOrder,
    KnownCall,
    Peek,
    RolloutResult,
    SiblingOrder,
    SiblingResult,
    TurnResult,
)
from gpu_workers.generation.capture import Completion, staged_call
from gpu_workers.generation.generator_client import GeneratorClient
from gpu_workers.generation.peek_wire import PeekMessage, pack_peek
from gpu_workers.generation.running_calls import Finished
from gpu_workers.generation.wire import Message, pack, unpack
from storage.errors import InfrastructureFailure
from storage.records import Prompt, PromptRef


class Method:
    """Like the method of a Ray handle: `remote` starts it, `options` changes nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.remote = function

    def options(self, **_: Any) -> "Method":
        return self


class ActorDouble:
    """Answers orders with what the test puts into `messages`; an exception there is the actor's death."""

    def __init__(self) -> None:
        self.orders: dict[int, GroupOrder] = {}
        self.abandoned: list[int] = []
        self.messages: asyncio.Queue[Message | Exception] = asyncio.Queue()
        self.submit = Method(self._submit)
        self.results = Method(self._results)
        self.abandon = Method(self.abandoned.append)
        self.peeked: list[Any] = []
        self.peek = Method(self._peek)

    def answer(self, *finished: tuple[int, RolloutResult | Exception]) -> None:
        self.messages.put_nowait(pack([Finished(ticket, result) for ticket, result in finished]))

    def _submit(self, ticket: int, order: GroupOrder) -> Awaitable[None]:
        self.orders[ticket] = order
        return asyncio.sleep(0)

    async def _peek(self, wanted: Any) -> PeekMessage:
        self.peeked.append(wanted)
        return pack_peek(Peek((), {"e0-p0_g0": "no reason"}))

    async def _results(self) -> AsyncIterator[Awaitable[Message]]:
        while True:
            message = await self.messages.get()
            if isinstance(message, Exception):
                raise message
            yield asyncio.sleep(0, message)


def order(group_id: str, siblings: int) -> GroupOrder:
    return GroupOrder(
        group_id, Prompt(PromptRef(0, 0, ""), (4, 5), "{}"), tuple(SiblingOrder(i, 0) for i in range(siblings))
    )


def sealed(group: GroupOrder, index: int) -> SiblingResult:
    completion = Completion((7, 1), (-0.5, -0.25), (0,), (3,), "stop")
    calls = staged_call(group, group.siblings[index], completion, prompt=(4, 5), turn=0)
    return SiblingResult(index, 0, calls=calls, reward=0.75, generation_s=1.5, environment_s=0.25)


@pytest.fixture
def actor() -> ActorDouble:
    return ActorDouble()


def test_results_and_failures_survive_the_message():
    group = order("g", 1)
    lost = SiblingResult(2, 4, failure=Failure(infrastructure=True, message="lost"))
    turn = TurnResult(1, 2, sealed(group, 0).calls)
    refused = SiblingResult(3, 0, failure=Failure(infrastructure=False, message="closed", refused=True))
    discarded = DiscardedPartial(4, 1, 57, "another prompt")
    results = (sealed(group, 0), lost, turn, refused, discarded)
    sent = [Finished(n, result) for n, result in enumerate(results)]
    assert unpack(pack(sent)) == sent


def test_exceptions_come_back_as_infrastructure_failures():
    back = unpack(pack([Finished(7, InfrastructureFailure("engine died")), Finished(8, KeyError("x"))]))
    assert [type(one.result) for one in back] == [InfrastructureFailure, InfrastructureFailure]
    assert [str(one.result) for one in back] == ["engine died", "KeyError('x')"]


async def test_each_group_gets_its_own_siblings_from_the_one_stream(actor: ActorDouble):
    client, (g, h) = GeneratorClient(actor), (order("g", 2), order("h", 1))
    collecting = [asyncio.create_task(_collect(client, group)) for group in (g, h)]
    actor.answer((0, sealed(g, 1)), (1, sealed(h, 0)))
    actor.answer((0, sealed(g, 0)))
    assert await asyncio.gather(*collecting) == [[sealed(g, 1), sealed(g, 0)], [sealed(h, 0)]]
    assert actor.orders == {0: g, 1: h}
    assert actor.abandoned == []


async def test_the_stream_serves_groups_that_come_later(actor: ActorDouble):
    client, group = GeneratorClient(actor), order("g", 1)
    for ticket in range(3):
        actor.answer((ticket, sealed(group, 0)))
        assert await _collect(client, group) == [sealed(group, 0)]


async def test_leaving_early_abandons_the_rest_and_ignores_its_results(actor: ActorDouble):
    client, group = GeneratorClient(actor), order("g", 2)
    results = client.generate(group)
    actor.answer((0, sealed(group, 0)))
    await anext(results)
    await results.aclose()
    assert actor.abandoned == [0]
    actor.answer((0, sealed(group, 1)), (1, sealed(group, 0)), (1, sealed(group, 1)))
    assert len(await _collect(client, group)) == 2


async def test_a_dead_engine_fails_the_group_that_asked_it(actor: ActorDouble):
    actor.answer((0, InfrastructureFailure("its engine died")))
    with pytest.raises(InfrastructureFailure, match="its engine died"):
        await _collect(GeneratorClient(actor), order("g", 2))


async def test_a_dead_actor_fails_every_group_that_waits_and_the_next_one_asks_again(actor: ActorDouble):
    client, group = GeneratorClient(actor), order("g", 1)
    collecting = [asyncio.create_task(_collect(client, group)) for _ in range(2)]
    await asyncio.sleep(0)
    actor.messages.put_nowait(ConnectionError("actor died"))
    assert [type(e) for e in await asyncio.gather(*collecting, return_exceptions=True)] == [ConnectionError] * 2
    actor.answer((2, sealed(group, 0)))
    assert await _collect(client, group) == [sealed(group, 0)]


async def test_an_order_that_cannot_be_submitted_fails_instead_of_waiting(actor: ActorDouble):
    async def refuse(ticket: int, group: GroupOrder) -> None:
        raise ValueError("can't unpack the order")

    actor.submit = Method(refuse)
    with pytest.raises(ValueError, match="can't unpack the order"):
        await asyncio.wait_for(_collect(GeneratorClient(actor), order("g", 1)), 1)


async def test_a_look_sends_plain_numbers_and_brings_back_an_answer(actor: ActorDouble):
    client = GeneratorClient(actor)
    answers = [await client.peek({"e0-p0_g0": KnownCall(2, turn=1, tokens=40)}), await client.peek(None)]
    assert answers == [Peek((), {"e0-p0_g0": "no reason"})] * 2
    assert actor.peeked == [{"e0-p0_g0": (2, 1, 40)}, None]


async def test_a_discarded_part_ends_no_sibling(actor: ActorDouble):
    group, said = order("g", 1), DiscardedPartial(0, 0, 57, "another prompt")
    actor.answer((0, said))
    actor.answer((0, sealed(group, 0)))
    assert await _collect(GeneratorClient(actor), group) == [said, sealed(group, 0)]


async def _collect(client: GeneratorClient, group: GroupOrder) -> list[RolloutResult]:
    return [result async for result in client.generate(group)]
