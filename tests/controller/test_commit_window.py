"""The optimizer-commit window and the retries around it: the same for every algorithm, streamed or not."""

import asyncio

import pytest

from storage.errors import BrokenInvariant, InfrastructureFailure

SITUATIONS = [(kind, chunk) for kind in ("grpo", "ppo") for chunk in (None, 2)]


def _watch(world):
    """Every call of the trainer, with what the controller promised at that moment: (verb, in window, claims, steps)."""
    calls, parts, trainer = [], world.controller.parts, world.trainer

    def watched(verb):
        call = getattr(trainer, verb)

        async def note(*arguments):
            state = parts.state
            calls.append((verb, state.in_commit_window, len(parts.buffer.claimed()), state.train_steps))
            return await call(*arguments)

        return note

    for verb in ("begin_step", "train_microbatch", "flush_microbatches", "finish_step", "publish_weights"):
        setattr(trainer, verb, watched(verb))
    return calls


def _make(make_world, kind, chunk):
    return make_world(
        algorithm={"kind": kind, "microbatch_rows": 2, "max_steps": 4},
        async_rl={"min_groups_for_streaming_train": chunk},
    )


@pytest.mark.parametrize(("kind", "chunk"), SITUATIONS)
async def test_the_window_reaches_from_the_optimizer_step_until_claims_and_counters_have_moved(make_world, kind, chunk):
    world = _make(make_world, kind, chunk)
    controller = await world.start()
    await world.settle(lambda: len(controller.parts.buffer) == 8)
    calls = _watch(world)
    await world.train(1, 1)
    assert calls == [
        ("begin_step", False, 4, 0),
        *[("train_microbatch", False, 4, 0)] * 4,
        ("flush_microbatches", False, 4, 0),
        ("finish_step", True, 4, 0),
        ("publish_weights", False, 0, 1),
    ]
    await world.kill()


@pytest.mark.parametrize("verb", ["begin_step", "train_microbatch", "flush_microbatches"])
@pytest.mark.parametrize(("kind", "chunk"), SITUATIONS)
async def test_scenario_67_a_step_that_failed_before_the_window_is_trained_by_the_retry(make_world, kind, chunk, verb):
    world = _make(make_world, kind, chunk)
    controller = await world.start()
    call, errors = getattr(world.trainer, verb), [InfrastructureFailure("a rank lost its connection")]

    async def fail_once(*arguments):
        if errors:
            raise errors.pop()
        return await call(*arguments)

    setattr(world.trainer, verb, fail_once)
    with pytest.raises(InfrastructureFailure, match="lost its connection"):
        await controller.train_steps(1, 1)
    assert (controller.parts.buffer.claimed(), controller.parts.state.train_steps) == ([], 0)
    world.check()
    (report,) = await world.train(1, 1)
    assert set(report["group_ids"]) == set(world.passed_by(4))
    assert [len(rows) for rows in world.trainer.trained] == [8]
    assert len(world.trace.of("train_step")) == 1
    await world.kill()


@pytest.mark.parametrize(("kind", "chunk"), SITUATIONS)
async def test_scenario_67_a_step_that_failed_after_the_window_returns_its_recorded_result(make_world, kind, chunk):
    world = _make(make_world, kind, chunk)
    controller = await world.start()
    publish, errors = world.trainer.publish_weights, [InfrastructureFailure("the weights could not be written")]

    async def fail_once(version):
        if version == 1 and errors:
            raise errors.pop()
        return await publish(version)

    world.trainer.publish_weights = fail_once
    with pytest.raises(InfrastructureFailure, match="could not be written"):
        await controller.train_steps(1, 1)
    (recorded,) = world.trace.of("train_step")
    (report,) = await world.train(1, 1)
    same = report.keys() & recorded.keys()
    assert {key: report[key] for key in same} == {key: recorded[key] for key in same}
    assert {"group_ids", "rollouts_sha256", "weights_sha256", "batch_age", "metrics", "seconds"} <= same
    assert await controller.train_steps(1, 1) == [report]
    assert len(world.trainer.trained) == len(world.trace.of("train_step")) == 1
    assert world.generator.version == 1, "the retry has made up for the refit"
    await world.train(2, 4)
    assert not world.audit().problems
    await world.kill()


@pytest.mark.parametrize(("kind", "chunk"), SITUATIONS)
async def test_a_step_that_failed_inside_the_window_ends_the_run_and_is_trained_by_the_next_life(
    make_world, kind, chunk
):
    world = _make(make_world, kind, chunk)
    controller = await world.start()
    await world.train(1, 1)

    async def fail(step):
        raise InfrastructureFailure("the optimizer's rank died")

    world.trainer.finish_step = fail
    for _ in range(2):
        with pytest.raises(BrokenInvariant, match="train step 2 failed inside its commit window .*rank died"):
            await controller.train_steps(2, 2)
    with pytest.raises(BrokenInvariant, match="commit window"):
        await controller.attempt_snapshot(1, force=True)
    await world.kill()
    await world.start()
    await world.train(2, 4)
    assert not world.audit().problems
    await world.kill()


@pytest.mark.parametrize(("kind", "chunk"), SITUATIONS)
async def test_scenario_67_a_caller_that_vanishes_inside_the_window_finds_the_step_committed(make_world, kind, chunk):
    world = _make(make_world, kind, chunk)
    controller = await world.start()
    world.trainer.finish_gate = asyncio.Event()
    step = asyncio.ensure_future(controller.train_steps(1, 1))
    vanished = asyncio.shield(step)  # as the actor does for its callers
    await world.settle(lambda: world.trainer.waiting_at == "finish")
    vanished.cancel()
    world.trainer.finish_gate.set()
    (report,) = await controller.train_steps(1, 1)
    assert await step == [report]
    assert len(world.trainer.trained) == 1
    await world.kill()
