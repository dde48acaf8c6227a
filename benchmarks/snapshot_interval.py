"""What a snapshot every 10 s costs a run: `python -m benchmarks.snapshot_interval [--level prefix --interval-s 5]`.

One real tiny run, whose own schedule takes no snapshots. In every other window attempts are asked for every 10 s, each
as the task that `train` uses; windows alternate with-without, without-with, so that a drift of the machine cancels out.
A pair of windows gives two ratios of with to without: train steps per second, and train steps per processor second of
the run's processes, which hardly depends on what else the machine does. The requirement is a ratio of at least 0.98.
At level `prefix` the model is not warmed up, so that responses take all their 64 tokens and many calls are in the
middle of one at each snapshot; generators are looked at for snapshots only.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass

from benchmarks.live_run import Event, LiveRun, services
from benchmarks.measuring import FINDS_BENCHMARKS, interval, show, spread, verdict

LIMIT = 0.98
SETTINGS = {
    "algorithm.max_steps": 1_000_000,
    "data.num_prompts": 10_000_000,
    "checkpointing.save_period": 20,
    "rollout_checkpointing.interval_s": 1_000_000,
}
LONG_RESPONSES = {
    "policy.warm_start_steps": 0,
    "generation.max_new_tokens": 64,
    "generation.max_model_len": 96,
    "generation.max_num_seqs": 32,
    "rollout_recovery.target_level": "prefix",
    "rollout_recovery.peek_interval_s": 1_000_000,
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


def watch(run: LiveRun, *, pairs: int, seconds: float, interval_s: float) -> list[Window]:
    """The windows of `benchmarks.snapshot_windows`, in the environment of the run's services."""
    life = run.life()
    assert life is not None
    command = [sys.executable, "-m", "benchmarks.snapshot_windows", run.name, str(pairs), str(seconds), str(interval_s)]
    environment = os.environ | run.services.environment(run.home) | FINDS_BENCHMARKS
    done = subprocess.run(
        [*command, *map(str, life.pids)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60 + 3 * pairs * seconds,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the windows of {run.name} could not be watched:\n{done.stderr[-3000:]}")
    return [Window(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]


def ratios(events: list[Event], windows: list[Window]) -> tuple[list[float], list[float]]:
    """With to without, for each pair of neighbours: steps per second, steps per processor second."""
    by_time, by_cpu = [], []
    for one, other in zip(windows[::2], windows[1::2], strict=True):
        with_them, without = (one, other) if one.has_snapshots else (other, one)
        a, b = steps_within(events, with_them), steps_within(events, without)
        by_time.append((a / (with_them.end - with_them.start)) / (b / (without.end - without.start)))
        by_cpu.append((a / with_them.cpu_s) / (b / without.cpu_s))
    return by_time, by_cpu


def row_of(name: str, values: list[float]) -> tuple[str, ...]:
    """One ratio, and whether the requirement holds, as far as these windows can tell."""
    low, high = interval(values)
    return name, f"{statistics.fmean(values):.3f}", f"{low:.3f}-{high:.3f}", spread(values, 3), verdict(values, LIMIT)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=20, help="pairs of windows")
    parser.add_argument("--window-s", type=float, default=20.0)
    parser.add_argument("--interval-s", type=float, default=10.0, help="between snapshots")
    parser.add_argument("--level", choices=("sibling", "prefix"), default="sibling")
    parser.add_argument("--short", action="store_true", help="4 pairs")
    arguments = parser.parse_args()
    pairs = 4 if arguments.short else arguments.windows
    with services() as home:
        run = LiveRun(home, "timed", SETTINGS | (LONG_RESPONSES if arguments.level == "prefix" else {}))
        run.train()
        try:
            run.wait_for(lambda events: sum(event["event"] == "train_step" for event in events) > 20)
            windows = watch(run, pairs=pairs, seconds=arguments.window_s, interval_s=arguments.interval_s)
            events = run.events()
        finally:
            run.stop()
    by_time, by_cpu = ratios(events, windows)
    rows = [row_of("steps per second", by_time), row_of("steps per processor second", by_cpu)]
    title = (
        f"A snapshot every {arguments.interval_s:.0f} s against none, level {arguments.level}, {pairs} pairs of windows"
    )
    show(title, ("with / without", "mean", "90 % interval", "median (range)", ""), rows)
    print_snapshots(events, windows, arguments.interval_s)


def print_snapshots(events: list[Event], windows: list[Window], interval_s: float) -> None:
    """What the snapshots were, and how fast the run was."""
    attempts = [e for e in events if e["event"] == "snapshot_attempt" and e["outcome"] == "completed"]
    busy = [(float(e["write_s"]) + float(e["cut_ms"]) / 1000) / interval_s for e in attempts]
    without = [steps_within(events, w) / (w.end - w.start) for w in windows if not w.has_snapshots]
    rows = [
        ("completed snapshots", str(len(attempts))),
        ("cut, ms", spread([float(e["cut_ms"]) for e in attempts], 3)),
        (
            "cut and write, share of the interval (a bound, if all else stood still)",
            spread([100 * b for b in busy]) + " %",
        ),
        ("look at running calls, ms", spread([float(e["peek_ms"]) for e in attempts], 1)),
        ("running calls in it", spread([float(e["partial_calls"]) for e in attempts], 0)),
        ("their tokens", spread([float(e["partial_tokens"]) for e in attempts], 0)),
        ("rows", spread([float(e["rows"]) for e in attempts], 0)),
        ("steps per second without snapshots", spread(without)),
    ]
    show("The run and its snapshots", ("", "median (range)"), rows)


if __name__ == "__main__":
    main()
