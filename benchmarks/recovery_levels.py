"""What a kill costs at each recovery level: `python -m benchmarks.recovery_levels`.

The same seeded workload of six-turn episodes, killed at the same random moments, once for each of `prompt_group`,
`sibling` and `turn`. Controller, episode table, snapshots and restore are the real ones; model and trainer only take
time: a token a set while, sixteen sequences together. Counted is what had been sampled of unfinished groups when the
kill came, and how much of that is sampled again afterwards. The requirement is that `turn` keeps at least 90 % of the
tokens of all kills together; a kill just after a step has begun finds few of them.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from benchmarks.measuring import quantile, show, spread
from gpu_workers.controller.ports import GroupOrder, SiblingOrder, SiblingResult, StepResult, TurnResult, WeightsRef
from gpu_workers.controller.published_bundles import PublishedBundles
from gpu_workers.controller.restorer import RestorePlan
from gpu_workers.controller.single_controller import SingleController
from gpu_workers.environments.control_plane import ControlPlane
from gpu_workers.environments.environment_task import EnvironmentTask
from gpu_workers.environments.episode_table import EpisodeTable
from gpu_workers.environments.ports import CallRef, EpisodeId, EpisodeTask
from gpu_workers.generation.capture import Completion
from gpu_workers.generation.episode_runner import EpisodeRunner
from gpu_workers.models.tokenizer import END_TOKEN_ID, CharTokenizer
from storage.catalog import select
from storage.filesystem import open_store
from storage.layout import RunLayout
from storage.manifests import ManifestLog
from storage.records import rollout_id
from storage.run_config import RunConfig

LEVELS = ("prompt_group", "sibling", "turn")
TOKEN_S = 0.01
SEQUENCES = 16
LIMIT = 0.9
Call = tuple[str, int]


class TimedCalls:
    """Stands for the engine: each call has 4 to 12 tokens, by who samples and which turn."""

    engine_is_dead = False

    def __init__(self) -> None:
        self.tokens: dict[Call, float] = {}
        self._slots = asyncio.Semaphore(SEQUENCES)

    def has_room(self, token_ids: tuple[int, ...]) -> bool:
        """Always."""
        return True

    async def complete(
        self, order: GroupOrder, sibling: SiblingOrder, token_ids: tuple[int, ...], *, turn: int, report: Any = None
    ) -> Completion:
        """Wait for each token; a call that is cut off counts with those that it had."""
        rollout = rollout_id(order.group_id, sibling.generation_index)
        length, loop = random.Random(f"{rollout}/{turn}").randint(4, 12), asyncio.get_running_loop()
        async with self._slots:
            began = loop.time()
            try:
                await asyncio.sleep(length * TOKEN_S)
            finally:
                had = min(length, int((loop.time() - began) / TOKEN_S))
                self.tokens[rollout, turn] = max(self.tokens.get((rollout, turn), 0), had)
        tokens = (*CharTokenizer().encode("7" * (length - 1)), END_TOKEN_ID)
        return Completion(tokens, (-0.5,) * length, (0,), (0,), "stop")


class Player:
    """The port `Generator` over the real runner and table."""

    def __init__(self, config: RunConfig, task: EnvironmentTask) -> None:
        self.calls = TimedCalls()
        table = EpisodeTable("player", lambda name: task.environment)
        self.control = ControlPlane(table)
        calls: Any = self.calls
        self._runner = EpisodeRunner(config, calls, task, lambda _order: table, "player")

    async def generate(self, order: GroupOrder) -> AsyncGenerator[SiblingResult | TurnResult, None]:
        """All siblings together."""
        answers: asyncio.Queue[SiblingResult | TurnResult] = asyncio.Queue()

        async def play(sibling: SiblingOrder) -> None:
            answers.put_nowait(await self._runner.run(order, sibling, answers.put_nowait))

        playing = [asyncio.create_task(play(sibling)) for sibling in order.siblings]
        left = len(playing)
        try:
            while left:
                answer = await answers.get()
                left -= isinstance(answer, SiblingResult)
                yield answer
        finally:
            for task in playing:
                task.cancel()
            await asyncio.gather(*playing, return_exceptions=True)

    async def load_weights(self, weights: WeightsRef) -> Mapping[str, float]:
        """Takes any."""
        return {}

    async def abort(self, group_id: str) -> None:
        """Closing the stream is enough."""


class NoModel:
    """A trainer that has nothing to train; each step takes a while."""

    async def begin_step(self, step: int) -> None:
        """Nothing to begin."""

    async def train_microbatch(self, rows: Sequence[Any]) -> Mapping[str, float]:
        """As long as a short forward and backward pass."""
        await asyncio.sleep(0.02)
        return {}

    async def flush_microbatches(self) -> None:
        """Nothing waits."""

    async def finish_step(self, step: int) -> StepResult:
        """Nothing changes."""
        return StepResult(step)

    async def publish_weights(self, version: int) -> WeightsRef:
        """A name."""
        return WeightsRef(version, "none")

    async def begin_save(self, prefix: str) -> None:
        """Nothing to save."""

    async def finish_save(self, prefix: str) -> Sequence[Mapping[str, Any]]:
        """No files."""
        return []

    async def restore(self, files: Sequence[Mapping[str, Any]] | None) -> None:
        """Nothing to load."""


class Facts:
    """A trace that keeps how long the environment stood still for each snapshot, in ms."""

    def __init__(self) -> None:
        self.parked_ms: list[float] = []

    def record(self, event: str, **fields: Any) -> None:
        """As in the port `Trace`."""
        if event == "environment_parked":
            self.parked_ms.append(1000 * float(fields["seconds"]))


class Life:
    """One controller on a store, from its restore to its kill."""

    def __init__(self, config: RunConfig, store_url: str, number: int) -> None:
        store, layout = open_store(store_url), RunLayout(config.name)
        task = EnvironmentTask(config.data)
        log = ManifestLog(store, layout, f"life-{number}")
        log.claim()
        checkpointing, snapshots = config.checkpointing, config.rollout_checkpointing
        self.player, self.facts = Player(config, task), Facts()
        self.controller = SingleController(
            config,
            dataset=task,
            trainer=NoModel(),
            generator=self.player,
            bundles=PublishedBundles(store, layout, log, checkpointing=checkpointing, snapshots=snapshots),
            trace=self.facts,
            environments=[self.player.control],
            incarnation=log.writer,
        )
        self._chosen = select(store, layout)
        self._interval_s = config.rollout_checkpointing.interval_s
        self._work: list[asyncio.Task[Any]] = []

    async def start(self) -> None:
        """Restore and train, with snapshots."""
        target, anchor = self._chosen.target, self._chosen.anchor
        plan = RestorePlan(*(None if manifest is None else manifest.sequence for manifest in (target, anchor)))
        await self.controller.restore(plan)
        first = self.controller.parts.state.train_steps + 1
        self._work = [asyncio.create_task(self.controller.train_steps(first, first + 1000))]
        self._work.append(asyncio.create_task(self._snapshots()))

    async def _snapshots(self) -> None:
        for number in range(1, 100_000):
            await asyncio.sleep(self._interval_s)
            await self.controller.attempt_snapshot(number)

    def unfinished(self) -> set[str]:
        """Groups that are dispatched and not in the replay buffer."""
        return {group.group_id for group in self.controller.parts.ledger.admitted()}

    async def kill(self) -> None:
        """No goodbye: what is in memory is gone."""
        for task in self._work:
            task.cancel()
        await self.controller.close("killed")
        for task in self._work:
            with suppress(asyncio.CancelledError, Exception):
                await task


async def cost_of_a_kill(level: str, seed: int, settings: Mapping[str, Any]) -> tuple[float, float, list[float]]:
    """Tokens sampled of unfinished groups at the kill, how many of them again afterwards; pauses of the environment."""
    config = RunConfig.model_validate({**settings, "rollout_recovery": {"target_level": level}})
    with tempfile.TemporaryDirectory() as folder:
        first = Life(config, folder, 1)
        await first.start()
        await asyncio.sleep(1.5 + 2.0 * random.Random(seed).random())
        unfinished = first.unfinished()
        await first.kill()
        before = {call: n for call, n in first.player.calls.tokens.items() if call[0].rpartition("_g")[0] in unfinished}
        second = Life(config, folder, 2)
        await second.start()
        await second.controller.parts.state.changed.wait_for(lambda: not unfinished & second.unfinished())
        await second.kill()
    again = second.player.calls.tokens
    redone = sum(min(n, again.get(call, 0)) for call, n in before.items())
    return sum(before.values()), redone, first.facts.parked_ms


async def boundary_us(turns: int = 6, episodes: int = 400) -> list[float]:
    """Microseconds of each turn: the environment's own work, its state made canonical and hashed, the boundary."""
    environment = EnvironmentTask(
        RunConfig(name="b").data.model_copy(update={"task": "running_sum?turns=6"})
    ).environment
    table, took = EpisodeTable("boundary", lambda name: environment), []
    for number in range(episodes):
        episode = EpisodeId(f"e0-p{number}_g0", 0)
        await table.open(episode, EpisodeTask(environment.name, f'{{"turns":{turns}}}', number, 0, 60.0))
        for turn in range(turns):
            began = time.perf_counter()
            await table.step(episode, turn, "7", CallRef(f"k{turn}", 0))
            took.append(1e6 * (time.perf_counter() - began))
    return took


def main() -> None:
    """Kill a few times at each level and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=12, help="random moments, the same for each level")
    parser.add_argument("--interval-s", type=float, default=0.1, help="between snapshots: ten tokens")
    arguments = parser.parse_args()
    settings = {
        "name": "levels",
        "algorithm": {"num_prompts_per_step": 6, "num_generations_per_prompt": 8, "max_steps": 2000},
        "data": {"task": "running_sum?turns=6", "num_prompts": 20_000},
        "generation": {"max_new_tokens": 16, "max_model_len": 512},
        "checkpointing": {"save_period": 50},
        "rollout_checkpointing": {"interval_s": arguments.interval_s},
    }
    shares: dict[str, list[float]] = {level: [] for level in LEVELS}
    redone = dict.fromkeys(LEVELS, 0.0)
    sampled: dict[str, list[float]] = {level: [] for level in LEVELS}
    parked: list[float] = []
    for seed in range(arguments.kills):
        for level in LEVELS:  # interleaved
            had, again, pauses = asyncio.run(cost_of_a_kill(level, seed, settings))
            parked += pauses
            sampled[level].append(had)
            shares[level].append(100 * again / had)
            redone[level] += again
    rows = []
    for level in LEVELS:
        kept = 100 - 100 * redone[level] / sum(sampled[level])
        ok = "" if level != "turn" else "ok" if kept >= 100 * LIMIT else "TOO LITTLE"
        rows.append([level, spread(sampled[level], 0), spread(shares[level], 1), f"{kept:.1f}", ok])
    show(
        f"Tokens of unfinished groups that a kill costs, {arguments.kills} kills of six-turn episodes",
        ["level", "sampled before", "sampled again, %", "kept of all, %", ""],
        rows,
    )
    boundaries = asyncio.run(boundary_us())
    show(
        "What it costs while nothing is killed",
        ["", "median", "90 %", "max"],
        [
            _line(f"environment closed for a snapshot, ms ({len(parked)} at level turn)", parked),
            _line("a turn of running_sum with its boundary, microseconds", boundaries),
        ],
    )


def _line(what: str, values: list[float]) -> list[str]:
    return [what, *(f"{value:.2f}" for value in (statistics.median(values), quantile(values, 0.9), max(values)))]


if __name__ == "__main__":
    main()
