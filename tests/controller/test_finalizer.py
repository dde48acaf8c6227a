"""The finalizer: exactly one training row per sibling, published with its index, or nothing at all."""

import asyncio

import numpy as np
import pyarrow as pa
import pytest

from gpu_workers.controller.ports import SiblingResult
from storage.errors import BrokenInvariant
from storage.records import RowKind, call_key, rollout_id
from storage.schemas import STAGED_CALLS, row_digest


def _calls(order, index, attempt, turns):
    """A sibling's calls; `turns` are (prompt tokens, sampled tokens, version spans)."""
    rollout = rollout_id(order.group_id, index)
    rows = []
    for turn, (prompt, sampled, starts, versions) in enumerate(turns):
        row = {"row_id": call_key(rollout, attempt=attempt, turn=turn), "rollout_id": rollout, "turn": turn}
        row |= {"group_id": order.group_id, "attempt": attempt, "parent_key": None, "finish_reason": "stop"}
        row |= {"prompt_token_ids": prompt, "token_ids": sampled, "version_starts": starts, "versions": versions}
        row |= {"logprobs": [float(np.float32(-0.1 * t)) for t in sampled]}
        row["digest"] = row_digest(RowKind.STAGED_CALL, row)
        rows.append(row)
    return pa.RecordBatch.from_pylist(rows, schema=STAGED_CALLS)


def _two_turns(world, *, second_prompt_continues=True):
    def result(order, index, attempt):
        prompt = list(order.prompt.token_ids)
        second = [*prompt, 11, 12, 40, 41] if second_prompt_continues else [*prompt, 99, 12, 40, 41]
        turns = [(prompt, [11, 12], [0], [0]), (second, [13, 14, 15], [0, 1], [0, 1])]
        return SiblingResult(index, attempt, calls=_calls(order, index, attempt, turns), reward=0.5)

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


async def test_scenario_27_calls_that_cannot_be_joined_end_the_run_and_nothing_can_be_saved(make_world):
    world = make_world()
    world.boot()
    _two_turns(world, second_prompt_continues=False)
    controller = await world.restore(world.plan())
    step = asyncio.create_task(controller.train_steps(1, 1))
    await world.settle(lambda: controller.state == "failed")
    with pytest.raises(BrokenInvariant, match="does not continue the tokens of rollout"):
        await step
    with pytest.raises(BrokenInvariant, match="does not continue"):
        await controller.attempt_snapshot(1, force=True)
    assert len(world.generator.orders) == len({order.group_id for order in world.generator.orders})
    assert [operation for operation, _ in world.store.changes()] == ["create_exclusive"]  # the claim
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
