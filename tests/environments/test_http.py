"""What only the HTTP form of an environment can get wrong: tokens, bodies, replies, and servers that die."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from flows.processes import free_port
from gpu_workers.environments.control_plane import ControlPlane
from gpu_workers.environments.episode_table import EpisodeTable
from gpu_workers.environments.http_control import EnvironmentConnection, HttpEnvironmentControl, HttpEpisodes
from gpu_workers.environments.http_messages import CONTROL, TOKEN_VARIABLE
from gpu_workers.environments.http_server import build_app, served_environments, token_for
from gpu_workers.environments.ports import EpisodeId, EpisodeTask
from gpu_workers.environments.registry import find_environment
from storage.errors import BrokenInvariant, ConfigurationError, EnvironmentRefusal, InfrastructureFailure

TOKEN = "a-very-secret-token"


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    table = EpisodeTable("games", find_environment)
    transport = httpx.ASGITransport(build_app(ControlPlane(table), table, TOKEN))
    async with httpx.AsyncClient(transport=transport, base_url="http://games") as made:
        yield made


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}])
async def test_a_missing_or_wrong_token_is_refused_and_never_told(
    client: httpx.AsyncClient, header: dict[str, str]
) -> None:
    reply = await client.get(f"{CONTROL}/status", headers=header)
    assert (reply.status_code, reply.json()["error"]["code"]) == (401, "unauthorized")
    assert TOKEN not in reply.text


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (f"{CONTROL}/prepare", {"checkpoint_id": "c", "deadline_ts": 1, "more": 1}),
        ("/v1/episodes/close", {"episode": {"rollout_id": "e0-p0_g0", "attempt": 0, "more": 1}}),
    ],
)
async def test_unknown_fields_are_refused_by_name(client: httpx.AsyncClient, route: str, body: object) -> None:
    reply = await client.post(route, json=body, headers={"Authorization": f"Bearer {TOKEN}"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (422, "invalid_request")
    assert "more" in reply.json()["error"]["message"]


def test_only_the_loopback_may_be_served_without_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert token_for("127.0.0.1", without_token=True) is None
    for host, without in (("127.0.0.1", False), ("0.0.0.0", True)):
        with pytest.raises(ConfigurationError, match=TOKEN_VARIABLE):
            token_for(host, without_token=without)


async def test_a_name_from_the_network_imports_nothing_and_given_paths_are_served_by_their_names() -> None:
    table = EpisodeTable("games", served_environments(["gpu_workers.environments.games.guess_letter:GuessLetter"]))
    transport = httpx.ASGITransport(build_app(ControlPlane(table), table, None))
    sys.modules.pop("antigravity", None)
    opened = {}
    async with httpx.AsyncClient(transport=transport, base_url="http://games") as client:
        for name in ("antigravity:fly", "guess15x4"):
            task = {"environment": name, "task_json": "{}", "seed": 1, "generation_index": 0, "deadline_s": 9}
            body = {"episode": {"rollout_id": "e0-p0_g0", "attempt": 0}, "task": task}
            opened[name] = await client.post("/v1/episodes/open", json=body)
    assert opened["antigravity:fly"].json()["error"]["code"] == "unknown_environment"
    assert "antigravity" not in sys.modules
    assert opened["guess15x4"].status_code == 200


async def _answering(status: str, body: str) -> asyncio.Server:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()

    return await asyncio.start_server(answer, "127.0.0.1", 0)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        ("200 OK", "{}", BrokenInvariant),
        ("200 OK", "not json", BrokenInvariant),
        ("500 Oops", "not json", BrokenInvariant),
        ("503 Away", "not json", InfrastructureFailure),
        ("409 No", '{"error": {"code": "deadline_exceeded", "message": "m"}}', EnvironmentRefusal),
    ],
)
async def test_a_malformed_reply_ends_and_one_that_is_not_ready_may_be_asked_again(
    status: str, body: str, kind: type[BrokenInvariant]
) -> None:
    async with await _answering(status, body) as server:
        port = server.sockets[0].getsockname()[1]
        async with EnvironmentConnection(f"http://127.0.0.1:{port}", TOKEN) as connection:
            with pytest.raises(kind) as caught:
                await HttpEnvironmentControl("games", connection).status()
    assert type(caught.value).retryable is (kind is InfrastructureFailure)
    assert caught.value.retryable is (kind is not BrokenInvariant)
    assert TOKEN not in str(caught.value)


async def test_a_server_without_the_routes_supports_no_checkpoints() -> None:
    async with await _answering("404 Not Found", "{}") as server:
        port = server.sockets[0].getsockname()[1]
        async with EnvironmentConnection(f"http://127.0.0.1:{port}") as connection:
            assert not await HttpEnvironmentControl("games", connection).supports_checkpoints()


@pytest.fixture
def servers() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for server in started:
        server.kill()
        server.wait()


async def test_after_a_kill_the_old_connection_fails_and_a_new_one_restores_the_episode(
    servers: list[subprocess.Popen[bytes]],
) -> None:
    port = free_port()
    episode, task = EpisodeId("e0-p0_g0", 0), EpisodeTask("running_sum", "{}", 3, 0, 60.0)
    await _start(servers, port)
    async with EnvironmentConnection(f"http://127.0.0.1:{port}", TOKEN) as old:
        record = (await HttpEpisodes(old).open(episode, task)).record
        os.kill(servers[0].pid, signal.SIGKILL)
        servers[0].wait()
        with pytest.raises(InfrastructureFailure, match="see whether the environment's server lives"):
            await HttpEnvironmentControl("games", old).status()
    await _start(servers, port)
    async with EnvironmentConnection(f"http://127.0.0.1:{port}", TOKEN) as new:
        control = HttpEnvironmentControl("games", new)
        await control.restore("r1", time.time() + 20, [record])
        await control.resume("r1")
        again = await HttpEpisodes(new).open(EpisodeId("e0-p0_g0", 1), task)
    assert again.record.state_json == record.state_json


async def _start(servers: list[subprocess.Popen[bytes]], port: int) -> None:
    program = [sys.executable, "-m", "gpu_workers.environments.http_server", "--instance", "games", "--port", str(port)]
    servers.append(_process(program))
    async with EnvironmentConnection(f"http://127.0.0.1:{port}", TOKEN) as connection:
        end = time.monotonic() + 30
        while time.monotonic() < end:
            try:
                await HttpEnvironmentControl("games", connection).status()
            except InfrastructureFailure:
                await asyncio.sleep(0.1)
            else:
                return
    raise AssertionError("the server did not start")


def _process(program: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(program, env=os.environ | {TOKEN_VARIABLE: TOKEN})
