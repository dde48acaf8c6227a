"""Refits: running calls go on across them, each token carries its version, and the batch age of a step is exact."""

import asyncio
import random
from dataclasses import replace
from fractions import Fraction

import pyarrow as pa
import pytest

from storage.records import RowKind
from storage.schemas import STAGED_CALLS, row_digest
from storage.trace_analysis import batch_age


def _calls_across_refits(world, is_late):
    """Late groups that run ahead of the trainer end only after the next refit: their first two tokens come from the
    weights before it, the others from those after it. Both siblings of a group run at once.
    """
    generator, parts = world.generator, world.controller.parts
    refit, load = [asyncio.Event()], generator.load_weights

    async def load_weights(weights):
        timings = await load(weights)
        refit[0].set()
        refit[0] = asyncio.Event()
        return timings

    async def generate(order):
        generator.orders.append(order)
        first = generator.version
        runs_ahead = (parts.ledger.group(order.group_id).target_step or 0) > first
        await asyncio.sleep(0)
        if runs_ahead and is_late(order.group_id):
            await refit[0].wait()
        for sibling in order.siblings:
            generator.generated.append(f"{order.group_id}_g{sibling.generation_index}")
            result = generator.result(order, sibling.generation_index, sibling.attempt)
            yield replace(result, calls=_spanning(result.calls, first, generator.version))

    generator.load_weights, generator.generate = load_weights, generate


def _spanning(calls, first, last):
    (row,) = calls.to_pylist()
    row |= {"version_starts": [0], "versions": [first]}
    row |= {"version_starts": [0, 2], "versions": [first, last]} if first != last else {}
    row["digest"] = row_digest(RowKind.STAGED_CALL, row)
    return pa.RecordBatch.from_pylist([row], schema=STAGED_CALLS)


def _note_trained_rows(world):
    """Rows by the step that trained them, as the trainer got them."""
    trained, train, begin = {}, world.trainer.train_microbatch, world.trainer.begin_step

    async def begin_step(step):
        trained[step] = []
        await begin(step)

    async def train_microbatch(rows):
        trained[max(trained)] += [row for batch in rows for row in batch.to_pylist()]
        return await train(rows)

    world.trainer.begin_step, world.trainer.train_microbatch = begin_step, train_microbatch
    return trained


def _age_of(rows, version):
    """Batch age from the rows themselves: a mean over sampled tokens of rows that are not masked."""
    ages = []
    for row in (row for row in rows if not row["masked"]):
        ends = [*row["version_starts"][1:], len(row["token_ids"])]
        spans = zip(row["version_starts"], ends, row["versions"], strict=True)
        under = [generated for start, end, generated in spans for _ in range(start, end)]
        ages += [version - v for v, sampled in zip(under, row["loss_mask"], strict=True) if sampled]
    return Fraction(sum(ages), len(ages))


async def test_running_calls_go_on_across_a_refit_and_their_tokens_carry_both_versions(make_world):
    world = make_world()
    world.boot()
    _calls_across_refits(world, lambda group_id: True)
    controller = await world.restore(world.plan())
    parts = controller.parts
    await world.settle(lambda: len(parts.buffer) == 4 and len(world.generator.orders) == 8)
    running = {order.group_id for order in world.generator.orders[4:]}
    assert {g.group_id for g in parts.ledger.admitted()} == running
    await controller.train_steps(1, 1)
    await world.settle(lambda: sum(g.target_step == 1 for g in parts.buffer.ready()) == 4)
    assert world.generator.loads == [0, 1]
    assert (world.generator.aborted, world.trace.of("attempt_abandoned")) == ([], [])
    assert [order.group_id for order in world.generator.orders].count(min(running)) == 1
    for group in (g for g in parts.buffer.ready() if g.target_step == 1):
        assert group.group_id in running
        assert (group.start_version, group.oldest_version, group.newest_version) == (0, 0, 1)
        assert group.version_tokens == ((0, 4), (1, group.num_tokens - 4))
        for handle in parts.rows.rows(group.row_ids):
            row = handle.batch.slice(handle.index, 1).to_pylist()[0]
            assert (row["version_starts"], row["versions"]) == ([0, 3, 5], [-1, 0, 1])
    await world.kill()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("chunk", [None, 2])
async def test_the_batch_age_of_every_step_is_that_of_its_rows_and_that_recomputed_from_the_trace(
    make_world, seed, chunk
):
    world = make_world(
        async_rl={"max_lookahead_versions": 2, "min_groups_for_streaming_train": chunk}, algorithm={"max_steps": 7}
    )
    world.boot()
    late = set(random.Random(seed).sample(world.passed_by(36), k=18))
    _calls_across_refits(world, late.__contains__)
    trained = _note_trained_rows(world)
    await world.restore(world.plan())
    await world.train(1, 7)
    traced = {age.step: age for age in batch_age(world.trace.events)}
    reported = {event["step"]: event["batch_age"] for event in world.trace.of("train_step")}
    assert sorted(trained) == sorted(reported) == sorted(traced) == list(range(1, 8))
    for step, rows in trained.items():
        assert reported[step] == float(_age_of(rows, step - 1)) == traced[step].batch_age
        assert traced[step].num_tokens == sum(sum(row["loss_mask"]) for row in rows)
    mixed = [row for rows in trained.values() for row in rows if len({*row["versions"]} - {-1}) > 1]
    assert len(mixed) > 4, "rollouts that span a refit"
    assert max(reported.values()) > 0
    await world.kill()


async def test_versions_survive_a_restart_and_so_does_the_age_of_the_step_that_trains_them(make_world):
    world = make_world()
    world.boot()
    _calls_across_refits(world, lambda group_id: True)
    controller = await world.restore(world.plan())
    await controller.train_steps(1, 1)
    await world.settle(lambda: sum(g.target_step == 1 for g in controller.parts.buffer.ready()) == 4)
    saved = (await world.snapshot(1)).state
    tokens = [pair for g in saved.buffer if g.target_step == 1 for pair in g.version_tokens]
    assert {version for version, _ in tokens} == {0, 1}
    await world.kill()
    await world.start()
    trained = _note_trained_rows(world)
    (report,) = await world.train(2, 2)
    total = sum(count for _, count in tokens)
    assert report["batch_age"] == sum(count for version, count in tokens if version == 0) / total
    assert report["batch_age"] == float(_age_of(trained[2], 1)) > 0
    events = [event for _, trace in world.lives for event in trace.events]
    assert {age.step: age.batch_age for age in batch_age(events)}[2] == report["batch_age"]
    await world.kill()


async def test_tokens_that_are_not_trained_have_no_age(make_world):
    world = make_world()
    world.boot()
    _calls_across_refits(world, lambda group_id: True)
    spanning = world.generator.result
    world.generator.result = lambda order, index, attempt: replace(spanning(order, index, attempt), masked=index == 1)
    controller = await world.restore(world.plan())
    trained = _note_trained_rows(world)
    await controller.train_steps(1, 2)
    report = world.trace.of("train_step")[1]
    assert {row["masked"] for row in trained[2]} == {False, True}
    assert report["batch_age"] == float(_age_of(trained[2], 1)) > 0
    age = {age.step: age for age in batch_age(world.trace.events)}[2]
    assert age.batch_age == report["batch_age"]
    assert age.num_tokens == sum(sum(row["loss_mask"]) for row in trained[2] if not row["masked"])
    await world.kill()
