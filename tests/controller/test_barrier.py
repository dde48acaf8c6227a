"""The data-plane barrier, by itself and under a running controller."""

import asyncio

import pytest

from gpu_workers.controller.barrier import DataPlaneBarrier
from storage.errors import BrokenInvariant


class Journal:
    """Tasks that enter the barrier and stay until they are told to leave; `lines` says who is in, in order."""

    def __init__(self) -> None:
        self.barrier = DataPlaneBarrier()
        self.lines: list[str] = []
        self.leave: dict[str, asyncio.Event] = {}
        self.tasks: list[asyncio.Task[None]] = []

    async def enter(self, name: str, *, cut: bool = False) -> None:
        """Start a task that asks to enter; returns after it had every chance to."""
        self.leave[name] = asyncio.Event()
        self.tasks.append(asyncio.create_task(self._stay(name, cut)))
        await self.turns()

    async def _stay(self, name: str, cut: bool) -> None:
        section = self.barrier.cut(name) if cut else self.barrier.mutation(name)
        async with section:
            self.lines.append(f"{name} in")
            await self.leave[name].wait()
        self.lines.append(f"{name} out")

    async def let_go(self, name: str) -> None:
        """Let one leave; returns after everyone had a chance to move."""
        self.leave[name].set()
        await self.turns()

    async def turns(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)


async def test_scenario_18_the_version_rises_once_per_outer_section_also_of_a_failed_one():
    barrier = DataPlaneBarrier()
    async with barrier.mutation("outer") as outer, barrier.mutation("inner") as inner:
        assert inner is outer
        assert barrier.mutation_version == 0
    assert barrier.mutation_version == 1
    with pytest.raises(ValueError, match="inside"):
        async with barrier.mutation("fails"):
            raise ValueError("inside")
    assert barrier.mutation_version == 2
    async with barrier.cut():
        pass
    assert barrier.mutation_version == 2


async def test_scenario_19_mutations_overlap():
    journal = Journal()
    await journal.enter("one")
    await journal.enter("other")
    assert journal.lines == ["one in", "other in"]
    await journal.let_go("one")
    await journal.let_go("other")


async def test_scenario_20_a_cut_waits_for_active_mutations_and_blocks_new_ones():
    journal = Journal()
    await journal.enter("active")
    await journal.enter("cut", cut=True)
    await journal.enter("late")
    assert journal.lines == ["active in"]
    await journal.let_go("active")
    assert journal.lines == ["active in", "active out", "cut in"]
    await journal.let_go("cut")
    assert journal.lines[3:] == ["cut out", "late in"]
    await journal.let_go("late")


async def test_a_cut_that_is_cancelled_while_it_waits_lets_mutations_go_on():
    journal = Journal()
    await journal.enter("active")
    await journal.enter("cut", cut=True)
    await journal.enter("late")
    journal.tasks[1].cancel()
    await journal.turns()
    assert journal.lines == ["active in", "late in"]
    await journal.let_go("active")
    await journal.let_go("late")


async def test_scenario_21_a_nested_mutation_behind_a_waiting_cut_does_not_deadlock():
    barrier = DataPlaneBarrier()
    async with barrier.mutation("outer"):
        cut = asyncio.create_task(_pass_through_a_cut(barrier))
        await asyncio.sleep(0)
        async with asyncio.timeout(5), barrier.mutation("nested"):
            assert not cut.done()
    await cut


async def _pass_through_a_cut(barrier: DataPlaneBarrier) -> None:
    async with barrier.cut():
        pass


async def test_scenario_22_two_cuts_serialize():
    journal = Journal()
    await journal.enter("first", cut=True)
    await journal.enter("second", cut=True)
    assert journal.lines == ["first in"]
    await journal.let_go("first")
    assert journal.lines == ["first in", "first out", "second in"]
    await journal.let_go("second")


async def test_scenario_23_waits_are_reported_per_kind():
    journal = Journal()
    await journal.enter("cut", cut=True)
    await journal.enter("seal")
    await journal.enter("admit")
    await journal.let_go("cut")
    await journal.let_go("seal")
    await journal.let_go("admit")
    waits = journal.barrier.waits
    assert {kind: waits[kind].count for kind in waits} == {"cut": 1, "seal": 1, "admit": 1}
    assert waits["seal"].max_s > 0
    assert waits["seal"].total_s >= waits["admit"].total_s > waits["cut"].total_s


async def test_sections_that_would_deadlock_their_own_task_are_refused():
    barrier = DataPlaneBarrier()
    async with barrier.cut():
        with pytest.raises(BrokenInvariant, match="mutation 'seal' inside a cut"):
            async with barrier.mutation("seal"):
                pass
        with pytest.raises(BrokenInvariant, match="cut 'again' inside another barrier section"):
            async with barrier.cut("again"):
                pass
    async with barrier.mutation("seal"):
        with pytest.raises(BrokenInvariant, match="cut 'now' inside another barrier section"):
            async with barrier.cut("now"):
                pass


async def test_a_capability_is_dead_after_its_section():
    barrier = DataPlaneBarrier()
    async with barrier.mutation("seal") as mutation:
        mutation.require_live()
    with pytest.raises(BrokenInvariant, match="Mutation 'seal' is used after its barrier section ended"):
        mutation.require_live()


async def test_scenario_24_clearing_consumed_rows_waits_for_a_capture_and_does_not_block_the_loop(make_world):
    world = make_world()
    controller = await world.start()
    parts = controller.parts
    world.trainer.finish_gate = asyncio.Event()
    step = asyncio.create_task(controller.train_steps(1, 1))
    await world.settle(lambda: world.trainer.waiting_at == "finish")
    async with parts.barrier.cut("capture") as cut:
        world.trainer.finish_gate.set()
        turns = 0
        while not world.trainer.trained or turns < 50:
            await asyncio.sleep(0)
            turns += 1
        assert len(parts.buffer.claimed()) == 4
        claimed = {row for group in parts.buffer.claimed() for row in group.row_ids}
        assert claimed <= parts.rows.capture(cut).keys()
        assert parts.state.train_steps == 0
    await step
    assert parts.state.train_steps == 1
    assert not claimed & {row for group in parts.buffer.ready() for row in group.row_ids}
    assert parts.barrier.waits["commit_step"].max_s > 0
    world.check()
    await world.kill()


async def test_scenario_25_rows_and_index_of_a_published_group_appear_together(make_world):
    world = make_world()
    world.boot()
    parts = world.controller.parts
    seen = []

    async def watch() -> None:
        while not seen or seen[-1] < 8:
            async with parts.barrier.cut("watch") as cut:
                rows = parts.rows.capture(cut)
                groups = parts.buffer.capture(cut)
                owed = {g.group_id for g in parts.ledger.capture(cut)}
                seen.append(len(groups))
                assert all(row in rows for group in groups for row in group.row_ids)
                assert not owed & {group.group_id for group in groups}
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    await world.restore(world.plan())
    await watching
    assert {0, 8} <= set(seen)
    await world.kill()
