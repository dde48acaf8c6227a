"""What a generator answers when it is asked for its running calls, and what it remembers."""

import asyncio
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpu_workers.controller.ports import Failure, KnownCall, Peek, PeekedCall, SiblingOrder, SiblingResult
from gpu_workers.controller.sampled_tokens import sampled_tokens
from gpu_workers.generation.call_book import CallBook, blames_prompt
from gpu_workers.generation.engine_requests import EngineRequests
from gpu_workers.generation.peek_wire import pack_peek, unpack_peek
from storage.records import CallSampling
from tests.generation.fake_engine import FakeLlm, Life, order, turns

WANTED = {f"e0-p0_g{index}": KnownCall(0) for index in range(3)}


async def three_running(tokens: int = 4) -> tuple[Life, "list[asyncio.Task[Any]]"]:
    life = Life()
    calls = [life.start(SiblingOrder(index, 0)) for index in range(3)]
    await life.steps(tokens)
    assert not any(call.done() for call in calls)
    return life, calls


async def end(*calls: "asyncio.Task[Any]") -> None:
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def test_only_what_is_wanted_is_answered_and_only_what_is_not_known_is_sent():
    life, calls = await three_running()
    peek = life.book.peek({"e0-p0_g1": KnownCall(0, tokens=3), "e9-p9_g0": KnownCall(0)})
    (call,) = peek.calls
    assert (call.rollout_id, call.attempt, call.environment_attempt, call.turn) == ("e0-p0_g1", 0, 0, 0)
    assert (call.prompt_tokens, call.start, len(call.sampled), call.finish_reason) == (2, 3, 1, "")
    assert (call.sampled.version_starts, call.sampled.versions) == ((0,), (0,))
    assert (call.sampled.token_ids.dtype, call.sampled.logprobs.dtype) == (np.int32, np.float32)
    await end(*calls)


@pytest.mark.parametrize(
    ("known", "start"),
    [
        (KnownCall(0, turn=0, tokens=4), 4),
        (KnownCall(0, turn=0, tokens=5), 0),  # more than there is: not this call's tokens
        (KnownCall(0, turn=-1, tokens=2), 0),  # another turn's
    ],
)
async def test_what_the_controller_knows_counts_for_this_very_call_only(known: KnownCall, start: int):
    life, calls = await three_running()
    (call,) = life.book.peek({"e0-p0_g0": known}).calls
    assert (call.start, len(call.sampled)) == (start, 4 - start)
    await end(*calls)


async def test_a_call_of_an_older_execution_or_turn_than_wanted_is_not_answered():
    life, calls = await three_running()
    assert life.book.peek({"e0-p0_g0": KnownCall(1), "e0-p0_g1": KnownCall(0, turn=1)}) == Peek()
    await end(*calls)


async def test_a_call_that_has_ended_is_answered_with_its_end_until_nobody_wants_it():
    life, calls = await three_running()
    completion = await life.finish(calls[0])
    life.book.over("e0-p0_g0", SiblingOrder(0, 0), forget=False)
    (call,) = life.book.peek({"e0-p0_g0": KnownCall(0)}).calls
    assert (call.finish_reason, call.sampled.token_ids.tolist()) == (
        completion.finish_reason,
        list(completion.token_ids),
    )
    life.book.peek({})
    assert len(life.book) == 2
    await end(*calls)


async def test_of_calls_that_run_no_more_nothing_stays_that_is_not_wanted():
    life, calls = await three_running()
    await end(*calls)
    for index in range(3):
        life.book.over(f"e0-p0_g{index}", SiblingOrder(index, 0), forget=False)
    assert len(life.book.peek({"e0-p0_g2": KnownCall(0)}).calls) == 1
    assert len(life.book) == 1
    life.book.peek({})
    assert len(life.book) == 0


async def test_a_running_call_stays_when_it_is_not_wanted_yet():
    life, calls = await three_running()
    life.book.peek({})
    assert len(life.book.peek(WANTED).calls) == 3
    await end(*calls)


async def test_a_data_failure_is_forgotten_at_once_and_no_other_execution_s_calls_with_it():
    life, calls = await three_running()
    await end(*calls)
    again = life.start(SiblingOrder(1, 0, environment_attempt=1))
    await turns()
    for index in range(2):
        life.book.over(f"e0-p0_g{index}", SiblingOrder(index, 0), forget=True)
    assert [call.rollout_id for call in life.book.peek(None).calls] == ["e0-p0_g1", "e0-p0_g2"]
    await end(again)


@pytest.mark.parametrize(
    ("result", "blamed"),
    [
        (SiblingResult(0, 0, failure=Failure(False, "it can't be scored")), True),
        (SiblingResult(0, 0, failure=Failure(True, "the connection broke")), False),
        (SiblingResult(0, 0, failure=Failure(False, "the environment is closed", refused=True)), False),
        (SiblingResult(0, 0, reward=1.0), False),
        (None, False),
    ],
)
def test_only_a_data_failure_makes_tokens_useless(result: SiblingResult | None, blamed: bool):
    assert blames_prompt(result) is blamed


async def test_a_later_execution_takes_the_place_of_an_earlier_one_and_never_the_other_way_round():
    life = Life()
    for executed in (1, 0):
        call = life.start(SiblingOrder(0, 0, environment_attempt=executed))
        await turns()
        await end(call)
    assert [call.environment_attempt for call in life.book.peek(None).calls] == [1]


async def test_of_two_requests_of_one_name_the_newest_is_read():
    life = Life()
    first = life.start(SiblingOrder(0, 0))
    await life.steps(3)
    second = life.start(SiblingOrder(0, 0))
    await life.steps(2)
    assert len(life.peeked().sampled) == 2
    await end(first, second)


async def test_asked_for_everything_it_forgets_nothing():
    life, calls = await three_running()
    await end(*calls)
    for index in range(3):
        life.book.over(f"e0-p0_g{index}", SiblingOrder(index, 0), forget=False)
    assert [(call.start, len(call.sampled)) for call in life.book.peek(None).calls] == [(0, 4)] * 3
    assert len(life.book) == 3


async def test_a_book_that_keeps_nothing_is_empty_while_calls_run():
    life = Life()
    life.calls._book = CallBook(EngineRequests(life.llm), keeps=False)
    call = life.start(SiblingOrder(0, 0))
    await life.steps(2)
    assert (len(life.calls._book), life.calls._book.peek(None)) == (0, Peek())
    await life.finish(call)


async def test_calls_of_groups_whose_level_keeps_no_tokens_leave_nothing_behind():
    life = Life()
    group = replace(order(SiblingOrder(0, 0)), keeps_running=False)
    call = asyncio.create_task(life.calls.complete(group, group.siblings[0], (4, 5), turn=0))
    await life.steps(2)
    assert len(life.book) == 0
    await life.finish(call)
    assert len(life.book) == 0


async def test_calls_that_an_agent_plays_are_unreadable_for_its_reason():
    life, calls = await three_running()
    life.book._unreadable = "an agent plays"
    assert life.peek() == Peek((), dict.fromkeys(WANTED, "an agent plays"))
    await end(*calls)


def no_tokens(llm: FakeLlm) -> None:
    for request in llm.output_processor.request_states.values():
        request.detokenizer = SimpleNamespace()


def a_logprob_too_few(llm: FakeLlm) -> None:
    for request in llm.output_processor.request_states.values():
        request.logprobs_processor.logprobs.logprobs.pop()


def no_versions(llm: FakeLlm) -> None:
    for request in llm.output_processor.request_states.values():
        request.weight_version_starts = []


def versions_that_begin_late(llm: FakeLlm) -> None:
    for request in llm.output_processor.request_states.values():
        request.weight_version_starts = [("default", 1)]


def a_strange_version(llm: FakeLlm) -> None:
    for request in llm.output_processor.request_states.values():
        request.weight_version_starts = [("newest", 0)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (no_tokens, "does not show the tokens of a request: AttributeError"),
        (a_logprob_too_few, r"holds 4 tokens with 3 log-probabilities"),
        (no_versions, r"weight version spans \[\], which do not fit"),
        (versions_that_begin_late, r"weight version spans \[\('default', 1\)\], which do not fit"),
        (a_strange_version, "does not show the tokens of a request: ValueError.*newest"),
    ],
)
async def test_a_call_that_is_not_as_expected_is_unreadable_with_the_reason_and_goes_on(change: Any, reason: str):
    life, calls = await three_running()
    change(life.llm)
    peek = life.peek()
    assert (peek.calls, set(peek.unreadable)) == ((), set(WANTED))
    assert all(re.search(reason, why) for why in peek.unreadable.values())
    assert not any(call.done() for call in calls)
    await end(*calls)


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        (SimpleNamespace(), "this vLLM does not show its requests: AttributeError"),
        (FakeLlm(), "the engine does not know request e0-p0_g0/a0/t0"),
    ],
)
async def test_a_call_that_the_engine_does_not_show_is_unreadable_and_ends_as_ever(engine: Any, reason: str):
    life = Life()
    life.calls._book = life.book = CallBook(EngineRequests(engine), keeps=True)
    call = life.start(SiblingOrder(0, 0))
    await life.steps(1)
    (why,) = life.peek().unreadable.values()
    assert why.startswith(reason)
    completion = await life.finish(call)
    (peeked,) = life.peek().calls
    assert len(peeked.sampled) == len(completion.token_ids)


async def test_a_call_that_could_not_be_read_when_it_was_aborted_stays_unreadable():
    life, calls = await three_running()
    a_logprob_too_few(life.llm)
    await end(*calls)
    assert set(life.peek().unreadable) == set(WANTED)


def peeked(rollout: str, tokens: int) -> PeekedCall:
    sampling = CallSampling("counter", 2**63 - 1, 0.7, 0.9, (1, 50_000))
    sampled = sampled_tokens(range(tokens), [-0.1 * n for n in range(tokens)], (0,) * bool(tokens), (3,) * bool(tokens))
    return PeekedCall(rollout, 1, 2, 3, 4, "digest", sampling, 5, sampled, "stop" if tokens else "")


def test_an_answer_survives_the_message():
    peek = Peek((peeked("a", 3), peeked("b", 0), peeked("c", 100)), {"d": "no reason"})
    back = unpack_peek(pack_peek(peek))
    assert back.unreadable == {"d": "no reason"}
    for before, after in zip(peek.calls, back.calls, strict=True):
        assert repr(after) == repr(before)
        assert np.array_equal(before.sampled.token_ids, after.sampled.token_ids)
        assert np.array_equal(before.sampled.logprobs, after.sampled.logprobs)
        assert (after.sampled.token_ids.dtype, after.sampled.logprobs.dtype) == (np.int32, np.float32)
    assert unpack_peek(pack_peek(Peek())) == Peek()
