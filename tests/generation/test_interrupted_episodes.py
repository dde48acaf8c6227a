"""Episodes that are cut off in the middle of a model call: the turns before are kept, and the call goes on."""

import asyncio
import time
from dataclasses import dataclass, field

from gpu_workers.controller.ports import (
    GroupOrder,
    KnownCall,
    PartialCompletion,
    PeekedCall,
    RolloutResult,
    SiblingOrder,
    SiblingResult,
    TurnResult,
)
from gpu_workers.environments.control_plane import ControlPlane
from gpu_workers.environments.environment_task import EnvironmentTask
from gpu_workers.environments.episode_table import EpisodeTable
from gpu_workers.environments.ports import Exported
from gpu_workers.generation.episode_runner import EpisodeRunner
from storage.records import EpisodeRecord, Prompt, PromptRef
from storage.run_config import DataConfig, RunConfig
from tests.generation.fake_engine import Life, partial_of, turns

CONFIG = RunConfig(
    name="run",
    data={"task": "running_sum"},
    generation={"max_new_tokens": 12, "max_model_len": 256},
    rollout_recovery={"target_level": "prefix"},
)
TASK = EnvironmentTask(DataConfig(task="running_sum"))


@dataclass
class Player(Life):
    """A generator that plays episodes, with the turns that it reported."""

    config: RunConfig = CONFIG
    reported: list[RolloutResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.table = EpisodeTable("generator-0", lambda _name: TASK.environment)
        self.control = ControlPlane(self.table)
        self.runner = EpisodeRunner(self.config, self.calls, TASK, lambda _order: self.table, "generator 0")
        self.rollouts = ["e0-p0_g0"]

    def play(self, sibling: SiblingOrder) -> "asyncio.Task[SiblingResult]":
        """One episode."""
        token_ids, task_json = TASK.prompt(0)
        group = GroupOrder("e0-p0", Prompt(PromptRef(0, 0, ""), token_ids, task_json), (sibling,), keeps_running=True)
        return asyncio.create_task(self.runner.run(group, sibling, self.reported.append))

    async def end(self, playing: "asyncio.Task[SiblingResult]") -> SiblingResult:
        """Step to the end of the episode."""
        while not playing.done():
            await self.steps(1)
        return playing.result()

    async def play_until(self, playing: "asyncio.Task[SiblingResult]", *, turn: int, tokens: int) -> None:
        """Step until the call of this turn has so many tokens."""
        while not playing.done():
            await self.steps(1)
            peek = self.peek(KnownCall(0))
            if [(call.turn, len(call.sampled)) for call in peek.calls] == [(turn, tokens)]:
                return
        raise AssertionError("the episode was over before that")

    async def export(self) -> Exported:
        """A checkpoint of the environment, which stays closed."""
        deadline = time.time() + 60
        await self.control.prepare("c", deadline)
        return await self.control.commit("c", deadline)

    @property
    def turns(self) -> list[TurnResult]:
        """The finished turns."""
        return [result for result in self.reported if isinstance(result, TurnResult)]

    @property
    def tokens(self) -> list[list[int]]:
        """What was sampled in each."""
        return [turn.calls.to_pylist()[0]["token_ids"] for turn in self.turns]


async def whole() -> tuple[SiblingResult, list[list[int]]]:
    player = Player()
    result = await player.end(player.play(SiblingOrder(0, 0)))
    return result, player.tokens


async def resumed(
    first: Player, record: EpisodeRecord, call: PeekedCall
) -> tuple[Player, "asyncio.Task[SiblingResult]"]:
    """Another generator goes on with a saved episode and the call that was running."""
    last = first.turns[-1].calls.to_pylist()[0]
    partial: PartialCompletion = partial_of(call)
    second = Player()
    await second.control.restore("r", time.time() + 60, [record])
    await second.control.resume("r")
    sibling = SiblingOrder(
        0,
        0,
        environment_attempt=1,
        turns=record.turn,
        history=(*last["prompt_token_ids"], *last["token_ids"]),
        partial=partial,
    )
    return second, second.play(sibling)


async def stop(player: Player, playing: "asyncio.Task[SiblingResult]") -> None:
    playing.cancel()
    await asyncio.gather(playing, return_exceptions=True)
    await player.control.resume("c")


async def test_the_call_of_the_current_turn_goes_on_and_the_episode_is_the_same():
    expected, expected_tokens = await whole()
    first = Player()
    playing = first.play(SiblingOrder(0, 0))
    await first.play_until(playing, turn=2, tokens=4)
    (record,) = (await first.export()).episodes
    (call,) = first.peek(KnownCall(0, turn=2)).calls
    await stop(first, playing)
    second, going_on = await resumed(first, record, call)
    result = await second.end(going_on)
    assert first.tokens + second.tokens == expected_tokens
    assert (result.reward, result.failure) == (expected.reward, None)
    assert second.turns[0].calls.to_pylist()[0]["row_id"] == "e0-p0_g0/a0/t2"
    assert second.llm.asked == [f"e0-p0_g0/a0/t{turn}/1" for turn in range(2, len(expected_tokens))]


async def test_a_call_that_ended_while_the_environment_was_closed_is_delivered_without_an_engine():
    expected, expected_tokens = await whole()
    first = Player()
    playing = first.play(SiblingOrder(0, 0))
    await first.play_until(playing, turn=2, tokens=2)
    (record,) = (await first.export()).episodes
    for _ in range(CONFIG.generation.max_new_tokens):
        await first.steps(1)
    assert len(first.turns) == 2
    (call,) = first.peek(KnownCall(0, turn=2)).calls
    assert call.finish_reason in ("stop", "length")
    assert call.sampled.token_ids.tolist() == expected_tokens[2]
    await stop(first, playing)
    second, going_on = await resumed(first, record, call)
    await turns()
    assert second.tokens == expected_tokens[2:3]
    assert (await second.end(going_on)).reward == expected.reward
    assert first.tokens + second.tokens == expected_tokens
    assert second.llm.asked[0] == "e0-p0_g0/a0/t3/1"
