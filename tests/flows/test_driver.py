"""A driver is told by its text, and known to be gone only when that is certain."""

import socket

from flows.driver import Driver, owner_is_gone
from flows.processes import ProcessId

FLOW_RUN = "12345678-1234-1234-1234-123456789abc"


def driver(process: ProcessId) -> Driver:
    return Driver("train-run", FLOW_RUN, socket.gethostname(), process)


def test_a_driver_can_be_read_from_its_text():
    text = str(driver(ProcessId(pid=7, start_time=1717171717.25)))
    assert Driver.parse(text) == driver(ProcessId(pid=7, start_time=1717171717.25))
    assert "train-run" in text
    assert "pid 7" in text


def test_another_text_is_no_driver():
    assert Driver.parse("somebody") is None


async def test_a_dead_process_of_this_host_is_gone():
    assert await owner_is_gone(str(driver(ProcessId(pid=4_000_000, start_time=1.0))))


async def test_a_living_process_of_this_host_is_not():
    assert not await owner_is_gone(str(driver(ProcessId.of_this())))


async def test_a_driver_that_is_no_flow_run_may_live():
    assert not await owner_is_gone("somebody")
