"""What every environment keeps to, called directly, over HTTP or over Ray."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import uvicorn

from gpu_workers.environments.control_plane import ControlPlane
from gpu_workers.environments.episode_table import EpisodeTable
from gpu_workers.environments.http_control import EnvironmentConnection, HttpEnvironmentControl, HttpEpisodes
from gpu_workers.environments.http_server import build_app
from gpu_workers.environments.ports import CallRef, EnvironmentControl, EpisodeId, Episodes, EpisodeTask, Phase
from gpu_workers.environments.registry import find_environment
from storage.errors import DataFailure, EnvironmentRefusal, EnvironmentUnreachable, InfrastructureFailure

ONE = EpisodeId("e0-p1_g0", 0)
SUM = EpisodeTask("running_sum", '{"turns": 5}', 7, 0, 60.0)


@dataclass(frozen=True)
class World:
    episodes: Episodes
    control: EnvironmentControl


@pytest.fixture(scope="module")
def running_ray() -> Iterator[None]:
    """One Ray for all; each test has an actor of its own in it."""
    import ray

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


@pytest.fixture(params=["direct", "http", pytest.param("ray", marks=pytest.mark.system)])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    if request.param == "ray":
        request.getfixturevalue("running_ray")
        yield _over_ray()
        return
    table = EpisodeTable("games", find_environment)
    control = ControlPlane(table)
    if request.param == "direct":
        yield World(table, control)
        return
    server = uvicorn.Server(uvicorn.Config(build_app(control, table, "secret"), port=0, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 (uvicorn has no event for it)
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with EnvironmentConnection(f"http://127.0.0.1:{port}", "secret") as connection:
        yield World(HttpEpisodes(connection), HttpEnvironmentControl("games", connection))
    server.should_exit = True
    await serving


def _over_ray() -> World:
    from gpu_workers.environments.ray_control import RayEnvironmentControl, RayEpisodes, start_environment_actor

    actor = start_environment_actor("games", find_environment, max_concurrency=32)
    return World(RayEpisodes("games", actor), RayEnvironmentControl("games", actor))


def soon() -> float:
    return time.time() + 20


def call(turn: int, attempt: int = 0) -> CallRef:
    return CallRef(f"e0-p1_g0/a{attempt}/t{turn}", 3)


async def refused(awaitable: Any) -> str:
    with pytest.raises(EnvironmentRefusal) as caught:
        await awaitable
    return caught.value.code


async def test_a_completion_that_arrives_while_closed_waits_and_is_not_exported(world: World) -> None:
    await world.episodes.open(ONE, SUM)
    first = await world.episodes.step(ONE, 0, "1", call(0))
    assert (await world.control.prepare("c1", soon())).phase is Phase.PREPARED
    held = asyncio.create_task(world.episodes.step(ONE, 1, "2", call(1)))
    await asyncio.sleep(0.1)
    exported = await world.control.commit("c1", soon())
    assert not held.done()
    assert [(e.turn, e.calls, e.state_json) for e in exported.episodes] == [
        (1, (call(0).key,), first.record.state_json)
    ]
    assert await world.control.commit("c1", soon()) == exported
    assert (await world.control.resume("c1")).phase is Phase.IDLE
    assert (await held).turn == 2


async def test_a_restored_episode_goes_on_as_the_uninterrupted_one(world: World) -> None:
    await world.episodes.open(ONE, SUM)
    await world.episodes.step(ONE, 0, "1", call(0))
    await world.control.prepare("c1", soon())
    records = (await world.control.commit("c1", soon())).episodes
    await world.control.resume("c1")
    straight = [await world.episodes.step(ONE, turn, "4", call(turn)) for turn in range(1, 5)]
    await world.episodes.close(ONE)
    status = await world.control.restore("r1", soon(), records)
    assert (status.phase, status.episodes) == (Phase.RESTORED, 1)
    assert await world.control.restore("r1", soon(), records)
    again = EpisodeId(ONE.rollout_id, 1)
    assert await refused(world.episodes.open(again, SUM)) == "environment_closed"
    await world.control.resume("r1")
    assert await refused(world.episodes.open(again, replace(SUM, task_json="{}"))) == "invalid_checkpoint_state"
    assert (await world.episodes.open(again, SUM)).turn == 1
    for turn, expected in zip(range(1, 5), straight, strict=True):
        got = await world.episodes.step(again, turn, "4", call(turn))
        assert (got.observation, got.done, got.record.rewards, got.record.state_json, got.record.messages_json) == (
            expected.observation,
            expected.done,
            expected.record.rewards,
            expected.record.state_json,
            expected.record.messages_json,
        )
    assert got.done


async def test_an_episode_that_nobody_has_any_more_is_opened_from_its_last_boundary(world: World) -> None:
    await world.episodes.open(ONE, SUM)
    saved = (await world.episodes.step(ONE, 0, "1", call(0))).record
    straight = [await world.episodes.step(ONE, turn, "4", call(turn)) for turn in range(1, 5)]
    await world.control.retire([ONE])
    again, from_saved = EpisodeId(ONE.rollout_id, 1), replace(SUM, saved=saved)
    assert await refused(world.episodes.open(ONE, from_saved)) == "stale_attempt"
    assert await refused(world.episodes.open(again, replace(from_saved, seed=8))) == "invalid_checkpoint_state"
    assert await refused(world.episodes.step(again, 1, "4", call(1))) == "unknown_episode"
    assert (await world.episodes.open(again, from_saved)).turn == 1
    got = [await world.episodes.step(again, turn, "4", call(turn)) for turn in range(1, 5)]
    seen = [[(b.observation, b.done, b.record.rewards, b.record.state_json) for b in each] for each in (got, straight)]
    assert seen[0] == seen[1]
    assert (await world.episodes.open(again, from_saved)).turn == 5  # it is there now, and has got further


async def test_the_last_turn_taken_again_is_applied_once_and_another_one_is_refused(world: World) -> None:
    await world.episodes.open(ONE, SUM)
    first = await world.episodes.step(ONE, 0, "1", call(0))
    again = await world.episodes.step(ONE, 0, "1", call(0))
    assert (again.turn, again.observation, again.record.calls) == (1, first.observation, first.record.calls)
    assert await refused(world.episodes.step(ONE, 0, "2", call(0))) == "turn_conflict"
    assert await refused(world.episodes.step(ONE, 4, "2", call(4))) == "turn_conflict"
    assert await refused(world.episodes.step(EpisodeId("e0-p9_g0", 0), 0, "2", call(0))) == "unknown_episode"


async def test_checkpoint_ids_are_taken_once_and_one_at_a_time(world: World) -> None:
    await world.control.prepare("c1", soon())
    assert (await world.control.prepare("c1", soon())).phase is Phase.PREPARED
    assert await refused(world.control.prepare("c2", soon())) == "checkpoint_conflict"
    assert await refused(world.control.restore("c1", soon(), ())) == "invalid_phase"
    await world.control.resume("c1")
    await world.control.resume("c1")
    assert await refused(world.control.prepare("c1", soon())) == "stale_checkpoint"
    assert await refused(world.control.renew("c1", soon())) == "stale_checkpoint"
    assert await refused(world.control.commit("c2", soon())) == "invalid_phase"
    assert await refused(world.control.prepare("c3", time.time() - 1)) == "deadline_exceeded"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"state_json": "{}"}, "invalid_checkpoint_state"),
        ({"task_json": "{}"}, "invalid_checkpoint_state"),
        ({"version": 9}, "invalid_checkpoint_state"),
        ({"environment": "nowhere"}, "invalid_checkpoint_state"),
        ({"messages_json": "[1]"}, "invalid_checkpoint_state"),
        ({"rollout_id": "e0-p8_g0"}, "stale_attempt"),
    ],
)
async def test_a_restore_takes_all_episodes_or_none(world: World, change: dict[str, Any], code: str) -> None:
    record = (await world.episodes.open(ONE, SUM)).record
    assert await refused(world.control.restore("r0", soon(), [record])) == "invalid_phase"
    await world.episodes.close(ONE)
    await world.control.retire([EpisodeId("e0-p8_g0", 1)])
    other = replace(record, rollout_id="e0-p2_g0")
    assert await refused(world.control.restore("r1", soon(), [other, replace(record, **change)])) == code
    status = await world.control.status()
    assert (status.phase, status.episodes) == (Phase.IDLE, 0)


async def test_a_discarded_restore_retires_the_next_attempt(world: World) -> None:
    record = (await world.episodes.open(ONE, SUM)).record
    await world.episodes.close(ONE)
    await world.control.restore("r1", soon(), [record])
    status = await world.control.discard_restored("r1")
    assert (status.phase, status.episodes) == (Phase.IDLE, 0)
    assert await refused(world.episodes.open(EpisodeId(ONE.rollout_id, 1), SUM)) == "stale_attempt"
    assert (await world.episodes.open(EpisodeId(ONE.rollout_id, 2), SUM)).turn == 0


async def test_retired_attempts_are_refused_until_they_are_forgotten(world: World) -> None:
    await world.episodes.open(ONE, SUM)
    await world.control.prepare("c1", soon())
    held = asyncio.create_task(world.episodes.step(ONE, 0, "2", call(0)))
    await asyncio.sleep(0.05)
    await world.control.retire([ONE])
    assert await refused(held) == "stale_attempt"
    await world.control.resume("c1")
    assert await refused(world.episodes.open(ONE, SUM)) == "stale_attempt"
    await world.control.forget([ONE.rollout_id])
    assert (await world.episodes.open(ONE, SUM)).turn == 0


async def test_refusals_of_a_new_episode_name_what_is_wrong(world: World) -> None:
    assert await refused(world.episodes.open(EpisodeId("nameless", 0), SUM)) == "rollout_id_required"
    assert await refused(world.episodes.open(ONE, replace(SUM, environment="nowhere"))) == "unknown_environment"
    with pytest.raises(DataFailure, match="running_sum.*e0-p1_g0-a0.*reset"):
        await world.episodes.open(ONE, replace(SUM, task_json='{"turns": 99}'))


@pytest.mark.system
async def test_an_actor_killed_in_mid_episode_is_unreachable_and_another_goes_on_with_its_episodes(
    running_ray: None,
) -> None:
    from gpu_workers.environments.ray_control import RayEnvironmentControl, RayEpisodes, start_environment_actor

    actors = [start_environment_actor("games", find_environment, max_concurrency=32) for _ in range(2)]
    first, second = (World(RayEpisodes("games", a), RayEnvironmentControl("games", a)) for a in actors)
    await first.episodes.open(ONE, SUM)
    await first.episodes.step(ONE, 0, "1", call(0))
    await first.control.prepare("c1", soon())
    (record,) = (await first.control.commit("c1", soon())).episodes
    held = asyncio.create_task(first.episodes.step(ONE, 1, "2", call(1)))
    os.kill(await actors[0].pid.remote(), signal.SIGKILL)
    with pytest.raises(InfrastructureFailure):
        await held
    with pytest.raises(EnvironmentUnreachable):
        await first.control.prepare("c2", soon())
    await second.control.restore("r1", soon(), [record])
    await second.control.resume("r1")
    again = EpisodeId(ONE.rollout_id, 1)
    assert (await second.episodes.open(again, SUM)).turn == 1
    assert (await second.episodes.step(again, 1, "2", call(1))).turn == 2
