"""Time, threads and leases of an episode table, with a clock of the test."""

import asyncio
import threading
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_workers.controller.signal import Signal
from gpu_workers.environments.control_plane import ControlPlane
from gpu_workers.environments.episode_records import generation_index_of
from gpu_workers.environments.episode_table import EpisodeTable
from gpu_workers.environments.interface import Environment, Json, Mode, Step
from gpu_workers.environments.ports import CallRef, EpisodeId, EpisodeTask, Phase
from gpu_workers.environments.registry import find_environment
from storage.errors import DataFailure, EnvironmentRefusal, InfrastructureFailure

ONE = EpisodeId("e0-p1_g2", 0)


class Clock:
    """Moves when told to; sleepers wake up then."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._moved = Signal()

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        end = self.now + seconds
        await self._moved.wait_for(lambda: self.now >= end)

    async def move(self, seconds: float) -> None:
        self.now += seconds
        self._moved.notify()
        for _ in range(10):
            await asyncio.sleep(0)


class Counter(Environment):
    """Counts its turns, in its state and outside of it."""

    name: ClassVar[str] = "counter"
    log: ClassVar[list[str]] = []

    def reset(self, task: Json, rng: np.random.Generator) -> Step:
        return Step({"count": 0}, "go")

    def step(self, state: Json, action: str, rng: np.random.Generator) -> Step:
        if action == "break":
            raise ZeroDivisionError("by zero")
        self.log.append(action)
        return Step({"count": state["count"] + 1, "drawn": int(rng.integers(1000))}, "on", reward=1.0)


class Slow(Counter):
    """A turn takes until `go` is set."""

    name: ClassVar[str] = "slow"
    blocking: ClassVar[bool] = True
    go: ClassVar[threading.Event] = threading.Event()

    def step(self, state: Json, action: str, rng: np.random.Generator) -> Step:
        assert self.go.wait(10)
        return super().step(state, action, rng)


class SlowToOpen(Slow):
    """A reset takes until `go` is set."""

    name: ClassVar[str] = "slow_to_open"

    def reset(self, task: Json, rng: np.random.Generator) -> Step:
        assert self.go.wait(10)
        return super().reset(task, rng)


class Foreign(Counter):
    """Can't come back."""

    name: ClassVar[str] = "foreign"
    mode: ClassVar[Mode] = Mode.RESTART_ONLY


GAMES = {kind.name: kind for kind in (Counter, Slow, SlowToOpen, Foreign)}


class Instance:
    def __init__(self) -> None:
        Counter.log.clear()
        Slow.go.clear()
        self.clock = Clock()
        self.table = EpisodeTable("games", lambda name: GAMES[name](), self.clock)
        self.control = ControlPlane(self.table, grace_s=5, clock=self.clock, sleep=self.clock.sleep)

    async def open(self, environment: str, deadline_s: float = 60.0) -> None:
        await self.table.open(ONE, EpisodeTask(environment, "{}", 3, 2, deadline_s))


@pytest.fixture
def instance() -> Instance:
    return Instance()


def call(turn: int) -> CallRef:
    return CallRef(f"k{turn}", 1)


async def test_a_lease_renewed_during_a_slow_save_holds_and_its_end_reopens(instance: Instance) -> None:
    await instance.control.prepare("c1", 1010)
    await instance.clock.move(14)
    await instance.control.renew("c1", 1030)
    await instance.clock.move(20)
    assert (await instance.control.status()).phase is Phase.PREPARED
    await instance.clock.move(1.5)
    assert (await instance.control.status()).phase is Phase.IDLE
    with pytest.raises(EnvironmentRefusal, match="stale_checkpoint"):
        await instance.control.commit("c1", 1090)


async def test_the_lease_of_a_finished_checkpoint_does_not_end_the_next_one(instance: Instance) -> None:
    await instance.control.prepare("c1", 1010)
    await instance.control.resume("c1")
    await instance.control.prepare("c2", 1100)
    await instance.clock.move(50)
    assert (await instance.control.status()).checkpoint_id == "c2"
    await instance.control.resume("c2")


async def test_prepare_waits_for_a_turn_that_has_begun_or_opens_again(instance: Instance) -> None:
    await instance.open("slow")
    stepping = asyncio.create_task(instance.table.step(ONE, 0, "a", call(0)))
    await asyncio.sleep(0)
    preparing = asyncio.create_task(instance.control.prepare("c1", 1010))
    await asyncio.sleep(0.02)
    assert (await instance.control.status()).phase is Phase.PREPARING
    await instance.clock.move(11)
    with pytest.raises(EnvironmentRefusal) as caught:
        await preparing
    assert (caught.value.code, caught.value.retryable, instance.table.is_closed) == ("deadline_exceeded", True, False)
    preparing = asyncio.create_task(instance.control.prepare("c2", 1050))
    Slow.go.set()
    assert (await preparing).phase is Phase.PREPARED
    assert (await stepping).turn == 1
    await instance.control.resume("c2")


async def test_prepare_waits_for_an_episode_that_is_being_opened_and_its_export_has_it(instance: Instance) -> None:
    opening = asyncio.create_task(instance.open("slow_to_open"))
    await asyncio.sleep(0)
    preparing = asyncio.create_task(instance.control.prepare("c1", 1010))
    await asyncio.sleep(0.02)
    assert not preparing.done()
    Slow.go.set()
    await asyncio.gather(opening, preparing)
    exported = await instance.control.commit("c1", 1010)
    assert [episode.turn for episode in exported.episodes] == [0]
    await instance.control.resume("c1")


async def test_a_step_sent_twice_while_it_runs_is_applied_once(instance: Instance) -> None:
    await instance.open("slow")
    lost = asyncio.create_task(instance.table.step(ONE, 0, "a", call(0)))
    await asyncio.sleep(0.01)
    lost.cancel()
    again = asyncio.create_task(instance.table.step(ONE, 0, "a", call(0)))
    await asyncio.sleep(0.01)
    Slow.go.set()
    assert (await again).record.calls == ("k0",)
    assert Counter.log == ["a"]


async def test_a_running_step_of_a_retired_attempt_ends(instance: Instance) -> None:
    await instance.open("slow")
    stepping = asyncio.create_task(instance.table.step(ONE, 0, "a", call(0)))
    await asyncio.sleep(0.01)
    await instance.control.retire([ONE])
    with pytest.raises(EnvironmentRefusal, match="stale_attempt"):
        await stepping
    Slow.go.set()
    await asyncio.sleep(0.05)
    assert len(instance.table) == 0


async def test_deadlines_stand_still_while_closed(instance: Instance) -> None:
    await instance.open("counter", deadline_s=10)
    await instance.clock.move(4)
    await instance.control.prepare("c1", 2000)
    await instance.clock.move(500)
    record = (await instance.control.commit("c1", 2000)).episodes[0]
    assert (record.deadline_left_s, record.parked_s) == (6, 500)
    await instance.control.resume("c1")
    assert instance.table.deadline_left_s(ONE) == 6
    await instance.table.step(ONE, 0, "a", call(0))
    await instance.clock.move(7)
    with pytest.raises(InfrastructureFailure, match="e0-p1_g2-a0 is 1.000 s past its deadline"):
        await instance.table.step(ONE, 1, "a", call(1))


async def test_a_model_call_is_bounded_by_the_time_the_table_is_open() -> None:
    table = EpisodeTable("games", lambda name: GAMES[name]())
    await table.open(ONE, EpisodeTask("counter", "{}", 3, 2, 0.15))
    table.hold()
    async with table.deadline(ONE):
        await asyncio.sleep(0.3)
        table.release()
    with pytest.raises(TimeoutError):
        async with table.deadline(ONE):
            await asyncio.sleep(5)


async def test_what_cannot_come_back_is_listed_and_not_exported(instance: Instance) -> None:
    await instance.open("foreign")
    await instance.table.step(ONE, 0, "a", call(0))
    await instance.control.prepare("c1", 1010)
    exported = await instance.control.commit("c1", 1010)
    assert (exported.episodes, exported.restarts) == ((), (ONE,))
    await instance.control.resume("c1")


async def test_a_failing_environment_is_named_with_its_episode_and_turn(instance: Instance) -> None:
    await instance.open("counter")
    with pytest.raises(DataFailure, match="'counter', episode e0-p1_g2-a0, turn 0 failed with ZeroDivisionError"):
        await instance.table.step(ONE, 0, "break", call(0))


@given(st.sampled_from(["guess15x4", "running_sum", "counter"]), st.data(), st.integers(0, 99))
def test_kills_at_any_turn_leave_no_trace_in_an_episode(game: str, data: st.DataObject, seed: int) -> None:
    actions = data.draw(st.lists(st.sampled_from("abcd0123456789"), min_size=5, max_size=5))
    kills = data.draw(st.sets(st.integers(0, 4)))
    assert asyncio.run(_play(game, seed, actions, kills)) == asyncio.run(_play(game, seed, actions, set()))


async def _play(game: str, seed: int, actions: list[str], kills: set[int]) -> list[object]:
    seen: list[object] = []
    table, episode = _new_table(), ONE
    boundary = await table.open(episode, EpisodeTask(game, "{}", seed, 2, 60.0))
    for turn, action in enumerate(actions):
        if turn in kills:
            records, _ = table.export()
            table = _new_table()
            (episode,) = table.adopt(records)
            boundary = await table.open(episode, EpisodeTask(game, "{}", seed, 2, 60.0))
        record = boundary.record
        seen.append((boundary.observation, boundary.done, record.state_json, record.rewards, record.messages_json))
        if boundary.done:
            break
        boundary = await table.step(episode, turn, action, call(turn))
    return seen


def _new_table() -> EpisodeTable:
    return EpisodeTable("games", lambda name: Counter() if name == "counter" else find_environment(name))


@pytest.mark.parametrize("rollout", ["", "e0-p1", "_g1", "e0-p1_g", "e0-p1_g01", "e0-p1_g-1", "e0-p1_g1 "])
def test_a_rollout_id_without_an_index_is_refused(rollout: str) -> None:
    with pytest.raises(EnvironmentRefusal, match="rollout_id_required"):
        generation_index_of(rollout)


def test_the_index_of_a_rollout_is_read_from_its_id() -> None:
    assert generation_index_of("e0-p1_g12") == 12
