"""From the start of a restore to the first dispatched group, beside the start of an engine.

`python -m benchmarks.restore_to_dispatch`. A real tiny run is killed (SIGKILL: controller, engine,
trainer, flow) right after a snapshot in the middle of a step, and started again; round by round, each with one start of
an engine as `benchmarks.engine_start` does it, while no run lives. The times are those that Prefect and the run's trace
recorded: the chain is all from its first link on, verification included, to the first attempt that runs again.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import httpx

from benchmarks.live_run import Event, LiveRun, services
from benchmarks.measuring import show, spread

SETTINGS = {
    "algorithm.max_steps": 100_000,
    "algorithm.num_prompts_per_step": 6,
    "data.num_prompts": 500_000,
    "generation.max_num_seqs": 2,  # siblings are sealed one after the other
    "checkpointing.save_period": 5,
    "rollout_checkpointing.interval_s": 0.5,
}
LINKS = ("select", "verify", "weights", "replay_buffer", "ledger", "spare_prompts", "cursor", "redispatch")


@dataclass(frozen=True, slots=True)
class Restore:
    """One restore, in seconds."""

    kill_to_dispatch: float
    runtime_start: float
    chain: float
    links: dict[str, float]


def worth_a_kill(events: Sequence[Event]) -> bool:
    """A snapshot was just published in the middle of a step, some steps into this life."""
    if sum(event["event"] == "train_step" for event in events) < 3:
        return False
    newest = next((e for e in reversed(events) if e["event"] in ("snapshot_attempt", "train_step")), None)
    if newest is None or newest["event"] == "train_step" or newest["outcome"] != "completed":
        return False
    return int(newest["sealed_siblings"]) > 0 and int(newest["running_attempts"]) > 0


def runs_again(events: Sequence[Event]) -> bool:
    """Restored, and an attempt was dispatched."""
    names = [event["event"] for event in events]
    return "checkpoint_restored" in names and "attempt_dispatched" in names


def measure(run: LiveRun) -> Restore:
    """Start the run, kill it in mid-step, and read what its restore took."""
    run.train()
    life = run.wait_for(worth_a_kill)
    killed_at = run.kill(life)
    restored = run.wait_for(runs_again, after=life.name)
    dispatched = min(float(e["t"]) for e in restored.events if e["event"] == "attempt_dispatched")
    tasks = task_times(run, since=killed_at)
    first = min(start for name, (start, _) in tasks.items() if name in LINKS)
    launch = next(end - start for name, (start, end) in tasks.items() if name.startswith("ensure-runtime"))
    links = {name: tasks[name][1] - tasks[name][0] for name in LINKS}
    return Restore(dispatched - killed_at, launch, dispatched - first, links)


def task_times(run: LiveRun, *, since: float) -> dict[str, tuple[float, float]]:
    """Start and end of the first task run of each name that began after a moment, once Prefect has them all."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        answer = httpx.post(
            f"{run.services.prefect_api_url}/task_runs/filter",
            json={"sort": "ID_DESC", "limit": 100, "task_runs": {"state": {"type": {"any_": ["COMPLETED"]}}}},
            trust_env=False,
        )
        found: dict[str, tuple[float, float]] = {}
        for task in sorted(answer.raise_for_status().json(), key=lambda task: str(task["start_time"])):
            start = _seconds(task["start_time"])
            if start > since:
                found.setdefault(task["name"], (start, _seconds(task["end_time"])))
        if found.keys() >= set(LINKS):
            return found
        time.sleep(0.5)
    raise RuntimeError(f"Prefect has not recorded all links of the restore of {run.name}: {sorted(found)}")


def _seconds(text: Any) -> float:
    return datetime.fromisoformat(str(text)).timestamp()


def engine_start() -> float:
    """Seconds to the first token, by the benchmark of that name."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "RAY_", "MIDFLIGHT_"))}
    command = [sys.executable, "-m", "benchmarks.engine_start", "--rounds", "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    line = re.search(r"^\s*1\s+([\d.]+)\s+([\d.]+)\s", done.stdout, re.MULTILINE)
    if line is None:
        raise RuntimeError(f"benchmarks.engine_start failed:\n{done.stdout}{done.stderr}")
    return float(line[2])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--short", action="store_true", help="2 rounds")
    arguments = parser.parse_args()
    rounds = 2 if arguments.short else arguments.rounds
    restores, starts = [], []
    with services() as home:
        for number in range(rounds):
            starts.append(engine_start())
            run = LiveRun(home, f"killed-{number}", SETTINGS)
            try:
                restores.append(measure(run))
            finally:
                run.stop()
    ratios = [restore.chain / start for restore, start in zip(restores, starts, strict=True)]
    rows = [
        ("restore chain, to the first dispatched attempt", spread([r.chain for r in restores])),
        *((f"  {link}", spread([r.links[link] for r in restores])) for link in LINKS),
        ("start of the runtime (controller, engine, trainer)", spread([r.runtime_start for r in restores])),
        ("SIGKILL to the first dispatched attempt, flows included", spread([r.kill_to_dispatch for r in restores])),
        ("engine start to its first token (benchmarks.engine_start)", spread(starts)),
        ("restore chain / engine start", spread(ratios, 3)),
    ]
    show(f"Restore to first dispatch, {rounds} kills", ("", "seconds, median (range)"), rows)


if __name__ == "__main__":
    main()
