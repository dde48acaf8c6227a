"""What a kill costs at each recovery level: `python -m benchmarks.recovery_levels`.

The same seeded workloads, of six-turn episodes and of single responses, killed at the same random moments, once for
each level. Controller, snapshots, restore, episode table and generation are the real ones; engine and trainer only take
time: a token a set while, sixteen sequences together. Counted is what had been sampled of unfinished groups when the
kill came, and how much of that is sampled again afterwards. The requirements: `turn` keeps at least 90 % of the tokens
of all kills together (a kill just after a step has begun finds few of them), and `prefix` loses at most 1 % of them
beyond those that were sampled after the look at the running calls that belongs to the newest snapshot.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from benchmarks.length_distribution import LengthDistribution
from benchmarks.measuring import quantile, show, spread
from benchmarks.timed_player import Call, NoModel, Span, TimedPlayer
from gpu_workers.controller.published_bundles import PublishedBundles
from gpu_workers.controller.restorer import RestorePlan
from gpu_workers.controller.single_controller import SingleController
from gpu_workers.environments.environment_task import EnvironmentTask
from gpu_workers.environments.episode_table import EpisodeTable
from gpu_workers.environments.ports import CallRef, EpisodeId, EpisodeTask
from gpu_workers.environments.tasks import build_task
from storage.catalog import select
from storage.filesystem import open_store
from storage.layout import RunLayout
from storage.manifests import ManifestLog
from storage.run_config import RunConfig

TOKEN_S = 0.01
SEQUENCES = 16
LIMITS = {"turn": 0.9}
BEYOND_SNAPSHOT = 0.01


@dataclass(frozen=True)
class Workload:
    """Six-turn episodes or single responses, and how long what is sampled in one call is."""

    task: str
    lengths: LengthDistribution
    levels: tuple[str, ...]


WORKLOADS = {
    "six-turn episodes": Workload(
        "running_sum?turns=6",
        LengthDistribution(minimum=4, parts=((1.0, 4.0),), limit=2048),
        ("prompt_group", "sibling", "turn", "prefix"),
    ),
    "single responses": Workload(
        "sort8",
        LengthDistribution(minimum=16, parts=((0.8, 60.0), (0.2, 150.0)), limit=2048),
        ("prompt_group", "sibling", "prefix"),
    ),
}


class Facts:
    """A trace that keeps which groups are finished, and how long the environment stood still for each snapshot (ms)."""

    def __init__(self) -> None:
        self.parked_ms: list[float] = []
        self._published: set[str] = set()
        self._changed = asyncio.Event()

    async def finished(self, groups: set[str]) -> None:
        """Until all of these groups are finished."""
        while not groups <= self._published:
            self._changed.clear()
            await self._changed.wait()

    def record(self, event: str, **fields: Any) -> None:
        """As in the port `Trace`."""
        if event == "environment_parked":
            self.parked_ms.append(1000 * float(fields["seconds"]))
        if event == "group_published":
            self._published.add(str(fields["group_id"]))
            self._changed.set()


class Life:
    """One controller on a store, from its restore to its kill."""

    def __init__(self, config: RunConfig, lengths: LengthDistribution, store_url: str, number: int) -> None:
        store, layout = open_store(store_url), RunLayout(config.name)
        task = build_task(config.data)
        log = ManifestLog(store, layout, f"life-{number}")
        log.claim()
        checkpointing, snapshots = config.checkpointing, config.rollout_checkpointing
        self.player = TimedPlayer(config, task, lengths, sequences=SEQUENCES, token_s=TOKEN_S)
        self.facts = Facts()
        self._saved, self._sequence = dict[Call, Span](), -1
        self.controller = SingleController(
            config,
            dataset=task,
            trainer=NoModel(),
            generator=self.player,
            bundles=PublishedBundles(store, layout, log, checkpointing=checkpointing, snapshots=snapshots),
            trace=self.facts,
            environments=self.player.environments,
            incarnation=log.writer,
        )
        self.chosen = select(store, layout)
        self._interval_s = config.rollout_checkpointing.interval_s
        self._work: list[asyncio.Task[Any]] = []

    async def start(self) -> None:
        """Restore and train, with snapshots."""
        target, anchor = self.chosen.target, self.chosen.anchor
        plan = RestorePlan(*(None if manifest is None else manifest.sequence for manifest in (target, anchor)))
        await self.controller.restore(plan)
        first = self.controller.parts.state.train_steps + 1
        self.player.start()
        self._work = [asyncio.create_task(self.controller.train_steps(first, first + 1000))]
        self._work.append(asyncio.create_task(self._snapshots()))

    async def _snapshots(self) -> None:
        for number in range(1, 100_000):
            await asyncio.sleep(self._interval_s)
            outcome = await self.controller.attempt_snapshot(number)
            if outcome.sequence is not None:
                self._saved, self._sequence = self.player.looked, outcome.sequence

    def seen_by(self, restored: "Life") -> dict[Call, Span]:
        """What had been sampled at the look that belongs to the snapshot that another life starts from."""
        target = restored.chosen.target
        is_newer = target is not None and target.sequence > self._sequence  # published, but nobody has heard of it
        return self.player.looked if is_newer else self._saved

    def unfinished(self) -> set[str]:
        """Groups that are dispatched and not in the replay buffer."""
        return {group.group_id for group in self.controller.parts.ledger.admitted()}

    async def kill(self) -> None:
        """No goodbye: what is in memory is gone."""
        for task in self._work:
            task.cancel()
        await self.controller.close("killed")
        await self.player.stop()
        for task in self._work:
            with suppress(asyncio.CancelledError, Exception):
                await task


@dataclass(frozen=True, slots=True)
class Cost:
    """Tokens of unfinished groups: sampled before the kill, again after it, and after the newest snapshot's look at the
    running calls. `parked_ms`: pauses of the environment.
    """

    sampled: int
    again: int
    unseen: int
    parked_ms: list[float]


async def cost_of_a_kill(workload: Workload, level: str, seed: int, settings: Mapping[str, Any]) -> Cost:
    """One run, killed and restored."""
    recovery = {"target_level": level, "peek_interval_s": 1000}
    config = RunConfig.model_validate({**settings, "rollout_recovery": recovery})
    with tempfile.TemporaryDirectory() as folder:
        first = Life(config, workload.lengths, folder, 1)
        await first.start()
        await asyncio.sleep(1.5 + 2.0 * random.Random(seed).random())
        unfinished = first.unfinished()
        before = tokens_of(first.player.sampled(), unfinished)
        await first.kill()
        second = Life(config, workload.lengths, folder, 2)
        seen = tokens_of(first.seen_by(second), unfinished)
        await second.start()
        await second.facts.finished(unfinished)
        await second.kill()
    again = second.player.sampled()
    redone = [min(n, again[call][1]) - again[call][0] for call, n in before.items() if call in again]
    unseen = sum(before.values()) - sum(min(n, before[call]) for call, n in seen.items() if call in before)
    return Cost(sum(before.values()), sum(max(0, n) for n in redone), unseen, first.facts.parked_ms)


def tokens_of(sampled: Mapping[Call, Span], groups: set[str]) -> dict[Call, int]:
    """Tokens of each call of these groups."""
    return {call: end for call, (_, end) in sampled.items() if call[0].rpartition("_g")[0] in groups}


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
    for name, workload in WORKLOADS.items():
        settings = {
            "name": "levels",
            "algorithm": {"num_prompts_per_step": 6, "num_generations_per_prompt": 8, "max_steps": 2000},
            "data": {"task": workload.task, "num_prompts": 20_000},
            "generation": {"max_new_tokens": 2000, "max_model_len": 16384},
            "checkpointing": {"save_period": 50},
            "rollout_checkpointing": {"interval_s": arguments.interval_s},
        }
        costs: dict[str, list[Cost]] = {level: [] for level in workload.levels}
        for seed in range(arguments.kills):
            for level in workload.levels:  # interleaved
                costs[level].append(asyncio.run(cost_of_a_kill(workload, level, seed, settings)))
        show(
            f"Tokens of unfinished groups that a kill costs, {arguments.kills} kills, {name}",
            ["level", "sampled before", "sampled again, %", "after the newest look, %", "kept of all, %", ""],
            [row_of(level, costs[level]) for level in workload.levels],
        )
        parked = [pause for level in ("turn", "prefix") for cost in costs.get(level, ()) for pause in cost.parked_ms]
        if parked:
            show_pauses(parked)


def row_of(level: str, costs: list[Cost]) -> list[str]:
    """One level, and whether its requirement holds."""
    sampled, again = sum(cost.sampled for cost in costs), sum(cost.again for cost in costs)
    unseen = sum(cost.unseen for cost in costs)
    verdict = ""
    if level in LIMITS:
        verdict = "ok" if again <= (1 - LIMITS[level]) * sampled else "TOO LITTLE"
    if level == "prefix":
        verdict = "ok" if again <= unseen + BEYOND_SNAPSHOT * sampled else "TOO LITTLE"
    return [
        level,
        spread([cost.sampled for cost in costs], 0),
        spread([100 * cost.again / max(1, cost.sampled) for cost in costs], 1),
        spread([100 * cost.unseen / max(1, cost.sampled) for cost in costs], 1) if level == "prefix" else "",
        f"{100 - 100 * again / sampled:.1f}",
        verdict,
    ]


def show_pauses(parked: list[float]) -> None:
    """What episodes cost while nothing is killed."""
    boundaries = asyncio.run(boundary_us())
    show(
        "What it costs while nothing is killed",
        ["", "median", "90 %", "max"],
        [
            _line(f"environment closed for a snapshot, ms ({len(parked)})", parked),
            _line("a turn of running_sum with its boundary, microseconds", boundaries),
        ],
    )


def _line(what: str, values: list[float]) -> list[str]:
    return [what, *(f"{value:.2f}" for value in (statistics.median(values), quantile(values, 0.9), max(values)))]


if __name__ == "__main__":
    main()
