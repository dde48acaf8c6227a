"""Episodes held by real HTTP servers, which outlive a controller or die under it."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from flows.processes import free_port
from gpu_workers.environments.environment_task import EnvironmentTask
from gpu_workers.environments.http_messages import TOKEN_VARIABLE
from gpu_workers.environments.served import ServedEpisodes, control_of, served_instances
from storage.errors import ConfigurationError, InfrastructureFailure
from storage.run_config import DataConfig
from tests.controller.playing import Player, all_wait, begun, stand_at

TOKEN = "a-token-of-the-test"

# A kill cancels requests; anyio loses a connection whose request is cancelled at the moment it is connected. Its loop
# holds it until that is closed, and the garbage collector finds it in whatever test comes then.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed transport:ResourceWarning")


@pytest.fixture(scope="module", autouse=True)
def lost_connections() -> Iterator[None]:
    """Those that the tests of this module lose are collected with it."""
    yield
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "unclosed transport", ResourceWarning)
        gc.collect()


class Server:
    """`python -m gpu_workers.environments.http_server`, which can be killed and started again on its port."""

    def __init__(self, instance: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._instance = instance
        self.start()

    def start(self) -> None:
        program = ["-m", "gpu_workers.environments.http_server", "--port", str(self.port), "--instance", self._instance]
        self.process = subprocess.Popen([sys.executable, *program], env=os.environ | {TOKEN_VARIABLE: TOKEN})
        deadline = time.monotonic() + 30
        while True:
            try:
                served_instances([self.url])
                return
            except ConfigurationError:
                assert time.monotonic() < deadline
                time.sleep(0.05)

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Server]]:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    started = [Server("games-0"), Server("games-1")]
    yield started
    for server in started:
        server.kill()


@pytest.fixture
async def served(make_world: Callable[..., Any], servers: list[Server]) -> AsyncIterator[Callable[..., Any]]:
    """Worlds whose rollouts are episodes of `running_sum` on the servers."""
    players: list[Player] = []
    clients: list[Any] = []

    def make(**sections: Any) -> Any:
        task = EnvironmentTask(DataConfig(task="running_sum?turns=4", num_prompts=40))
        world = make_world(dataset=task, **{"rollout_recovery": {"target_level": "turn"}, **sections})
        new_fake = world.new_generator
        found = served_instances([server.url for server in servers])

        def new_player() -> Player:
            holders = {instance.name: ServedEpisodes(instance, deadline_s=30) for instance in found}
            controls = [control_of(instance) for instance in found]
            clients.extend([*holders.values(), *controls])
            players.append(Player(new_fake(), world.config, task, holders, controls))
            return players[-1]

        world.new_generator = new_player
        return world

    yield make
    playing = [task for player in players for task in player.playing]
    for task in playing:
        task.cancel()
    await asyncio.gather(*playing, return_exceptions=True)
    for client in clients:
        await client.aclose()


def trained_rows(world: Any) -> dict[int, str]:
    return {step: event["rollouts_sha256"] for step, event in world.committed().items()}


async def uninterrupted(world: Any) -> dict[int, str]:
    await world.start()
    await world.train(1, 2)
    await world.kill()
    return trained_rows(world)


async def test_servers_that_outlive_the_controller_go_on_from_the_snapshot_and_forget_what_came_after(served):
    expected = await uninterrupted(served())
    world = served()
    await begun(world)
    bundle = await world.snapshot(1)
    assert {episode.instance for episode in bundle.state.episodes} == {"games-0", "games-1"}
    stand_at(world, 3)
    world.generator.calls.let_pass()
    await world.settle(lambda: all_wait(world, 3))  # a turn more, which no snapshot has
    await world.kill()
    await world.start()
    await world.train(1, 2)
    assert trained_rows(world) == expected
    resumed = world.trace.of("attempt_resumed")
    assert {(event["turns"], event["attempt"], event["environment_attempt"]) for event in resumed} == {(2, 0, 1)}
    assert len(resumed) == len(bundle.state.episodes)
    assert not world.audit().problems


async def test_servers_killed_with_the_controller_are_given_their_episodes_again(served, servers):
    expected = await uninterrupted(served())
    world = served()
    await begun(world)
    bundle = await world.snapshot(1)
    await world.kill()
    for server in servers:
        server.kill()
        server.start()
    await world.start()
    await world.train(1, 2)
    assert trained_rows(world) == expected
    assert len(world.trace.of("attempt_resumed")) == len(bundle.state.episodes)


async def test_a_server_killed_under_a_run_costs_the_attempts_that_it_held_and_nothing_else(served, servers):
    expected = await uninterrupted(served())
    world = served(async_rl={"max_infrastructure_failures": 20, "retry_backoff_s": 0.05, "retry_backoff_max_s": 0.2})
    await begun(world)
    servers[0].kill()
    without = await world.snapshot(1)
    assert {episode.instance for episode in without.state.episodes} == {"games-1"}
    (gone,) = world.trace.of("environment_unreachable")
    assert gone["instance"] == "games-0"
    servers[0].start()
    world.generator.calls.release()
    await world.train(1, 2)
    assert trained_rows(world) == expected
    lost = world.trace.of("attempt_abandoned")
    assert {int(event["rollout_id"].split("_")[0].rpartition("-p")[2]) % 2 for event in lost} == {0}
    assert (await world.snapshot(2, force=True)).state is not None


async def test_at_level_prefix_a_server_that_stays_away_for_a_while_costs_no_finished_turn(served, servers):
    sections = {"rollout_recovery": {"target_level": "prefix"}}
    expected = await uninterrupted(served(**sections))
    world = served(
        **sections, async_rl={"max_infrastructure_failures": 40, "retry_backoff_s": 0.05, "retry_backoff_max_s": 0.5}
    )
    await begun(world)
    servers[0].kill()
    without = await world.snapshot(1)
    assert {episode.turn for episode in without.state.episodes} == {2}
    assert {episode.instance for episode in without.state.episodes} == {"games-0", "games-1"}
    world.generator.calls.release()
    failed: Counter[str] = Counter()
    while max(failed.values(), default=0) < 3:
        await asyncio.sleep(0.01)
        ends = (*world.trace.of("attempt_interrupted"), *world.trace.of("attempt_abandoned"))
        failed = Counter(event["rollout_id"] for event in ends)
    servers[0].start()
    await world.train(1, 2)
    assert trained_rows(world) == expected
    assert world.trace.of("attempt_abandoned") == []
    assert not world.audit().problems
    await world.kill()


async def test_at_level_prefix_servers_go_on_with_episodes_whose_generator_failed(served):
    sections = {"rollout_recovery": {"target_level": "prefix"}}
    expected = await uninterrupted(served(**sections))
    world = served(**sections)
    await begun(world)
    stood, complete = set(world.generator.calls.sampled), world.generator.calls.complete

    async def fails_once(order: Any, sibling: Any, *arguments: Any, **options: Any) -> Any:
        if sibling.environment_attempt == 0 and options["turn"] == 3:
            raise InfrastructureFailure("the engine is out of memory")
        return await complete(order, sibling, *arguments, **options)

    world.generator.calls.complete = fails_once
    world.generator.calls.release()
    await world.train(1, 2)
    assert trained_rows(world) == expected
    interrupted = world.trace.of("attempt_interrupted")
    assert {event["turns"] for event in interrupted} == {3}
    assert {event["rollout_id"] for event in interrupted} >= {rollout for rollout, turn in stood}
    assert world.trace.of("attempt_abandoned") == []
    assert not world.audit().problems
    await world.kill()


def test_a_server_that_is_away_refuses_the_token_or_shares_a_name_is_named_before_anything_starts(servers, monkeypatch):
    with pytest.raises(
        ConfigurationError, match=r"environment.servers names 'http://127.0.0.1:9', which can't be reached"
    ):
        served_instances(["http://127.0.0.1:9"])
    with pytest.raises(ConfigurationError, match="all call themselves 'games-0'; start each with an --instance"):
        served_instances([servers[0].url, servers[0].url])
    monkeypatch.setenv(TOKEN_VARIABLE, "another")
    with pytest.raises(ConfigurationError, match="refuses the token; set MIDFLIGHT_ENVIRONMENT_TOKEN") as caught:
        served_instances([servers[0].url])
    assert "another" not in str(caught.value)
