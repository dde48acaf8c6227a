"""The cut: how long rollout state stands still, and what the event loop notices of a snapshot of 20,000 rows."""

import asyncio
import copy
import os
import statistics
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest

from benchmarks.live_rows import CONFIG, GENERATIONS, LiveState, Saver
from benchmarks.measuring import quantile, show, spread
from gpu_workers.controller.barrier import Cut
from storage.layout import RunLayout
from storage.parts import encode_part
from storage.state_records import plain_buffered, plain_ledger_group

pytestmark = pytest.mark.benchmark

T = TypeVar("T")
GROUPS, TOKENS = 2500, 1000
UNFINISHED = 500
SIZES = (1_000, 20_000, 100_000)
TICK_S = 0.0005


@dataclass
class Stalls:
    """How long the event loop could run nothing else, in ms, at each turn: as seen, and without the time in which other
    processes had this one's processors."""

    seen_ms: list[float] = field(default_factory=list)
    ours_ms: list[float] = field(default_factory=list)

    def extend(self, other: "Stalls") -> None:
        """Both together."""
        self.seen_ms += other.seen_ms
        self.ours_ms += other.ours_ms


async def watched(work: Callable[[], Awaitable[T]]) -> tuple[T, Stalls]:
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
            stalls.seen_ms.append(gap_ms)
            stalls.ours_ms.append(max(0.0, gap_ms - foreign_ms))

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


async def filled(rows: int, *, tokens: int, unfinished: int) -> LiveState:
    """Finished rows, and running groups beside them."""
    state = LiveState(tokens=tokens)
    await state.finish(rows // GENERATIONS)
    await state.promise(unfinished)
    return state


@pytest.fixture(scope="module")
def live() -> LiveState:
    """20,000 rows of 1,000 tokens."""
    return asyncio.run(filled(GROUPS * GENERATIONS, tokens=TOKENS, unfinished=UNFINISHED))


async def test_a_cut_of_20000_rows_is_held_for_5_ms_at_most(tmp_path: Path) -> None:
    """What a row holds does not matter to a cut, so that these are short."""
    savers = {}
    for rows in SIZES:
        state = await filled(rows, tokens=20, unfinished=rows // 40)
        savers[rows] = Saver(state.parts, tmp_path / str(rows))
    held: dict[int, list[float]] = {rows: [] for rows in SIZES}
    for _ in range(50):
        for rows, saver in savers.items():
            held[rows].append(await saver.cut_ms())
    show(
        "Cut hold: rows in finished groups of 8, and a fifth as many in running groups; 50 cuts each, interleaved",
        ("rows", "median ms", "90 % ms", "max ms", "ns per row"),
        [
            (
                f"{rows:,}",
                f"{statistics.median(ms):.3f}",
                f"{quantile(ms, 0.9):.3f}",
                f"{max(ms):.3f}",
                f"{statistics.median(ms) * 1e6 / rows:.0f}",
            )
            for rows, ms in held.items()
        ],
    )
    assert statistics.median(held[20_000]) <= 5


async def test_a_snapshot_of_20000_rows_stalls_the_event_loop_for_20_ms_at_most(
    live: LiveState, tmp_path: Path
) -> None:
    writing, idle, longest = Stalls(), Stalls(), []
    for number in range(5):
        facts, stalls = await watched(Saver(live.parts, tmp_path / str(number)).snapshot)
        writing.extend(stalls)
        longest.append(max(stalls.ours_ms))
        seconds = facts["seconds"]
        _, stalls = await watched(lambda seconds=seconds: asyncio.sleep(seconds))  # type: ignore[misc]
        idle.extend(stalls)
    show(
        "Event-loop lag while full snapshots of 20,000 rows are taken and written, beside an idle loop (5 of each)",
        ("", "ticks", "p50 ms", "p99 ms", "max ms", "p99 ms *", "max ms *"),
        [_lag("writing", writing), _lag("idle", idle)],
        note="* without the time in which other processes had the processors",
    )
    assert statistics.median(longest) <= 20


def _lag(name: str, stalls: Stalls) -> tuple[str, ...]:
    seen, ours = stalls.seen_ms, stalls.ours_ms
    values = (quantile(seen, 0.5), quantile(seen, 0.99), max(seen), quantile(ours, 0.99), max(ours))
    return (name, f"{len(seen):,}", *(f"{value:.2f}" for value in values))


async def test_copying_references_beats_a_deep_copy_and_encoding_inside_the_cut(
    live: LiveState, tmp_path: Path
) -> None:
    saver, parts, cut = Saver(live.parts, tmp_path), live.parts, Cut("bench")
    mutable = {
        "buffer": [plain_buffered(group) for group in parts.buffer.capture(cut)],
        "ledger": [plain_ledger_group(group) for group in parts.ledger.capture(cut)],
    }
    times: dict[str, list[float]] = {"references (ours)": [], "deep copy of mutable records": [], "encode the rows": []}
    for _ in range(5):
        times["references (ours)"].append(statistics.median([await saver.cut_ms() for _ in range(9)]))
        started = time.perf_counter()
        copy.deepcopy(mutable)
        times["deep copy of mutable records"].append((time.perf_counter() - started) * 1000)
        started = time.perf_counter()
        encode_part(parts.rows.capture(cut), RunLayout(CONFIG.name), writer="bench")
        times["encode the rows"].append((time.perf_counter() - started) * 1000)
    base = times["references (ours)"]
    rows = [
        (name, spread(values), spread([ms / one for ms, one in zip(values, base, strict=True)], 0))
        for name, values in times.items()
    ]
    show("What a cut of 20,000 rows would be held for", ("inside the cut", "ms, median (range)", "times"), rows)
    medians = {name: statistics.median(values) for name, values in times.items()}
    assert medians["deep copy of mutable records"] > 10 * medians["references (ours)"]
    assert medians["encode the rows"] > 50 * medians["references (ours)"]
