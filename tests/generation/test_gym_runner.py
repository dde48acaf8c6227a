"""Rollouts that an agent plays over real HTTP: `/run` to the agent, its model calls back to the generator.

The agent does what a NeMo Gym's simple agent and model server do together. Only the engine is a stand-in.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from gpu_workers.controller.ports import DiscardedPartial, GroupOrder, PartialCompletion, RolloutResult, SiblingOrder
from gpu_workers.controller.sampled_tokens import sampled_tokens
from gpu_workers.environments.agents import require_agents, require_reachable
from gpu_workers.environments.gym_run import GymAgents
from gpu_workers.environments.gym_task import GymTask
from gpu_workers.environments.ports import EpisodeId
from gpu_workers.generation.capture import Completion
from gpu_workers.generation.gym_rollouts import GymRollouts
from gpu_workers.generation.gym_runner import PLAYED_BY_AGENT, GymRunner
from gpu_workers.generation.model_server import ModelServer, build_model_app
from gpu_workers.models.tokenizer import END_TOKEN_ID, CharTokenizer
from storage.errors import ConfigurationError, InfrastructureFailure
from storage.records import CallSampling, Prompt, PromptRef
from storage.run_config import DataConfig, RunConfig

TOKEN = "a-token-of-the-test"
_EPISODE = EpisodeId("e0-p0_g1", 0)
LONGEST = 48


class Engine:
    """Answers with the number of the turn."""

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[int, ...], int]] = []
        self.failure: Exception | None = None
        self.engine_is_dead = False

    async def complete(self, order: Any, sibling: Any, token_ids: tuple[int, ...], *, turn: int) -> Completion:
        assert sibling.partial is None
        self.asked.append((token_ids, turn))
        if self.failure is not None:
            raise self.failure
        tokens = (*CharTokenizer().encode(f"{turn + 1}"), END_TOKEN_ID)
        return Completion(tokens, (-0.5,) * len(tokens), (0,), (7,), "stop")


@dataclass
class Gym:
    """An agent that asks twice: the row's question, and once more with the answer before it."""

    model_url: str = ""
    token: str = TOKEN
    status: int = 200
    turns: int = 2
    forgets: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)
    model_replies: list[tuple[int, Any]] = field(default_factory=list)

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/run")
        async def run(request: Request) -> JSONResponse:
            body = await request.json()
            self.bodies.append(body)
            if self.status != 200:
                return JSONResponse({"detail": "no"}, self.status)
            params = body["responses_create_params"]
            messages = list(params["input"])
            async with httpx.AsyncClient(headers={"Authorization": f"Bearer {self.token}"}, trust_env=False) as client:
                for turn in range(self.turns):
                    call = {"model": "policy", "messages": messages, **json.loads(params["metadata"]["extra_body"])}
                    reply = await client.post(f"{self.model_url}/chat/completions", json=call, timeout=30)
                    self.model_replies.append((reply.status_code, reply.json()))
                    if reply.status_code != 200:
                        return JSONResponse({"detail": "the model failed"}, 500)
                    said = reply.json()["choices"][0]["message"]
                    messages = [] if self.forgets else [*messages, said]
                    messages.append({"role": "user", "content": f"and {turn}?"})
            return JSONResponse({**body, "response": {"output": []}, "reward": 0.75, "mask_sample": False})

        return app


@asynccontextmanager
async def serving(app: FastAPI) -> AsyncIterator[str]:
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 (uvicorn has no event for it)
        await asyncio.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    await task


@dataclass
class World:
    task: GymTask
    engine: Engine
    gym: Gym
    runner: GymRunner
    order: GroupOrder

    async def run(self, sibling: SiblingOrder | None = None) -> Any:
        return await self.runner.run(self.order, sibling or SiblingOrder(0, 0))


@pytest.fixture
def task(tmp_path: Path) -> GymTask:
    row = {"responses_create_params": {"input": [{"role": "user", "content": "1+2="}]}, "agent_ref": {"name": "sums"}}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    return GymTask(DataConfig(task=f"gym:{path}", num_prompts=1))


@pytest.fixture
async def world(task: GymTask) -> AsyncIterator[World]:
    engine, gym = Engine(), Gym()
    rollouts = GymRollouts(engine, task)  # type: ignore[arg-type]
    server = ModelServer(build_model_app(rollouts, max_model_len=LONGEST, token=TOKEN), host="127.0.0.1", port=0)
    gym.model_url = await server.start()
    assert await server.start() == gym.model_url
    async with serving(gym.app()) as url, GymAgents({"sums": url}, TOKEN, timeout_s=30) as agents:
        tokens, task_json = task.prompt(0)
        order = GroupOrder("e0-p0", Prompt(PromptRef(0, 0, "x"), tokens, task_json), ())
        yield World(task, engine, gym, GymRunner(engine, task, rollouts, agents, "generator 0"), order)  # type: ignore[arg-type]
    await server.stop()


async def test_every_model_call_is_captured_with_the_exact_tokens_and_the_agent_s_reward_counts(world: World) -> None:
    result = await world.run(SiblingOrder(2, 1, environment_attempt=3))
    assert (result.failure, result.reward, result.masked) == (None, 0.75, False)
    assert result.generation_s > 0
    assert result.environment_s > 0
    rows = result.calls.to_pylist()
    assert [row["row_id"] for row in rows] == ["e0-p0_g2/a1/t0", "e0-p0_g2/a1/t1"]
    assert [row["parent_key"] for row in rows] == [None, "e0-p0_g2/a1/t0"]
    first, second = rows
    assert second["prompt_token_ids"] == [
        *first["prompt_token_ids"],
        *first["token_ids"],
        *CharTokenizer().encode("and 0?"),
    ]
    assert first["versions"] == [7]
    assert world.gym.bodies[0]["episode_id"] == {"rollout_id": "e0-p0_g2", "attempt": 3}


async def test_an_agent_plays_anew_what_was_interrupted_and_that_is_said(world: World) -> None:
    partial = PartialCompletion(
        0, "digest", CallSampling("counter", 7, 1.0, 1.0, ()), sampled_tokens((5, 6), (-1.0, -1.0), (0,), (0,))
    )
    said: list[RolloutResult] = []
    result = await world.runner.run(world.order, SiblingOrder(0, 1, 2, partial=partial), said.append)
    assert result.failure is None
    assert said == [DiscardedPartial(0, 1, 2, PLAYED_BY_AGENT)]


async def test_a_conversation_that_goes_on_from_nothing_known_begins_anew_and_is_left_to_be_masked(
    world: World,
) -> None:
    world.gym.forgets = True
    result = await world.run()
    first, second = result.calls.to_pylist()
    assert second["prompt_token_ids"] == list(CharTokenizer().encode("and 0?"))
    assert first["prompt_token_ids"] != second["prompt_token_ids"][: len(first["prompt_token_ids"])]


async def test_a_failed_model_call_fails_the_rollout(world: World) -> None:
    world.engine.failure = InfrastructureFailure("the engine is busy")
    result = await world.run()
    assert world.gym.model_replies[0][0] == 503
    assert result.failure.infrastructure
    assert "'sums' answered /run of e0-p0_g0-a0 with 500" in result.failure.message


async def test_a_dead_engine_ends_the_group(world: World) -> None:
    world.engine.failure, world.engine.engine_is_dead = InfrastructureFailure("dead"), True
    with pytest.raises(InfrastructureFailure):
        await world.run()


@pytest.mark.parametrize(("status", "infrastructure"), [(500, True), (429, True), (408, True), (422, False)])
async def test_an_agent_s_refusal_is_classified_and_its_request_is_not_sent_again(
    world: World, status: int, infrastructure: bool
) -> None:
    world.gym.status = status
    result = await world.run()
    assert result.failure.infrastructure is infrastructure
    assert len(world.gym.bodies) == 1


async def test_an_agent_that_asks_another_model_is_told(world: World) -> None:
    world.gym.turns = 0
    result = await world.run()
    assert not result.failure.infrastructure
    assert "without a model call that reached this generator" in result.failure.message


async def test_a_conversation_without_room_is_refused_in_the_words_that_a_gym_knows(world: World) -> None:
    world.gym.turns = 12
    await world.run()
    status, told = world.gym.model_replies[-1]
    assert (status, told["error"]["code"]) == (400, "context_length")
    assert "context length" in told["error"]["message"]


async def test_calls_of_no_running_rollout_without_the_token_or_with_more_than_text_are_refused(world: World) -> None:
    url = f"{world.gym.model_url}/chat/completions"
    headers, number = {"Authorization": f"Bearer {TOKEN}"}, {"role": "user", "content": 7}
    async with httpx.AsyncClient(trust_env=False) as client:
        without = await client.post(url, json={"messages": []})
        unknown = await client.post(url, json={"messages": [], "midflight_rollout": "e9-p9_g9-a0"}, headers=headers)
        no_object = await client.post(url, json={"messages": [], "metadata": "e0-p0_g1-a0"}, headers=headers)
        with world.runner._rollouts.running(_EPISODE, world.order, SiblingOrder(0, 0)):
            body = {"messages": [{"role": "user", "content": "hi"}], "midflight_rollout": str(_EPISODE)}
            refused = [
                await client.post(url, json={**body, **extra}, headers=headers)
                for extra in (
                    {"stream": True},
                    {"n": 2},
                    {"tools": [{}]},
                    {"messages": 3},
                    {"messages": [number]},
                )
            ]
            answered = await client.post(url, json=body, headers=headers)
    assert (without.status_code, unknown.status_code, answered.status_code) == (401, 404, 200)
    assert no_object.status_code == 404
    assert TOKEN not in without.text
    assert [reply.status_code for reply in refused] == [400] * 5
    assert answered.json()["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}


def config(task: GymTask, **sections: Any) -> RunConfig:
    data = {"task": task._data.task, "num_prompts": 1}
    return RunConfig.model_validate({"name": "gym", "data": data, "algorithm": {"num_prompts_per_step": 1}, **sections})


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({}, r"played by \['sums'\], which environment.gym_agents has no URL for"),
        (
            {"environment": {"gym_agents": {"sums": "http://x"}}, "rollout_recovery": {"per_agent": {"other": "turn"}}},
            r"per_agent names \['other'\], but .* is played by \['sums'\]",
        ),
        (
            {"environment": {"gym_agents": {"sums": "http://x"}}, "rollout_recovery": {"per_task": {"nosuch": "turn"}}},
            r"per_task names \['nosuch'\], which no task is called",
        ),
        (
            {"environment": {"gym_agents": {"sums": "http://x"}}, "generation": {"num_engines": 2}},
            "generation.num_engines is 2",
        ),
        (
            {"environment": {"gym_agents": {"sums": "http://x"}, "gym_model_host": "0.0.0.0"}},
            "MIDFLIGHT_ENVIRONMENT_TOKEN is not set",
        ),
    ],
)
def test_what_a_gym_run_lacks_is_named_before_anything_starts(
    task: GymTask, sections: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MIDFLIGHT_ENVIRONMENT_TOKEN", raising=False)
    with pytest.raises(ConfigurationError, match=told):
        require_agents(config(task, **sections), task)


def test_an_agent_that_nobody_answers_for_is_named_with_its_url(task: GymTask) -> None:
    with pytest.raises(ConfigurationError, match="gives 'sums' the URL 'http://127.0.0.1:9', which can't be reached"):
        require_reachable(config(task, environment={"gym_agents": {"sums": "http://127.0.0.1:9"}}), task)
