"""The cut: how long rollout state stands still, and what the event loop notices of a snapshot of 20,000 rows."""

import asyncio
import copy
import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
from rich.console import Console
from rich.table import Table

from gpu_workers.controller.barrier import Cut, DataPlaneBarrier
from gpu_workers.controller.bundle_publisher import BundlePublisher
from gpu_workers.controller.counted_trace import CountedTrace
from gpu_workers.controller.parts import RolloutParts, RolloutRuntimeState
from gpu_workers.controller.ports import Trainer
from gpu_workers.controller.prompt_source import PromptSource
from gpu_workers.controller.published_bundles import PublishedBundles
from gpu_workers.controller.recovery_ledger import RecoveryLedger
from gpu_workers.controller.replay_buffer import ReplayBuffer
from gpu_workers.controller.row_store import RowStore
from gpu_workers.controller.samplers.build import build_sampler
from gpu_workers.controller.snapshotter import RolloutSnapshotter
from gpu_workers.controller.trainer_checkpoints import TrainerCheckpoints
from storage.filesystem import Store, open_store
from storage.layout import RunLayout
from storage.manifests import ManifestLog
from storage.parts import encode_part
from storage.records import BufferedGroup, PromptRef, RecoveryLevel, RowKind, rollout_id
from storage.run_config import RunConfig
from storage.schemas import TRAINING_ROWS, row_digest
from storage.state_records import plain_buffered, plain_ledger_group
from storage.trace import NoTrace

pytestmark = pytest.mark.benchmark

GROUPS, GENERATIONS, TOKENS = 2500, 8, 1000
UNFINISHED = 500
TICK_S = 0.0005
CONFIG = RunConfig.model_validate(
    {
        "name": "bench",
        "algorithm": {"num_prompts_per_step": GROUPS, "num_generations_per_prompt": GENERATIONS},
        "data": {"num_prompts": 10_000},
    }
)


class NumberedPrompts:
    """A dataset that no one reads from."""

    def __len__(self) -> int:
        return CONFIG.data.num_prompts

    def prompt(self, ordinal: int) -> tuple[tuple[int, ...], str]:
        return (ordinal,), "{}"

    def fingerprint(self) -> str:
        return "f" * 64


class LiveState:
    """Parts that hold 20,000 finished rows of 1,000 tokens and 500 running groups."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(5)
        self._next = 0
        source = PromptSource(NumberedPrompts(), num_epochs=1, seed=1, shuffle=False)
        self.parts = RolloutParts(
            config=CONFIG,
            source=source,
            sampler=build_sampler(CONFIG),
            ledger=RecoveryLedger(),
            buffer=ReplayBuffer(),
            rows=RowStore(),
            barrier=DataPlaneBarrier(),
            trace=CountedTrace(NoTrace()),
            state=RolloutRuntimeState(),
        )

    async def finish(self, count: int) -> None:
        """Add finished groups."""
        batches = [group_rows(number, self._random) for number in range(self._next, self._next + count)]
        async with self.parts.barrier.mutation("finish") as mutation:
            for number, batch in enumerate(batches, start=self._next):
                self.parts.rows.put(mutation, RowKind.TRAINING_ROW, batch)
                self.parts.buffer.add(mutation, buffered(number, batch))
        self._next += count

    async def promise(self, count: int) -> None:
        """Add running groups."""
        async with self.parts.barrier.mutation("promise") as mutation:
            for number in range(self._next, self._next + count):
                place = {"batch": number, "order": number, "size": GENERATIONS}
                self.parts.ledger.reserve(mutation, prompt(number), level=RecoveryLevel.SIBLING, **place)
                self.parts.ledger.admit(mutation, number, target_step=1, start_version=0)
                self.parts.ledger.dispatch(mutation, prompt(number).group_id)
        self._next += count

    async def retire(self, count: int) -> None:
        """Let go of the oldest finished groups, as a train step does."""
        async with self.parts.barrier.mutation("retire") as mutation:
            oldest = self.parts.buffer.ready()[:count]
            self.parts.rows.remove(mutation, [row for group in oldest for row in group.row_ids])
            self.parts.buffer.drop(mutation, oldest)


class Saver:
    """A snapshotter of these parts with a store of its own."""

    def __init__(self, parts: RolloutParts, folder: Path) -> None:
        self.store: Store = open_store(str(folder))
        layout = RunLayout(CONFIG.name)
        log = ManifestLog(self.store, layout, "bench")
        log.claim()
        saving = {"checkpointing": CONFIG.checkpointing, "snapshots": CONFIG.rollout_checkpointing}
        bundles = PublishedBundles(self.store, layout, log, **saving)
        self._publisher = BundlePublisher(parts, bundles, identity="f" * 64)
        checkpoints = TrainerCheckpoints(parts, cast("Trainer", None), self._publisher)  # none is ever saved
        self._snapshotter = RolloutSnapshotter(parts, self._publisher, checkpoints)
        self._attempts = 0

    async def snapshot(self) -> dict[str, float]:
        """One snapshot: its facts, the bytes it added to the store and its seconds."""
        self._attempts += 1
        before, started = self._stored_bytes(), time.perf_counter()
        outcome = await self._snapshotter.attempt(self._attempts, force=True)
        assert outcome.outcome == "completed"
        seconds = time.perf_counter() - started
        return {**(outcome.facts or {}), "added_bytes": self._stored_bytes() - before, "seconds": seconds}

    async def cut_ms(self) -> float:
        """How long one cut was held."""
        return (await self._publisher.capture(model_step=0)).cut_ms

    def _stored_bytes(self) -> int:
        return sum(self.store.size(path) for path in self.store.list(CONFIG.name))


def prompt(number: int) -> PromptRef:
    """The prompt of the group with this number."""
    return PromptRef(number, 0, f"{number:064x}")


def group_rows(number: int, random: np.random.Generator) -> pa.RecordBatch:
    """One finished group's training rows, 1,000 tokens each."""
    rows = []
    for index in range(GENERATIONS):
        row: dict[str, Any] = {
            "row_id": rollout_id(prompt(number).group_id, index),
            "group_id": prompt(number).group_id,
        }
        row |= {"prompt_id": number, "epoch": 0, "generation_index": index, "attempt": 0}
        row |= {"token_ids": random.integers(0, 150_000, TOKENS, dtype=np.int32)}
        row |= {"loss_mask": np.arange(TOKENS) >= 100, "logprobs": -random.random(TOKENS, dtype=np.float32)}
        row |= {
            "version_starts": [0, 100],
            "versions": [-1, 3],
            "reward": 0.5,
            "masked": False,
            "finish_reason": "stop",
        }
        row["digest"] = row_digest(RowKind.TRAINING_ROW, row)
        rows.append(row)
    return pa.RecordBatch.from_pylist(rows, schema=TRAINING_ROWS)


def buffered(number: int, batch: pa.RecordBatch) -> BufferedGroup:
    """The replay buffer's record of one group."""
    ids = tuple(batch.column("row_id").to_pylist())
    return BufferedGroup(prompt(number), number, 0, 0, ids, (0.5,) * GENERATIONS, 7200, ((3, 7200),))


@dataclass
class Stalls:
    """The longest time in which the event loop could run nothing else, in ms: as seen, and without the time in which
    other processes had this one's processors."""

    seen_ms: float = 0.0
    ours_ms: float = 0.0


async def watched(work: Callable[[], Any]) -> tuple[Any, Stalls]:
    """The work's result and the stalls of the event loop meanwhile."""
    stalls, done = Stalls(), False

    async def tick() -> None:
        loop_thread, waited = str(threading.get_native_id()), _processor_waits_ms()
        while not done:
            started = time.perf_counter()
            await asyncio.sleep(TICK_S)
            gap_ms = (time.perf_counter() - started - TICK_S) * 1000
            before, waited = waited, _processor_waits_ms()
            waits = {thread: ms - before.get(thread, 0.0) for thread, ms in waited.items()}
            # First the thread that holds the interpreter may wait for a processor, then the loop's own.
            foreign_ms = waits.pop(loop_thread, 0.0) + max(waits.values(), default=0.0)
            stalls.seen_ms = max(stalls.seen_ms, gap_ms)
            stalls.ours_ms = max(stalls.ours_ms, gap_ms - foreign_ms)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.05)
    result = await work()
    done = True
    await ticking
    return result, stalls


def _processor_waits_ms() -> dict[str, float]:
    """How long each thread of this process has waited for a processor so far; empty where the system doesn't tell."""
    waits = {}
    for thread in os.listdir("/proc/self/task") if os.path.exists("/proc/self/schedstat") else ():
        try:
            waits[thread] = int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1]) / 1e6
        except OSError:
            continue  # the thread has just ended
    return waits


@pytest.fixture(scope="module")
def live() -> LiveState:
    state = LiveState()
    asyncio.run(state.finish(GROUPS))
    asyncio.run(state.promise(UNFINISHED))
    return state


def _print(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


async def test_a_cut_of_20000_rows_is_held_for_5_ms_at_most(live, tmp_path):
    saver = Saver(live.parts, tmp_path)
    held = sorted([await saver.cut_ms() for _ in range(50)])
    median = statistics.median(held)
    _print(
        "Cut hold, 20,000 rows in 2,500 finished groups and 500 running groups",
        ("cuts", "median ms", "90 % ms", "max ms"),
        [(str(len(held)), f"{median:.2f}", f"{held[45]:.2f}", f"{held[-1]:.2f}")],
    )
    assert median <= 5


async def test_a_snapshot_of_20000_rows_stalls_the_event_loop_for_20_ms_at_most(live, tmp_path):
    rows, ours = [], []
    for number in range(3):
        facts, full = await watched(Saver(live.parts, tmp_path / str(number)).snapshot)
        _, idle = await watched(lambda seconds=facts["seconds"]: asyncio.sleep(seconds))
        ours.append(full.ours_ms)
        cells = (facts["seconds"], full.seen_ms, full.ours_ms, idle.seen_ms, idle.ours_ms)
        rows.append(tuple(f"{value:.1f}" for value in cells))
    columns = ("seconds", "seen ms", "without other processes ms", "idle: seen ms", "idle: without others ms")
    _print("Longest stall of the event loop while a full snapshot is taken and written", columns, rows)
    assert statistics.median(ours) <= 20


async def test_copying_references_beats_a_deep_copy_and_encoding_inside_the_cut(live, tmp_path):
    saver, parts, cut = Saver(live.parts, tmp_path), live.parts, Cut("bench")
    mutable = {
        "buffer": [plain_buffered(group) for group in parts.buffer.capture(cut)],
        "ledger": [plain_ledger_group(group) for group in parts.ledger.capture(cut)],
    }
    times: dict[str, list[float]] = {"references (ours)": [], "deep copy of mutable records": [], "encode the rows": []}
    for _ in range(3):
        times["references (ours)"].append(statistics.median([await saver.cut_ms() for _ in range(9)]))
        started = time.perf_counter()
        copy.deepcopy(mutable)
        times["deep copy of mutable records"].append((time.perf_counter() - started) * 1000)
        started = time.perf_counter()
        encode_part(parts.rows.capture(cut), RunLayout(CONFIG.name), writer="bench")
        times["encode the rows"].append((time.perf_counter() - started) * 1000)
    medians = {name: statistics.median(values) for name, values in times.items()}
    ours = medians["references (ours)"]
    rows = [(name, f"{ms:.2f}", f"{ms / ours:.0f}x") for name, ms in medians.items()]
    _print("What a cut would be held for", ("inside the cut", "median ms", "ratio"), rows)
    assert medians["deep copy of mutable records"] > 10 * ours
    assert medians["encode the rows"] > 50 * ours


async def test_an_incremental_snapshot_costs_a_fraction_of_a_full_one(live, tmp_path):
    saver = Saver(live.parts, tmp_path / "steady")
    await saver.snapshot()
    full, small = [], []
    for number in range(3):
        full.append(await Saver(live.parts, tmp_path / f"full-{number}").snapshot())
        await live.retire(25)
        await live.finish(25)
        small.append(await saver.snapshot())
    rows, medians = [], {}
    for name, facts in (("full", full), ("incremental, 200 new rows", small)):
        medians[name] = [statistics.median(f[key] for f in facts) for key in ("added_bytes", "seconds")]
        rows.append((name, f"{medians[name][0] / 2**20:.2f}", f"{medians[name][1]:.2f}"))
    ratios = [whole / part for whole, part in zip(*medians.values(), strict=True)]
    rows.append(("ratio", f"{ratios[0]:.0f}x", f"{ratios[1]:.1f}x"))
    _print("A full snapshot and one with 200 new rows of 20,000", ("", "MiB written", "seconds"), rows)
    assert ratios[0] > 20
    assert ratios[1] > 2
