"""Running model calls: collected as they finish, aborted by group, abandoned by ticket."""

import asyncio

import pytest

from gpu_workers.generation.running_calls import Finished, RunningCalls


class Gates:
    """Calls that end when their gate is opened."""

    def __init__(self) -> None:
        self.open = {key: asyncio.Event() for key in range(3)}

    async def call(self, key: int) -> str:
        await self.open[key].wait()
        return f"result {key}"


@pytest.fixture
def calls() -> RunningCalls[int, str]:
    """An aborted call counts as '<group> aborted <key>'; reader 1 is open."""
    calls: RunningCalls[int, str] = RunningCalls(lambda group_id, key: f"{group_id} aborted {key}")
    assert calls.open_reader() == 1
    return calls


@pytest.fixture
def gates() -> Gates:
    return Gates()


async def test_a_finished_call_is_there_while_its_siblings_still_run(calls: RunningCalls[int, str], gates: Gates):
    calls.start(7, "g", {key: gates.call(key) for key in range(3)})
    gates.open[1].set()
    assert await asyncio.wait_for(calls.take(1), 1) == [Finished(7, "result 1")]


async def test_what_finished_meanwhile_is_taken_together_in_order(calls: RunningCalls[int, str], gates: Gates):
    calls.start(7, "g", {0: gates.call(0), 1: gates.call(1)})
    calls.start(8, "h", {2: gates.call(2)})
    for key in (2, 0, 1):
        gates.open[key].set()
        await asyncio.sleep(0.01)
    assert await calls.take(1) == [Finished(8, "result 2"), Finished(7, "result 0"), Finished(7, "result 1")]


async def test_nothing_is_taken_twice(calls: RunningCalls[int, str], gates: Gates):
    calls.start(7, "g", {0: gates.call(0)})
    gates.open[0].set()
    await calls.take(1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(calls.take(1), 0.02)


async def test_abort_ends_the_groups_calls_and_no_others(calls: RunningCalls[int, str], gates: Gates):
    calls.start(7, "g", {0: gates.call(0), 1: gates.call(1)})
    calls.start(8, "h", {2: gates.call(2)})
    calls.abort("unknown")
    calls.abort("g")
    assert await calls.take(1) == [Finished(7, "g aborted 0"), Finished(7, "g aborted 1")]
    gates.open[2].set()
    assert await calls.take(1) == [Finished(8, "result 2")]


async def test_an_aborted_group_runs_again_under_another_ticket(calls: RunningCalls[int, str], gates: Gates):
    calls.start(7, "g", {0: gates.call(0)})
    calls.abort("g")
    calls.start(8, "g", {0: gates.call(0)})
    gates.open[0].set()
    assert await calls.take(1) == [Finished(7, "g aborted 0"), Finished(8, "result 0")]


async def test_abandoning_a_ticket_leaves_the_groups_other_calls_running(calls: RunningCalls[int, str], gates: Gates):
    calls.start(7, "g", {0: gates.call(0)})
    calls.start(8, "g", {1: gates.call(1)})
    calls.abandon(7)
    assert await calls.take(1) == [Finished(7, "g aborted 0")]
    gates.open[1].set()
    assert await calls.take(1) == [Finished(8, "result 1")]


async def test_an_exception_finishes_a_call_too(calls: RunningCalls[int, str]):
    async def fails() -> str:
        raise ConnectionError("engine is gone")

    calls.start(7, "g", {0: fails()})
    (finished,) = await calls.take(1)
    assert isinstance(finished.result, ConnectionError)


async def test_a_new_reader_takes_over(calls: RunningCalls[int, str], gates: Gates):
    calls.start(7, "g", {0: gates.call(0)})
    waiting = asyncio.create_task(calls.take(1))
    await asyncio.sleep(0)
    second = calls.open_reader()
    assert await asyncio.wait_for(waiting, 1) is None
    gates.open[0].set()
    assert await calls.take(second) == [Finished(7, "result 0")]
    assert await calls.take(1) is None
