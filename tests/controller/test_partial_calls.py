"""What is taken over from looks at running calls: tokens of the current execution and turn, and no others."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gpu_workers.controller import partial_calls as owner
from gpu_workers.controller.barrier import Cut, Mutation
from gpu_workers.controller.partial_calls import PartialCalls
from gpu_workers.controller.ports import KnownCall, PeekedCall, SampledTokens
from gpu_workers.controller.recovery_ledger import RecoveryLedger, StagedTurn
from storage.records import CallSampling, PartialCall, PromptRef, RecoveryLevel

SAMPLING = CallSampling("counter", 7, 1.0, 1.0, (0,))
ROLLOUT, GROUP = "e0-p0_g0", "e0-p0"


def tokens(first: int, end: int, *, version: int = 0) -> SampledTokens:
    """Tokens that are named after version and position."""
    ids = np.arange(first, end, dtype=np.int32) + 1000 * version
    return SampledTokens(ids, -ids.astype(np.float32), (0,), (version,))


def found(
    end: int, *, start: int = 0, executed: int = 0, turn: int = 0, version: int = 0, finish: str = ""
) -> PeekedCall:
    sampled = tokens(start, end, version=version)
    return PeekedCall(ROLLOUT, 0, executed, turn, 3, "digest", SAMPLING, start, sampled, finish)


class Scene:
    """One group of one sibling that runs, and what is known of its call."""

    def __init__(self) -> None:
        self.mutation = Mutation("test")
        self.ledger = RecoveryLedger()
        prompt = PromptRef(0, 0, "hash")
        self.ledger.reserve(self.mutation, prompt, level=RecoveryLevel.PREFIX, batch=0, order=0, size=1)
        self.ledger.admit(self.mutation, 0, target_step=0, start_version=0)
        self.calls = PartialCalls(self.ledger)
        self.dispatch()

    def dispatch(self) -> None:
        self.ledger.dispatch(self.mutation, GROUP)

    def interrupt(self) -> None:
        self.ledger.interrupt(self.mutation, GROUP, 0)

    def look(self, *calls: PeekedCall) -> None:
        """As the peeker does."""
        news = [call for call in calls if self.calls.is_news(call)]
        if news:
            self.calls.extend(self.mutation, news)

    def held(self, turn: int = 0) -> list[int]:
        partial = self.calls.of(ROLLOUT, attempt=0, turn=turn)
        return [] if partial is None else partial.sampled.token_ids.tolist()

    def captured(self) -> dict[str, PartialCall]:
        records, _ = self.calls.capture(Cut("test"), tuple(self.ledger.groups()), {})
        return {record.rollout_id: record for record in records}

    def saved_tokens(self) -> list[int]:
        """What a snapshot would hold."""
        records, rows = self.calls.capture(Cut("test"), tuple(self.ledger.groups()), {})
        chunks = [rows[chunk] for record in records for chunk in record.chunks]
        return [token for row in chunks for token in row.batch.column("token_ids")[row.index].as_py()]


def test_a_late_look_at_an_execution_that_was_replaced_changes_nothing():
    scene = Scene()
    scene.look(found(4))
    scene.interrupt()
    scene.dispatch()  # it goes on from 4 tokens, elsewhere
    scene.look(found(9, start=4))
    assert scene.held() == [0, 1, 2, 3]
    assert scene.calls.wanted() == {ROLLOUT: KnownCall(1, 0, 4)}
    scene.look(found(6, start=4, executed=1, version=1))
    assert scene.held() == [0, 1, 2, 3, 1004, 1005]


def test_a_late_look_at_an_interrupted_execution_counts_until_the_next_one_begins():
    scene = Scene()
    scene.look(found(4))
    scene.interrupt()
    scene.look(found(9, start=4))
    assert scene.held() == list(range(9))


def test_an_execution_of_another_life_of_the_run_is_nobody_s():
    scene = Scene()
    scene.look(found(4, executed=3))
    assert scene.held() == []


def test_a_call_of_a_later_turn_counts_once_the_turn_before_it_has_arrived():
    scene = Scene()
    scene.look(found(4))
    scene.look(found(2, turn=1))
    assert (scene.held(), scene.held(turn=1)) == ([0, 1, 2, 3], [])
    scene.ledger.stage(scene.mutation, GROUP, 0, StagedTurn("key", "digest", 5))
    scene.look(found(2, turn=1))
    assert scene.held(turn=1) == [0, 1]


@pytest.mark.parametrize("other", [{"prompt_digest": "other"}, {"sampling": replace(SAMPLING, temperature=0.7)}, {}])
@pytest.mark.parametrize("anew", [2, 4, 6])
def test_tokens_stay_until_the_generator_says_that_it_samples_the_call_anew(other, anew):
    scene, fresh = Scene(), replace(found(anew, version=1), **other)
    scene.look(found(4))
    scene.look(fresh)
    assert scene.held() == [0, 1, 2, 3]
    scene.calls.drop(scene.mutation, ROLLOUT)
    scene.look(fresh)
    assert scene.held() == [1000 + n for n in range(anew)]


def test_what_has_ended_or_is_of_another_attempt_is_no_news():
    scene = Scene()
    assert not scene.calls.is_news(replace(found(4), attempt=1))
    assert not scene.calls.is_news(replace(found(4), rollout_id="e0-p9_g0"))
    assert scene.calls.is_news(found(4))
    scene.ledger.abandon(scene.mutation, GROUP, 0, infrastructure=True)
    assert not scene.calls.is_news(found(4))


class Between:
    """Lets a test act while rows are made, in the moment after the thread has begun."""

    def __init__(self, act: Any) -> None:
        self._act = act

    async def to_thread(self, work: Any, *arguments: Any) -> Any:
        made = work(*arguments)
        self._act()
        await asyncio.sleep(0)
        return made


async def staged_while(scene: Scene, act: Any) -> None:
    await scene.calls.stage(in_thread=Between(act).to_thread)


async def test_a_call_that_grows_or_ends_while_its_rows_are_made_is_saved_as_far_as_they_go():
    scene = Scene()
    scene.look(found(4))
    await staged_while(scene, lambda: scene.look(found(6, start=4, finish="stop")))
    assert (scene.saved_tokens(), scene.captured()[ROLLOUT].finish_reason) == ([0, 1, 2, 3], "")
    assert scene.held() == list(range(6))
    await scene.calls.stage()
    assert (scene.saved_tokens(), scene.captured()[ROLLOUT].finish_reason) == (list(range(6)), "stop")


@pytest.mark.parametrize("anew", [2, 4, 6])
async def test_rows_of_a_call_that_was_sampled_anew_meanwhile_are_not_those_of_the_new_one(anew):
    scene = Scene()

    def replaced() -> None:
        scene.calls.drop(scene.mutation, ROLLOUT)
        scene.look(found(anew, version=1))

    scene.look(found(4))
    await staged_while(scene, replaced)
    assert scene.saved_tokens() == []
    await scene.calls.stage()
    assert scene.saved_tokens() == [1000 + n for n in range(anew)]


async def test_a_call_that_is_dropped_while_its_rows_are_made_stays_dropped():
    scene = Scene()
    scene.look(found(4))
    await staged_while(scene, lambda: scene.calls.drop(scene.mutation, ROLLOUT))
    assert scene.captured() == {}


async def test_tokens_come_back_in_order_however_often_they_were_staged_and_merged():
    scene = Scene()
    most = owner._MOST_ROWS
    for end in range(1, 3 * most):
        scene.look(found(end, start=end - 1, version=end // 5))
        if end % 2:
            await scene.calls.stage()
            assert len(scene.captured()[ROLLOUT].chunks) < most
    expected = [end - 1 + 1000 * (end // 5) for end in range(1, 3 * most)]
    assert scene.held() == scene.saved_tokens() == expected
    partial = scene.calls.of(ROLLOUT, attempt=0, turn=0)
    assert partial.sampled.versions == tuple(range((3 * most - 1) // 5 + 1))
    assert partial.sampled.version_starts == tuple(max(0, 5 * n - 1) for n in partial.sampled.versions)
    assert partial.sampled.logprobs.tolist() == [-float(token) for token in expected]


async def test_restored_tokens_grow_and_only_what_is_new_becomes_a_row():
    scene = Scene()
    scene.look(found(4))
    await scene.calls.stage()
    records, rows = scene.calls.capture(Cut("test"), tuple(scene.ledger.groups()), {})
    again = Scene()
    again.calls.load(again.mutation, records, rows)
    again.look(found(7, start=4))
    await again.calls.stage()
    assert again.saved_tokens() == list(range(7))
    assert [chunk.rpartition("/")[2] for chunk in again.captured()[ROLLOUT].chunks] == ["p0-4", "p4-7"]
