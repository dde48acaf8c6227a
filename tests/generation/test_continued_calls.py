"""Model calls that were interrupted and go on: nothing is sampled twice, and the outcome is as if nothing had been."""

import asyncio
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_workers.controller.ports import DiscardedPartial, KnownCall, PartialCompletion, PeekedCall, SiblingOrder
from gpu_workers.generation.capture import Completion, tokens_of
from storage.errors import InfrastructureFailure
from storage.records import CallSampling
from storage.schemas import prompt_digest
from tests.generation.fake_engine import CONFIG, STOP, Life, order, partial_of, turns

SIBLING = SiblingOrder(0, 0)


def with_length(*lengths: int) -> int:
    """A sibling whose response, under the first weights, has one of these lengths."""
    found = (index for index in range(500) if len(asyncio.run(uninterrupted(index)).token_ids) in lengths)
    return next(found)


async def uninterrupted(index: int, refits: dict[int, str] | None = None) -> Completion:
    """The response of a sibling; `refits` maps the number of tokens so far to the next weights."""
    life = Life()
    call = life.start(SiblingOrder(index, 0))
    await life.steps(0)
    sampled = 0
    while not call.done():
        life.llm.label = (refits or {}).get(sampled, life.llm.label)
        await life.steps(1)
        sampled += 1
    return call.result()


async def continued(index: int, cuts: list[tuple[int, str]]) -> tuple[Completion, int]:
    """The response after being cut off after each of these numbers of further tokens, each time going on with other
    weights; and how many tokens all engines sampled together.
    """
    partial: PartialCompletion | None = None
    label, sampled = "default", 0
    for life_number, (steps, next_label) in enumerate([*cuts, (1000, "")]):
        life = Life(label)
        call = life.start(SiblingOrder(index, 0, environment_attempt=life_number, partial=partial))
        await life.steps(0)
        for _ in range(steps):
            await life.steps(1)
            if call.done():
                break
        peeked = life.peeked(KnownCall(life_number))
        sampled += len(peeked.sampled) - (0 if partial is None else len(partial.sampled))
        if call.done():
            return call.result(), sampled
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        partial, label = partial_of(peeked), next_label
    raise AssertionError("the call did not end")


@given(
    index=st.integers(0, 200),
    cuts=st.lists(st.tuples(st.integers(0, 12), st.sampled_from(["default", "1", "2"])), max_size=5),
)
def test_a_response_that_is_cut_off_anywhere_is_that_of_an_engine_with_refits_in_the_same_places(
    index: int, cuts: list[tuple[int, str]]
):
    refits: dict[int, str] = {}
    position = 0
    for steps, label in cuts:
        position += steps
        refits[position] = label
    expected = asyncio.run(uninterrupted(index, refits))
    completion, sampled = asyncio.run(continued(index, cuts))
    assert completion == expected
    assert sampled == len(expected.token_ids)


@given(index=st.integers(0, 200), looks=st.lists(st.integers(0, 6), max_size=8), known_share=st.floats(0, 1))
def test_every_look_at_a_running_call_is_an_exact_prefix_of_its_end(index: int, looks: list[int], known_share: float):
    async def looked() -> tuple[list[PeekedCall], Completion]:
        life, seen = Life(), []
        call = life.start(SiblingOrder(index, 0))
        for steps in looks:
            await life.steps(steps)
            total = len(life.peeked().sampled)
            seen.append(life.peeked(KnownCall(0, tokens=int(known_share * total))))
        return seen, await life.finish(call)

    seen, completion = asyncio.run(looked())
    for peeked in seen:
        end = peeked.start + len(peeked.sampled)
        assert peeked.sampled.token_ids.tolist() == list(completion.token_ids[peeked.start : end])
        assert peeked.sampled.logprobs.tolist() == list(completion.logprobs[peeked.start : end])
        assert peeked.finish_reason in ("", completion.finish_reason)


@pytest.mark.parametrize(("lengths", "reason"), [(range(1, 24), "stop"), ((24,), "length")])
async def test_a_part_that_is_already_whole_asks_no_engine(lengths: Any, reason: str):
    index = await asyncio.to_thread(with_length, *lengths)
    first = Life()
    whole = await first.finish(first.start(SiblingOrder(index, 0)))
    partial = partial_of(first.peeked())
    second = Life()
    assert await second.start(SiblingOrder(index, 0, environment_attempt=1, partial=partial)) == whole
    assert whole.finish_reason == reason
    assert second.llm.asked == []
    assert second.peeked(KnownCall(1)).finish_reason == reason


async def test_what_an_engine_is_asked_is_the_rest_at_its_place():
    first = Life()
    first.start(SIBLING)
    await first.steps(5)
    peeked = first.peeked()
    second = Life()
    second.start(SiblingOrder(0, 0, environment_attempt=1, partial=partial_of(peeked)))
    await second.steps(0)
    (request,) = second.llm.output_processor.request_states.values()
    assert (request.params.offset, request.params.max_tokens) == (5, CONFIG.generation.max_new_tokens - 5)
    assert request.external_req_id == "e0-p0_g0/a0/t0/1"
    assert second.peeked(KnownCall(1)).sampled.token_ids.tolist() == peeked.sampled.token_ids.tolist()


OTHER_SAMPLING = CallSampling("counter", 7, 1.0, 1.0, (STOP,))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"turn": 1}, "they are of turn 1, and turn 0 is the next"),
        ({"prompt_digest": prompt_digest((4, 6))}, "the prompt of turn 0 is not the one that they followed"),
        ({"sampling": OTHER_SAMPLING}, r"drawn with CallSampling\(kind='counter', seed=7, .*, and now it is"),
        ({"sampled": tokens_of(Completion((9,) * 25, (-1.0,) * 25, (0,), (0,), ""))}, "25 tokens, more than the 24"),
    ],
)
async def test_a_part_that_does_not_fit_is_discarded_said_so_and_sampled_anew(change: dict[str, Any], reason: str):
    first = Life()
    first.start(SIBLING)
    await first.steps(5)
    partial = replace(partial_of(first.peeked()), **change)
    second = Life()
    call = second.start(SiblingOrder(0, 0, environment_attempt=1, partial=partial))
    await second.steps(3)
    (discarded,) = second.discarded
    assert discarded == DiscardedPartial(0, 0, len(partial.sampled), discarded.reason)
    assert re.search(reason, discarded.reason)
    # What the controller may still hold for this call is not what is sampled now.
    assert second.peeked(KnownCall(1, tokens=2)).start == 0
    assert await second.finish(call) == await uninterrupted(0)


async def test_only_the_first_turn_of_an_execution_goes_on_from_a_part():
    first = Life()
    first.start(SiblingOrder(0, 0, turns=2))
    await first.steps(2)
    partial = partial_of(first.peeked(KnownCall(0, turn=2)))
    second = Life()
    sibling = SiblingOrder(0, 0, environment_attempt=1, turns=2, partial=partial)
    await second.finish(second.start(sibling))
    later = asyncio.create_task(
        second.calls.complete(order(sibling), sibling, (4, 5), turn=3, report=second.said.append)
    )
    await second.finish(later)
    assert second.discarded == []
    assert second.llm.asked == ["e0-p0_g0/a0/t2/1", "e0-p0_g0/a0/t3/1"]


async def test_after_the_engine_died_its_calls_can_still_be_read_and_go_on_elsewhere():
    first = Life()
    call = first.start(SIBLING)
    await first.steps(4)
    first.llm.die()
    with pytest.raises(InfrastructureFailure, match=r"generator 0: its engine died during e0-p0_g0/a0/t0; start it"):
        await call
    peeked = first.peeked()
    assert len(peeked.sampled) == 4
    second = Life()
    rest = second.start(SiblingOrder(0, 0, environment_attempt=1, partial=partial_of(peeked)))
    assert await second.finish(rest) == await uninterrupted(0)


async def test_an_aborted_call_keeps_the_tokens_that_the_engine_forgets():
    life = Life()
    call = life.start(SIBLING)
    await life.steps(4)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert life.llm.output_processor.request_states == {}
    peeked = life.peeked(KnownCall(0, tokens=1))
    assert (peeked.start, len(peeked.sampled), peeked.finish_reason) == (1, 3, "")
    assert np.array_equal(peeked.sampled.token_ids, (await uninterrupted(0)).token_ids[1:4])


async def test_a_call_that_is_aborted_while_the_engine_is_asked_leaves_no_request_behind():
    life = Life()
    call = life.start(SIBLING)
    await asyncio.sleep(0)  # the call has begun, and waits until the engine knows it
    call.cancel()
    await turns()
    assert (call.cancelled(), life.llm.output_processor.request_states) == (True, {})
