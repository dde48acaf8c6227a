"""Finding, launching and holding a runtime."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from prefect.logging import disable_run_logger

from storage.errors import ControllerSilent, InfrastructureFailure, RunAlreadyLive, StaleIncarnation
from storage.run_config import RunConfig
from tasks.runtime import close_runtime, ensure_runtime, held, leave

CONFIG = RunConfig(name="run")


async def owner_lives(_driver: str) -> bool:
    return False


async def owner_died(_driver: str) -> bool:
    return True


@pytest.fixture(autouse=True)
def _without_run_logger() -> AsyncIterator[None]:
    with disable_run_logger():
        yield


async def test_without_a_runtime_one_is_launched_and_held(fake_runtime):
    status = await ensure_runtime.fn(fake_runtime, CONFIG, "me", owner_lives)
    assert (status.state, status.driver) == ("empty", "me")
    assert fake_runtime.calls == ["launch", "attach"]


async def test_a_living_runtime_is_taken_as_it_is(fake_runtime):
    fake_runtime.start("inc-7")
    status = await ensure_runtime.fn(fake_runtime, CONFIG, "me", owner_lives)
    assert status.incarnation == "inc-7"
    assert fake_runtime.calls == ["attach"]


async def test_a_runtime_with_a_living_driver_is_refused_by_the_drivers_name(fake_runtime):
    fake_runtime.start(driver="somebody")
    with pytest.raises(RunAlreadyLive, match="somebody"):
        await ensure_runtime.fn(fake_runtime, CONFIG, "me", owner_lives)
    assert fake_runtime.live["driver"] == "somebody"


async def test_a_runtime_whose_driver_died_is_taken_over(fake_runtime):
    fake_runtime.start(driver="somebody")
    status = await ensure_runtime.fn(fake_runtime, CONFIG, "me", owner_died)
    assert (status.state, fake_runtime.live["driver"]) == ("running", "me")


async def test_of_two_drivers_that_follow_a_dead_one_the_second_is_refused(fake_runtime):
    fake_runtime.start(driver="somebody")

    async def followed_meanwhile(_driver):
        fake_runtime.live["driver"] = "first"
        return True

    with pytest.raises(RunAlreadyLive, match="driven by first"):
        await ensure_runtime.fn(fake_runtime, CONFIG, "second", followed_meanwhile)
    assert fake_runtime.live["driver"] == "first"


async def test_a_living_driver_is_replaced_on_demand_and_sent_away_only_then(fake_runtime):
    fake_runtime.start("inc-7", driver="somebody")
    fake_runtime.committed = 17
    sent_away = []

    async def send_away(driver):
        sent_away.append((driver, fake_runtime.live["driver"]))

    status = await ensure_runtime.fn(fake_runtime, CONFIG, "me", owner_lives, send_away)
    assert (status.incarnation, status.state, status.train_steps) == ("inc-7", "running", 17)
    assert sent_away == [("somebody", "me")]
    assert fake_runtime.calls == ["attach", "attach by take-over"]


async def test_a_take_over_without_an_owner_sends_nobody_away(fake_runtime):
    async def send_away(driver):
        raise AssertionError(driver)

    await ensure_runtime.fn(fake_runtime, CONFIG, "me", owner_lives, send_away)
    assert fake_runtime.calls == ["launch by take-over", "attach"]


async def test_a_controller_that_does_not_answer_is_replaced_on_demand_only(fake_runtime):
    async def send_away(driver):
        raise AssertionError(driver)

    fake_runtime.fail("status", *[ControllerSilent("no answer")] * 2)
    with pytest.raises(ControllerSilent):
        await ensure_runtime.fn(fake_runtime, CONFIG, "me", owner_lives)
    await ensure_runtime.fn(fake_runtime, CONFIG, "me", owner_lives, send_away)
    assert fake_runtime.calls == ["launch by take-over", "attach"]


async def test_of_two_drivers_that_start_at_once_one_is_refused_and_ends_nothing(fake_runtime):
    outcomes = await asyncio.gather(
        *(ensure_runtime.fn(fake_runtime, CONFIG, driver, owner_lives) for driver in ("first", "second")),
        return_exceptions=True,
    )
    refused = [outcome for outcome in outcomes if isinstance(outcome, RunAlreadyLive)]
    assert len(refused) == 1
    assert "end" not in fake_runtime.calls
    assert fake_runtime.live["driver"] in ("first", "second")


async def test_a_runtime_that_followed_the_closed_one_is_not_ended(fake_runtime):
    fake_runtime.start("inc-7")
    close = fake_runtime.close

    async def close_and_be_followed(*, snapshot):
        closed = await close(snapshot=snapshot)
        fake_runtime.start("inc-8")
        return closed

    fake_runtime.close = close_and_be_followed
    await close_runtime.fn(fake_runtime, True)
    assert fake_runtime.live["incarnation"] == "inc-8"


async def test_a_replaced_driver_that_is_cancelled_leaves_the_runtime_alone(fake_runtime):
    fake_runtime.start(driver="another")
    fake_runtime.fail("preempt", RunAlreadyLive("driven by another"))
    await leave(fake_runtime, "cancelled", grace_s=5)
    assert fake_runtime.live["driver"] == "another"


@pytest.mark.parametrize("state", ["failed", "ended"])
async def test_a_runtime_that_cannot_go_on_is_replaced(fake_runtime, state):
    fake_runtime.start("inc-7", state=state)
    status = await ensure_runtime.fn(fake_runtime, CONFIG, "me", owner_lives)
    assert status.incarnation != "inc-7"
    assert fake_runtime.calls == ["attach", "end", "launch", "attach"]


async def test_a_runtime_with_another_configuration_publishes_and_is_replaced(fake_runtime):
    fake_runtime.start("inc-7")
    longer = RunConfig.model_validate({"name": "run", "algorithm": {"max_steps": 500}})
    status = await ensure_runtime.fn(fake_runtime, longer, "me", owner_lives)
    assert (status.state, status.max_steps) == ("empty", 500)
    assert fake_runtime.calls == ["attach", "close snapshot=True", "end", "launch", "attach"]


async def test_a_held_runtime_hears_from_its_driver_until_it_is_let_go(fake_runtime):
    fake_runtime.start(driver="me")
    async with held(fake_runtime, "me", every_s=0.01):
        await asyncio.sleep(0.1)
    assert fake_runtime.calls.count("heartbeat") >= 3
    assert fake_runtime.live["driver"] is None
    heard = len(fake_runtime.calls)
    await asyncio.sleep(0.05)
    assert len(fake_runtime.calls) == heard


async def test_a_failure_lets_go_too_and_stays_what_it_was(fake_runtime):
    fake_runtime.start(driver="me")
    with pytest.raises(StaleIncarnation):
        async with held(fake_runtime, "me", every_s=1):
            raise StaleIncarnation("gone")
    assert fake_runtime.live["driver"] is None


async def test_a_missed_heartbeat_is_no_reason_to_stop(fake_runtime):
    fake_runtime.start(driver="me")
    fake_runtime.fail("heartbeat", InfrastructureFailure("no answer"))
    async with held(fake_runtime, "me", every_s=0.01):
        await asyncio.sleep(0.1)
    assert fake_runtime.calls.count("heartbeat") >= 2


async def test_a_runtime_that_died_can_be_let_go(fake_runtime):
    async with held(fake_runtime, "me", every_s=1):
        fake_runtime.live = None


async def test_closing_publishes_first_and_ends_then(fake_runtime):
    fake_runtime.start()
    await close_runtime.fn(fake_runtime, True)
    assert fake_runtime.calls == ["close snapshot=True", "end"]
