"""What a snapshot every 10 s costs a run: `python -m benchmarks.snapshot_interval`.

One real tiny run, whose own schedule takes no snapshots. In every other window attempts are asked for every 10 s, each
as the task that `train` uses; windows alternate with-without, without-with, so that a drift of the machine cancels out.
A pair of windows gives two ratios of with to without: train steps per second, and train steps per processor second of
the run's processes, which hardly depends on what else the machine does. The requirement is a ratio of at least 0.98.
"""

import argparse
import asyncio
import os
import random
import statistics
import time
from dataclasses import dataclass

from prefect import flow

from benchmarks.live_run import Event, LiveRun, services
from benchmarks.measuring import cpu_seconds, show, spread
from flows.home import Home
from tasks.ray_runtime import RayRuntime
from tasks.snapshots import attempt_number, attempt_snapshot

INTERVAL_S = 10.0
LIMIT = 0.98
SETTINGS = {
    "algorithm.max_steps": 1_000_000,
    "data.num_prompts": 10_000_000,
    "checkpointing.save_period": 20,
    "rollout_checkpointing.interval_s": 1_000_000,
}


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of time of the run: with snapshots or not, from and to (Unix seconds), processor time of the run."""

    has_snapshots: bool
    start: float
    end: float
    cpu_s: float


def steps_within(events: list[Event], window: Window) -> float:
    """Train steps of a window; a step that crosses its edge counts by its share."""
    times = [float(event["t"]) for event in events if event["event"] == "train_step"]
    spans = zip(times, times[1:], strict=False)
    return sum(max(0.0, min(b, window.end) - max(a, window.start)) / (b - a) for a, b in spans if b > a)


async def watch(run: LiveRun, *, windows: int, window_s: float) -> list[Window]:
    """Pairs of windows in the order with-without, without-with, ..."""
    runtime = RayRuntime(run.name, cache=run.home.cache)
    status = await runtime.status()
    life = run.life()
    assert status is not None
    assert life is not None

    @flow(name="snapshots-of-the-benchmark", persist_result=False)
    async def snapshots(seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            await attempt_snapshot(runtime, attempt_number(), False, status.incarnation)
            await asyncio.sleep(min(INTERVAL_S, max(0.0, until - time.monotonic())))

    found = []
    for number in range(2 * windows):
        has_snapshots = number % 4 in (0, 3)
        start, cpu = time.time(), sum(map(cpu_seconds, life.pids))
        await (snapshots(window_s) if has_snapshots else asyncio.sleep(window_s))
        found.append(Window(has_snapshots, start, time.time(), sum(map(cpu_seconds, life.pids)) - cpu))
    return found


def ratios(events: list[Event], windows: list[Window]) -> tuple[list[float], list[float]]:
    """With to without, for each pair of neighbours: steps per second, steps per processor second."""
    by_time, by_cpu = [], []
    for one, other in zip(windows[::2], windows[1::2], strict=True):
        with_them, without = (one, other) if one.has_snapshots else (other, one)
        a, b = steps_within(events, with_them), steps_within(events, without)
        by_time.append((a / (with_them.end - with_them.start)) / (b / (without.end - without.start)))
        by_cpu.append((a / with_them.cpu_s) / (b / without.cpu_s))
    return by_time, by_cpu


def interval(values: list[float]) -> str:
    """Where the mean lies, 90 % of the time, by drawing the pairs again and again."""
    draw = random.Random(1)
    means = sorted(statistics.fmean(draw.choices(values, k=len(values))) for _ in range(2000))
    return f"{means[100]:.3f}-{means[1900]:.3f}"


def verdict(values: list[float]) -> str:
    """Whether the requirement holds."""
    return "ok" if statistics.fmean(values) >= LIMIT else "TOO SLOW"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=12, help="pairs of windows")
    parser.add_argument("--window-s", type=float, default=20.0)
    parser.add_argument("--short", action="store_true", help="4 pairs")
    arguments = parser.parse_args()
    pairs = 4 if arguments.short else arguments.windows
    with services() as home:
        run = LiveRun(home, "timed", SETTINGS)
        run.train()
        try:
            run.wait_for(lambda events: sum(event["event"] == "train_step" for event in events) > 20)
            os.environ.update(run.services.environment(Home(home.root)))
            windows = asyncio.run(watch(run, windows=pairs, window_s=arguments.window_s))
            events = run.events()
        finally:
            run.stop()
    by_time, by_cpu = ratios(events, windows)
    rows = [
        (name, f"{statistics.fmean(values):.3f}", interval(values), spread(values, 3), verdict(values))
        for name, values in (("steps per second", by_time), ("steps per processor second", by_cpu))
    ]
    title = f"A snapshot every {INTERVAL_S:.0f} s against none, {pairs} pairs of windows"
    show(title, ("with / without", "mean", "90 % interval", "median (range)", ""), rows)
    print_snapshots(events, windows)


def print_snapshots(events: list[Event], windows: list[Window]) -> None:
    """What the snapshots were, and how fast the run was."""
    attempts = [e for e in events if e["event"] == "snapshot_attempt" and e["outcome"] == "completed"]
    busy = [(float(e["write_s"]) + float(e["cut_ms"]) / 1000) / INTERVAL_S for e in attempts]
    without = [steps_within(events, w) / (w.end - w.start) for w in windows if not w.has_snapshots]
    rows = [
        ("completed snapshots", str(len(attempts))),
        ("cut, ms", spread([float(e["cut_ms"]) for e in attempts], 3)),
        ("cut and write, share of the 10 s (a bound, if all else stood still)", spread([100 * b for b in busy]) + " %"),
        ("rows", spread([float(e["rows"]) for e in attempts], 0)),
        ("steps per second without snapshots", spread(without)),
    ]
    show("The run and its snapshots", ("", "median (range)"), rows)


if __name__ == "__main__":
    main()
