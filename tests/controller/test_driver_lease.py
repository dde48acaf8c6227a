"""Who drives a run: one at a time, refused by name once another has taken over."""

import asyncio

import pytest

from gpu_workers.controller.driver_lease import DriverLease
from storage.errors import Fenced, RunAlreadyLive

LEASE_S = 60.0


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lease(clock: Clock) -> DriverLease:
    """Of a run that `first` drives."""
    lease = DriverLease("demo", "inc-1", lease_s=LEASE_S, clock=clock)
    lease.attach("first")
    return lease


def test_a_second_driver_is_refused_by_the_name_of_the_first(lease):
    with pytest.raises(RunAlreadyLive, match=r"run 'demo' is driven by first \(incarnation inc-1\).*--take-over"):
        lease.attach("second")
    assert lease.driver == "first"
    lease.attach("first")


def test_a_driver_that_is_heard_keeps_its_lease(lease, clock):
    for _ in range(5):
        clock.now += 0.9 * LEASE_S
        lease.hear("first")
    assert lease.driver == "first"


def test_after_a_lease_of_silence_another_may_attach_and_the_silent_one_is_refused(lease, clock):
    clock.now += LEASE_S
    assert lease.driver is None
    lease.attach("second")
    with pytest.raises(RunAlreadyLive, match="driven by second, no longer by first"):
        lease.hear("first")


def test_a_silent_driver_that_nobody_replaced_goes_on(lease, clock):
    clock.now += 10 * LEASE_S
    lease.hear("first")
    assert lease.driver == "first"


def test_a_driver_that_took_over_is_obeyed_and_the_other_no_more(lease):
    lease.attach("second", take_over=True)
    lease.hear("second")
    with pytest.raises(RunAlreadyLive, match="driven by second, no longer by first"):
        lease.hear("first")
    lease.detach("first")
    assert lease.driver == "second"


def test_a_driver_that_left_is_obeyed_no_more(lease):
    lease.detach("first")
    assert lease.driver is None
    with pytest.raises(RunAlreadyLive, match="has no driver, no longer by first"):
        lease.hear("first")


async def test_a_driver_that_waits_hears_at_once_that_it_was_replaced(lease):
    waiting = asyncio.create_task(lease.lost("first"))
    await asyncio.sleep(0)
    lease.attach("first")
    lease.detach("first")
    lease.attach("first")
    await asyncio.sleep(0)
    lease.attach("second", take_over=True)
    assert "driven by second" in str(await waiting)


async def test_a_run_that_is_over_tells_everybody_why(lease):
    waiting = asyncio.create_task(lease.lost("first"))
    await asyncio.sleep(0)
    fenced = Fenced("taken over by inc-2")
    lease.end(fenced)
    assert await waiting is fenced
    assert await lease.lost("second") is fenced
    with pytest.raises(Fenced, match="inc-2"):
        lease.hear("first")
