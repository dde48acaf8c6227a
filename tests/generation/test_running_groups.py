"""Running model calls of groups: results one by one, abort, clean-up."""

import asyncio

import pytest

from gpu_workers.generation.running_groups import RunningGroups


@pytest.fixture
def groups() -> RunningGroups[int, str]:
    """Aborted calls count as 'aborted <key>'."""
    return RunningGroups(lambda group_id, key: f"{group_id} aborted {key}")


class Gates:
    """Calls that end when their gate is opened."""

    def __init__(self) -> None:
        self.open = {key: asyncio.Event() for key in range(3)}
        self.ended: list[int] = []

    async def call(self, key: int) -> str:
        try:
            await self.open[key].wait()
            return f"result {key}"
        finally:
            self.ended.append(key)


async def test_results_come_in_the_order_in_which_calls_finish(groups: RunningGroups[int, str]):
    gates = Gates()
    run = groups.run("g", {key: gates.call(key) for key in range(3)})
    seen = []
    for key in (2, 0, 1):
        gates.open[key].set()
        seen.append(await anext(run))
    assert seen == ["result 2", "result 0", "result 1"]
    with pytest.raises(StopAsyncIteration):
        await anext(run)


async def test_a_finished_call_is_yielded_while_its_siblings_still_run(groups: RunningGroups[int, str]):
    gates = Gates()
    run = groups.run("g", {key: gates.call(key) for key in range(3)})
    gates.open[1].set()
    assert await asyncio.wait_for(anext(run), 1) == "result 1"
    assert gates.ended == [1]
    await run.aclose()


async def test_abort_ends_running_calls_and_keeps_finished_ones(groups: RunningGroups[int, str]):
    gates = Gates()
    run = groups.run("g", {key: gates.call(key) for key in range(3)})
    gates.open[0].set()
    first = await anext(run)
    groups.abort("g")
    assert [first, *sorted([result async for result in run])] == ["result 0", "g aborted 1", "g aborted 2"]


async def test_abort_leaves_other_groups_alone_and_ignores_unknown_ones(groups: RunningGroups[int, str]):
    gates = Gates()
    run = groups.run("mine", {0: gates.call(0)})
    waiting = asyncio.create_task(anext(run))
    await asyncio.sleep(0)
    groups.abort("yours")
    gates.open[0].set()
    assert await waiting == "result 0"


async def test_the_first_exception_ends_the_other_calls(groups: RunningGroups[int, str]):
    gates = Gates()

    async def fails() -> str:
        raise ConnectionError("engine is gone")

    run = groups.run("g", {0: gates.call(0), 1: fails()})
    with pytest.raises(ConnectionError):
        await anext(run)
    assert gates.ended == [0]


async def test_leaving_early_ends_the_calls(groups: RunningGroups[int, str]):
    gates = Gates()
    run = groups.run("g", {key: gates.call(key) for key in range(3)})
    gates.open[0].set()
    await anext(run)
    await run.aclose()
    assert sorted(gates.ended) == [0, 1, 2]


async def test_an_aborted_group_can_run_again_before_the_first_run_is_read(groups: RunningGroups[int, str]):
    gates = Gates()
    old = groups.run("g", {0: gates.call(0)})
    reading = asyncio.create_task(anext(old))
    await asyncio.sleep(0)
    groups.abort("g")
    new = groups.run("g", {1: gates.call(1)})
    gates.open[1].set()
    assert await anext(new) == "result 1"
    assert await reading == "g aborted 0"
