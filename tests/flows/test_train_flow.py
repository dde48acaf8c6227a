"""The training flow's loops, with Prefect's engine and a runtime in memory."""

import asyncio

import pytest
from prefect import flow

from flows.checkpoint import request_checkpoint
from flows.failures import TrainFailed
from flows.train import drive
from storage.errors import BrokenInvariant, ConfigurationError, Fenced, RunAlreadyLive, StoreUnavailable
from storage.run_config import RunConfig

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("prefect_api")]


async def nobody_is_gone(_driver: str) -> bool:
    return False


@pytest.fixture
def train(fake_runtime, tmp_path):
    """Runs `drive` in a flow; what `restore_run` did is noted among the runtime's calls."""

    async def run(*, max_steps: int = 5, interval_s: float = 0.05):
        config = RunConfig.model_validate(
            {
                "name": "run",
                "algorithm": {"max_steps": max_steps},
                "rollout_checkpointing": {"interval_s": interval_s},
                "store": {"url": str(tmp_path)},
            }
        )

        async def restore_run(status):
            fake_runtime.calls.append(f"restore of {status.state}")
            await fake_runtime.restore_link("redispatch", {}, status.incarnation)

        @flow(name="train-under-test")
        async def under_test():
            return await drive(config, fake_runtime, driver="me", restore_run=restore_run, owner_is_gone=nobody_is_gone)

        return await under_test()

    return run


def trained(runtime):
    return [call for call in runtime.calls if call.startswith("train ")]


async def test_a_new_run_is_restored_trained_to_its_last_step_and_closed(train, fake_runtime):
    summary = await train()
    assert summary["steps"] == 5
    assert [c for c in fake_runtime.calls if c not in ("snapshot", "heartbeat")] == [
        *("launch", "attach", "restore of empty", "link redispatch"),
        *("train 1-1", "train 2-5"),
        *("close snapshot=True", "end", "detach"),
    ]
    assert fake_runtime.live is None


async def test_a_living_run_goes_on_without_a_restore(train, fake_runtime):
    fake_runtime.start()
    fake_runtime.config = fake_runtime.live["config"] = RunConfig.model_validate(
        {"name": "run", "algorithm": {"max_steps": 5}}
    )
    fake_runtime.committed = 3
    await train()
    assert trained(fake_runtime) == ["train 4-4", "train 5-5"]
    assert not any(call.startswith("restore") for call in fake_runtime.calls)


async def test_the_end_of_the_data_ends_the_run_well(train, fake_runtime):
    fake_runtime.end_of_data_after = 3
    assert (await train(max_steps=50))["steps"] == 3
    assert fake_runtime.live is None


async def test_a_retryable_failure_tries_the_same_steps_again(train, fake_runtime):
    fake_runtime.fail("train 2-5", StoreUnavailable("no answer"))
    await train()
    assert trained(fake_runtime) == ["train 1-1", "train 2-5", "train 2-5"]


async def test_a_broken_invariant_fails_at_once_as_itself_and_leaves_the_runtime_alive(train, fake_runtime):
    broken = BrokenInvariant("a row was lost")
    fake_runtime.fail("train 2-5", broken)
    with pytest.raises(BrokenInvariant) as caught:
        await train()
    assert caught.value is broken
    assert trained(fake_runtime) == ["train 1-1", "train 2-5"]
    assert fake_runtime.live is not None
    assert fake_runtime.live["driver"] is None


async def test_a_driver_that_was_replaced_fails_by_that_and_closes_and_ends_nothing(train, fake_runtime):
    fake_runtime.fail("train 2-5", RunAlreadyLive("driven by another, no longer by me"))
    with pytest.raises(RunAlreadyLive, match="no longer by me"):
        await train()
    assert not {"preempt", "end", "close snapshot=True"} & set(fake_runtime.calls)
    assert trained(fake_runtime) == ["train 1-1", "train 2-5"]


async def test_a_fenced_run_fails_by_the_fence_and_is_not_tried_again(train, fake_runtime):
    fake_runtime.fail("train 2-5", Fenced("writer 'inc-1' was fenced by 'inc-2'"))
    with pytest.raises(Fenced, match="inc-2"):
        await train()
    assert trained(fake_runtime) == ["train 1-1", "train 2-5"]


async def test_a_failing_snapshot_attempt_fails_the_run_as_itself(train, fake_runtime):
    fake_runtime.fail("snapshot", BrokenInvariant("two owners"))
    fake_runtime.train_steps = _slow(fake_runtime.train_steps)
    with pytest.raises(BrokenInvariant, match="two owners"):
        await train()


async def test_an_attempt_that_the_store_refuses_to_the_end_fails_alone(train, fake_runtime):
    fake_runtime.fail("snapshot", *[StoreUnavailable("no answer")] * 4)  # one try and its three retries
    fake_runtime.train_steps = _slow(fake_runtime.train_steps)
    summary = await train()
    assert (summary["steps"], summary["failed_attempts"]) == (5, 1)


async def test_snapshots_are_attempted_beside_the_training(train, fake_runtime):
    fake_runtime.train_steps = _slow(fake_runtime.train_steps)
    summary = await train()
    assert summary["snapshots"] == fake_runtime.calls.count("snapshot") >= 2


async def test_a_checkpoint_that_is_published_late_wakes_the_snapshot_loop(train, fake_runtime):
    fake_runtime.train_steps = _slow(fake_runtime.train_steps)
    fake_runtime.durable_after = {step: step - 3 for step in range(4, 201)}
    await train(max_steps=200, interval_s=3600)
    assert fake_runtime.calls.count("snapshot") >= 1


@pytest.mark.parametrize("save_period", [1, 20])
async def test_checkpoints_that_are_published_with_their_step_wake_nobody(train, fake_runtime, save_period):
    fake_runtime.train_steps = _slow(fake_runtime.train_steps)
    fake_runtime.durable_after = {step: step - step % save_period for step in range(1, 201)}
    await train(max_steps=200, interval_s=3600)
    assert fake_runtime.calls.count("snapshot") == 0


async def test_a_last_checkpoint_that_could_not_be_published_fails_the_run_by_its_reason(train, fake_runtime):
    fake_runtime.checkpoint_failure = "StoreUnavailable: no answer"
    with pytest.raises(TrainFailed, match="StoreUnavailable: no answer"):
        await train()
    assert fake_runtime.live is None


async def test_a_checkpoint_on_request_is_asked_of_a_living_run(fake_runtime):
    @flow(name="checkpoint-under-test")
    async def under_test():
        return await request_checkpoint(fake_runtime)

    with pytest.raises(ConfigurationError, match="run 'run' is not live"):
        await under_test()
    fake_runtime.start()
    assert (await under_test())["outcome"] == "completed"
    assert fake_runtime.calls == ["checkpoint"]


async def test_a_cancelled_run_publishes_what_is_unfinished_and_ends(train, fake_runtime):
    training = asyncio.Event()

    async def endless(first, last, incarnation):
        training.set()
        await asyncio.sleep(60)

    fake_runtime.train_steps = endless
    running = asyncio.create_task(train(interval_s=60))
    await training.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert fake_runtime.calls[-2:] == ["preempt", "detach"]
    assert fake_runtime.live is None


def _slow(train_steps):
    async def slow(first, last, incarnation):
        await asyncio.sleep(0.4)
        return await train_steps(first, last, incarnation)

    return slow
