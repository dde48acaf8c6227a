"""Recovery level `prefix` through the controller: the tokens of running calls are saved, and calls go on from them."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from storage.records import RowKind
from tests.controller.prefix_runs import SECTIONS, running_with, trained_rows, uninterrupted

FIRST_STEP = ("e0-p0_", "e0-p1_", "e0-p2_", "e0-p3_")


@pytest.fixture
def worlds(make_world: Callable[..., Any]) -> Callable[..., Any]:
    """Worlds at level prefix with lookahead 0 and prompts in the order of their numbers, unless told otherwise."""
    return lambda **sections: make_world(**{**SECTIONS, **sections})


async def test_the_tokens_of_running_calls_are_saved_and_a_restarted_run_goes_on_from_them(worlds):
    expected = await uninterrupted(worlds())
    world = worlds()
    await running_with(world, 2)
    bundle = await world.snapshot(1)
    assert {call.num_tokens for call in bundle.state.partial_calls} == {2}
    saved = {call.rollout_id for call in bundle.state.partial_calls}
    sampled = Counter(world.generator.sampled)
    await world.kill()
    await world.start()
    await world.train(1, 3)
    assert trained_rows(world) == expected
    again = sampled + world.generator.sampled
    assert {position: times for position, times in again.items() if times > 1} == {}
    resumed = {event["rollout_id"]: event for event in world.trace.of("attempt_resumed")}
    assert resumed.keys() == saved
    assert {(event["attempt"], event["turns"], event["tokens"]) for event in resumed.values()} == {(0, 0, 2)}
    (restored,) = world.trace.of("checkpoint_restored")
    assert (restored["calls_continued"], restored["tokens_continued"]) == (len(saved), 2 * len(saved))
    assert not world.audit().problems


async def test_a_response_that_is_killed_twice_ends_like_one_that_was_never_killed(worlds):
    expected = await uninterrupted(worlds())
    world = worlds()
    counted: Counter[tuple[str, int]] = Counter()
    for tokens in (1, 2, 3):
        await running_with(world, tokens)
        bundle = await world.snapshot(1)
        assert {call.num_tokens for call in bundle.state.partial_calls} == {tokens}
        counted += world.generator.sampled
        await world.kill()
    await world.start()
    await world.train(1, 3)
    assert trained_rows(world) == expected
    assert set((counted + world.generator.sampled).values()) == {1}
    begun = {call.rollout_id for call in bundle.state.partial_calls}
    sealed = {event["rollout_id"]: event["attempt"] for event in world.trace.of("attempt_sealed")}
    assert {sealed[rollout] for rollout in begun} == {0}
    assert not world.audit().problems


async def test_a_later_snapshot_writes_only_the_tokens_that_are_new(worlds):
    world = worlds()
    await running_with(world, 1)
    first = await world.snapshot(1)
    world.generator.had = lambda rollout: 3
    second = await world.snapshot(2)
    before, after = (
        {key for key, row in bundle.rows.items() if row.kind is RowKind.PARTIAL_TOKENS} for bundle in (first, second)
    )
    assert before
    assert before < after
    assert {key.rpartition("/")[2] for key in after - before} == {"p1-3"}
    assert all(second.placements[key] == first.placements[key] for key in before)


async def test_an_attempt_is_skipped_unless_a_running_call_has_grown_since_the_last_snapshot(worlds):
    world = worlds()
    await running_with(world, 2)
    await world.snapshot(1)
    skipped = await world.controller.attempt_snapshot(2)
    assert (skipped.outcome, skipped.reason) == ("skipped", "no_data_plane_mutations")
    world.generator.had = lambda rollout: 3
    bundle = await world.snapshot(3)
    assert {call.num_tokens for call in bundle.state.partial_calls} == {3}


async def test_calls_that_have_not_grown_leave_the_rows_as_they_are(worlds):
    world = worlds()
    await running_with(world, 2)
    first, second = await world.snapshot(1), await world.snapshot(2, force=True)
    assert first.rows.keys() == second.rows.keys()
    assert first.state.partial_calls == second.state.partial_calls


@pytest.mark.parametrize("level", ["prompt_group", "sibling", "turn"])
async def test_below_level_prefix_no_tokens_of_running_calls_are_saved(worlds, level):
    world = worlds(rollout_recovery={"target_level": level})
    await running_with(world, 2)
    bundle = await world.snapshot(1)
    assert bundle.state.partial_calls == ()
    assert world.generator.sampled == Counter()


async def test_a_snapshot_does_not_wait_for_generators_that_do_not_answer(worlds):
    world = worlds(rollout_recovery={"target_level": "prefix", "peek_deadline_s": 0.01})
    await running_with(world, 2)
    before = await world.snapshot(1)
    world.generator.peek_gate = asyncio.Event()
    world.generator.had = lambda rollout: 3
    bundle = await world.snapshot(2, force=True)
    assert {call.num_tokens for call in bundle.state.partial_calls} == {2}
    assert bundle.state.partial_calls == before.state.partial_calls
    assert len(world.trace.of("peek_failed")) == 1


async def test_all_who_ask_during_a_look_share_the_next_one(worlds):
    world = worlds()
    await running_with(world, 1)
    asked: list[int] = []
    original = world.generator.peek

    async def peek(wanted: Any) -> Any:
        asked.append(len(wanted))
        return await original(wanted)

    world.generator.peek = peek
    await asyncio.gather(*(world.controller._peeker.look() for _ in range(20)))
    assert len(asked) == 2
    await world.controller._peeker.look()
    assert len(asked) == 3


async def test_the_end_of_a_call_between_peek_and_cut_is_what_counts(worlds):
    world = worlds()
    await running_with(world, 2)
    await world.snapshot(1)
    world.generator.release()
    await world.settle(lambda: len(world.controller.parts.buffer) == 4)
    bundle = await world.snapshot(2, force=True)
    assert bundle.state.partial_calls == ()
    assert not [key for key, row in bundle.rows.items() if row.kind is RowKind.PARTIAL_TOKENS]


async def test_tokens_of_two_weight_versions_keep_theirs_when_their_call_is_continued(worlds):
    world = worlds(async_rl={"max_lookahead_versions": 1})
    world.boot()
    world.generator.held = lambda group_id, index: not f"{group_id}_".startswith(FIRST_STEP)
    world.generator.had = lambda rollout: 2
    await world.restore(world.plan())
    await world.settle(lambda: sum(not r.startswith(FIRST_STEP) for r in world.generator.calls) == 4)
    early = {rollout for rollout in world.generator.calls if not rollout.startswith(FIRST_STEP)}
    await world.controller._peeker.look()
    await world.train(1, 1)
    bundle = await world.snapshot(1, force=True)
    assert early <= {call.rollout_id for call in bundle.state.partial_calls}
    world.generator.release()
    await world.kill()
    await world.start()
    await world.train(2, 2)
    published = {event["group_id"]: dict(event["version_tokens"]) for event in world.trace.of("group_published")}
    for group in {rollout.rpartition("_g")[0] for rollout in early}:
        assert published[group][0] == 2  # those that the kill found
        assert published[group][1] > 2
    assert not world.audit().problems


async def test_a_trainer_checkpoint_keeps_the_tokens_of_running_calls_too(worlds):
    world = worlds(async_rl={"max_lookahead_versions": 1})
    world.boot()
    world.generator.held = lambda group_id, index: not f"{group_id}_".startswith(FIRST_STEP)
    world.generator.had = lambda rollout: 2
    await world.restore(world.plan())
    await world.settle(lambda: len(world.controller.parts.buffer) == 4)
    await world.controller._peeker.look()
    await world.train(1, 1)
    await world.kill()
    world.generator.release()
    await world.start()
    assert world.trace.of("checkpoint_restored")[0]["calls_continued"] > 0
    await world.train(2, 3)
    assert not world.audit().problems
