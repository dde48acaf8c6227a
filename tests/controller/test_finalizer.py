"""The finalizer: exactly one training row per sibling, published with its index, or nothing at all."""

import asyncio
import re

import numpy as np
import pyarrow as pa
import pytest

from gpu_workers.controller.barrier import Cut
from gpu_workers.controller.ports import SiblingResult
from storage.errors import BrokenInvariant
from storage.records import RowKind, call_key, rollout_id
from storage.schemas import STAGED_CALLS, row_digest


def _calls(order, index, attempt, turns, **changes):
    """A sibling's calls; `turns` are (prompt tokens, sampled tokens, version spans). `changes` are of the last call."""
    rollout = rollout_id(order.group_id, index)
    rows = []
    for turn, (prompt, sampled, starts, versions) in enumerate(turns):
        row = {"row_id": call_key(rollout, attempt=attempt, turn=turn), "rollout_id": rollout, "turn": turn}
        row |= {"group_id": order.group_id, "attempt": attempt, "parent_key": None, "finish_reason": "stop"}
        row |= {"prompt_token_ids": prompt, "token_ids": sampled, "version_starts": starts, "versions": versions}
        row |= {"logprobs": [float(np.float32(-0.1 * t)) for t in sampled]}
        row |= changes if turn == len(turns) - 1 else {}
        row["digest"] = row_digest(RowKind.STAGED_CALL, row)
        rows.append(row)
    return pa.RecordBatch.from_pylist(rows, schema=STAGED_CALLS)


def _two_turns(world, *, broken=lambda order, index: False, newest=1, **changes):
    """Every rollout has two calls, whose tokens are of versions 0 and `newest`; the second one of a `broken` rollout
    has other values.
    """

    def result(order, index, attempt):
        prompt = list(order.prompt.token_ids)
        turns = [(prompt, [11, 12], [0], [0]), ([*prompt, 11, 12, 40, 41], [13, 14, 15], [0, 1], [0, newest])]
        changed = changes if broken(order, index) else {}
        return SiblingResult(index, attempt, calls=_calls(order, index, attempt, turns, **changed), reward=0.5)

    world.generator.result = result


async def test_scenario_26_publishing_hands_the_group_over_and_leaves_one_row_per_sibling(make_world):
    world = make_world()
    controller = await world.start()
    await world.settle(lambda: len(controller.parts.buffer) == 8)
    assert not any(group.group_id in controller.parts.ledger for group in controller.parts.buffer.ready())
    bundle = await world.snapshot(1)
    assert sorted(bundle.rows) == sorted(f"{g.group_id}_g{i}" for g in bundle.state.buffer for i in range(2))
    assert {row.kind for row in bundle.rows.values()} == {RowKind.TRAINING_ROW}
    await world.kill()


async def test_calls_of_one_rollout_become_one_row_in_which_each_token_keeps_its_version(make_world):
    world = make_world()
    world.boot()
    _two_turns(world)
    controller = await world.restore(world.plan())
    await world.settle(lambda: len(controller.parts.buffer) == 8)
    group = controller.parts.buffer.ready()[0]
    (handle,) = controller.parts.rows.rows(group.row_ids[:1])
    row = handle.batch.slice(handle.index, 1).to_pylist()[0]
    prompt = row["token_ids"][:3]
    assert row["token_ids"] == [*prompt, 11, 12, 40, 41, 13, 14, 15]
    assert row["loss_mask"] == [False] * 3 + [True] * 2 + [False] * 2 + [True] * 3
    assert list(zip(row["version_starts"], row["versions"], strict=True)) == [
        (0, -1),
        (3, 0),
        (5, -1),
        (7, 0),
        (8, 1),
    ]
    assert [p != 0 for p in row["logprobs"]] == row["loss_mask"]
    assert group.version_tokens == ((0, 6), (1, 4))
    assert row_digest(RowKind.TRAINING_ROW, row) == handle.digest == row["digest"]
    await world.kill()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prompt_token_ids": [99, 12, 40, 41]}, "call .*/t1 does not continue the tokens before it"),
        ({"turn": 2}, "is turn 2 after None, expected turn 1"),
        ({"parent_key": "another rollout/a0/t0"}, "is turn 1 after another rollout/a0/t0, expected turn 1 after .*/t0"),
        ({"logprobs": [-0.1, -0.2]}, "captured incompletely: 3 tokens, 2 log-probabilities"),
        ({"version_starts": [1, 2]}, "captured incompletely: .* versions .0, 1. from .1, 2."),
        ({"version_starts": [0, 3]}, "captured incompletely"),
        ({"versions": [0]}, "captured incompletely"),
    ],
)
async def test_a_rollout_whose_calls_cannot_be_joined_is_masked_and_not_guessed(make_world, changes, says):
    world = make_world()
    world.boot()
    first = world.passed_by(1)[0]
    _two_turns(world, broken=lambda order, index: (order.group_id, index) == (first, 1), **changes)
    controller = await world.restore(world.plan())
    await world.settle(lambda: len(controller.parts.buffer) == 8)
    group = controller.parts.buffer.ready()[0]
    handles = controller.parts.rows.rows(group.row_ids)
    whole, masked = (handle.batch.slice(handle.index, 1).to_pylist()[0] for handle in handles)
    assert (group.group_id, whole["masked"], masked["masked"]) == (first, False, True)
    assert masked["token_ids"] == whole["token_ids"][:5], "what was certain before the breach"
    assert (masked["version_starts"], masked["versions"]) == ([0, 3], [-1, 0])
    assert group.rewards == (0.5, 0.5), "it counts in the baseline"
    assert (group.version_tokens, group.num_tokens) == (((0, 3), (1, 2)), 5 + 2), "only trained tokens have an age"
    (event,) = world.trace.of("rollout_masked")
    assert event["rollout_id"] == f"{first}_g1"
    assert re.search(says, event["reason"])
    (report,) = await world.train(1, 1)
    assert first in report["group_ids"]
    await world.kill()


@pytest.mark.parametrize("policy", ["shrink", "replace"])
async def test_scenario_28_a_group_of_which_nothing_can_be_trained_is_dropped_and_both_areas_are_clean(
    make_world, policy
):
    world = make_world(async_rl={"on_dropped_prompt": policy})
    world.boot()
    lost = world.passed_by(2)[1]
    _two_turns(world, broken=lambda order, index: order.group_id == lost, newest=0, turn=2)
    controller = await world.restore(world.plan())
    await world.settle(lambda: len(controller.parts.buffer) == 8 - (policy == "shrink"))
    parts = controller.parts
    (dropped,) = parts.state.dropped
    assert (dropped.prompt.group_id, dropped.target_step) == (lost, 0)
    assert "none of its 2 rollouts can be trained: call" in dropped.reason
    assert not [row for row in parts.rows.capture(Cut("test")) if row.startswith(f"{lost}_")]
    assert lost not in parts.ledger
    assert parts.state.shortfall == ({0: 1} if policy == "shrink" else {})
    world.check()
    await world.snapshot(1)
    (report,) = await world.train(1, 1)
    assert len(report["group_ids"]) == 4 - (policy == "shrink")
    await world.kill()
    await world.start()
    await world.train(2, 3)
    assert lost not in {order.group_id for order in world.generator.orders}
    assert not world.audit().problems
    await world.kill()


async def test_scenario_27_a_snapshot_that_waited_for_its_cut_while_the_run_failed_saves_nothing(make_world):
    world = make_world()
    world.boot()
    world.generator.held = lambda group_id, index: True
    controller = await world.restore(world.plan())
    parts = controller.parts
    async with parts.barrier.mutation("hold the cut back"):
        attempt = asyncio.create_task(controller.attempt_snapshot(1))
        await asyncio.sleep(0)
        parts.state.fail(BrokenInvariant("a group's rows are unknown"))
    with pytest.raises(BrokenInvariant, match="rows are unknown"):
        await attempt
    assert [operation for operation, _ in world.store.changes()] == ["create_exclusive"]  # the claim
    async with asyncio.timeout(5), parts.barrier.mutation("the barrier is free"):
        pass
    await world.kill()


async def test_a_sibling_without_calls_and_without_a_failure_ends_the_run(make_world):
    world = make_world()
    world.boot()
    world.generator.result = lambda order, index, attempt: SiblingResult(index, attempt)
    controller = await world.restore(world.plan())
    with pytest.raises(BrokenInvariant, match="returned neither calls nor a failure"):
        await controller.train_steps(1, 1)
    await world.kill()


async def test_a_group_killed_while_its_rows_are_assembled_is_finalized_by_the_next_incarnation(make_world):
    world = make_world(async_rl={"spare_prompts": 0})
    world.boot()
    controller = world.controller
    await world.restore(world.plan())
    await world.settle(lambda: any(g.status == "finalizing" for g in controller.parts.ledger.groups()))
    saved = (await world.snapshot(1)).state
    await world.kill()
    await world.start()
    reports = await world.train(1, 1)
    assert reports[0]["group_ids"] == world.passed_by(4)
    complete = [g.group_id for g in saved.ledger if all(s.sealed is not None for s in g.siblings)]
    assert not {f"{group_id}_g{i}" for group_id in complete for i in range(2)} & set(world.generator.generated)
    await world.kill()
