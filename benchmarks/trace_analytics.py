"""What every analysis of a trace costs in time and memory: `python -m benchmarks.trace_analytics`.

A trace of 10 million events (steps of 64 groups of 8 siblings, one stop in its middle) is written to a temporary folder
line by line, compacted, and analysed, each in a process of its own; the same with a hundredth of it. Memory that is
bounded hardly grows from the one to the other. Shown is the peak of the memory that is the process's own (RssAnon, 50
times a second), Polars and all, and of all that is resident (ru_maxrss): Polars maps the Parquet files that it scans,
whose pages count there, and which the system takes back whenever it needs them.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl

from benchmarks.measuring import show
from storage.analytics.group_time import stage_seconds_by_step
from storage.analytics.journeys import Journeys, follow
from storage.analytics.lives import lives_of
from storage.analytics.lost_progress import lost_progress
from storage.analytics.snapshot_costs import snapshot_attempts
from storage.analytics.steps import staleness, train_steps
from storage.analytics.stops import stops
from storage.analytics.throughput import throughput_around_stops
from storage.filesystem import open_store
from storage.layout import RunLayout
from storage.trace_compaction import compact_process
from storage.trace_reader import open_trace

GROUPS, SIBLINGS, SECONDS_PER_STEP = 64, 8, 20.0
LAYOUT = RunLayout("big")
Answer = Callable[[pl.LazyFrame, pl.DataFrame, Journeys], Any]
ANALYSES: dict[str, Answer] = {
    "batch age by step": train_steps,
    "staleness": lambda _trace, _lives, journeys: staleness(journeys),
    "where group time went": lambda _trace, _lives, journeys: stage_seconds_by_step(journeys),
    "cost of stops": stops,
    "snapshots": lambda trace, _lives, _journeys: snapshot_attempts(trace),
    "throughput around stops": lambda trace, lives, _journeys: throughput_around_stops(trace, lives),
    "lost progress": lambda _trace, lives, journeys: lost_progress(lives, journeys, LAYOUT.run, [LAYOUT.run]),
}


def lines_of_step(step: int, life: int, first_group: int) -> Iterator[str]:
    """Everything that happens to the groups of one train step, with its snapshot."""
    t, head = 1.7e9 + step * SECONDS_PER_STEP, f'"run_process":"life-{life}","event":'
    for number in range(GROUPS):
        group, at = f"e0-p{first_group + number}", t + number * 0.2
        prompt = f'"prompt_id":{first_group + number},"epoch":0'
        yield f'{{"t":{at},{head}"group_reserved","group_id":"{group}",{prompt},"batch":{step}}}\n'
        yield f'{{"t":{at},{head}"group_admitted","group_id":"{group}","target_step":{step},"start_version":{step}}}\n'
        for index in range(SIBLINGS):
            named = f'"rollout_id":"{group}_g{index}","attempt":0,{prompt},"generation_index":{index}'
            yield f'{{"t":{at + 0.1},{head}"attempt_dispatched",{named}}}\n'
        for index in range(SIBLINGS):
            named = f'"rollout_id":"{group}_g{index}","attempt":0,{prompt},"generation_index":{index}'
            facts = (
                f'"reward":0.5,"num_tokens":{100 + index},"digest":"{"0" * 64}","generation_s":2.5,"environment_s":0.25'
            )
            yield f'{{"t":{at + 3 + index * 0.1},{head}"attempt_sealed",{named},{facts}}}\n'
        yield f'{{"t":{at + 4},{head}"group_sealed","group_id":"{group}"}}\n'
        tokens = f'"version_tokens":[[{max(step - 1, 0)},300],[{step},528]],"num_tokens":828'
        rest = f'"target_step":{step},"start_version":{step},{tokens},"rewards":{[0.5] * SIBLINGS}'
        name = f'"group_published","group_id":"{group}"'
        yield f'{{"t":{at + 4.1},{head}{name},{prompt},{rest},"rollout_sha256":"{"1" * 64}"}}\n'
    groups = json.dumps([f"e0-p{first_group + number}" for number in range(GROUPS)])
    facts = (
        f'"step":{step + 1},"version":{step + 1},"group_ids":{groups},"rewards_mean":0.5,"seconds":19.0,"waited_s":15.0'
    )
    age = 300 / 828 if step else 0.0
    yield f'{{"t":{t + 18.0},{head}"train_step",{facts},"batch_age":{age},"replayed":false,"metrics":{{"loss":0.1}}}}\n'
    cut = f'"sequence":{step},"step":{step + 1},"cut_ms":1.0,"barrier_wait_ms":0.5,"write_s":0.2'
    yield f'{{"t":{t + 18.5},{head}"snapshot_attempt","number":{step},"outcome":"completed","reason":"",{cut}}}\n'


def write_trace(folder: Path, num_events: int) -> None:
    """Two lives of one run, with the stop right after a snapshot."""
    per_step = GROUPS * (4 + 2 * SIBLINGS) + 2
    steps = num_events // per_step
    (folder / LAYOUT.traces).mkdir(parents=True)
    for life, numbers in enumerate((range(steps // 2), range(steps // 2, steps))):
        with (folder / LAYOUT.trace(f"life-{life}")).open("w") as file:
            if life:
                cut = 1.7e9 + (numbers[0] - 1) * SECONDS_PER_STEP + 18.4
                restored = {"sequence": numbers[0] - 1, "step": numbers[0], "model_step": numbers[0], "cut_time": cut}
                head = {"t": cut + 1.0, "run_process": "life-1", "event": "checkpoint_restored"}
                file.write(json.dumps({**head, **restored}) + "\n")
            for step in numbers:
                file.writelines(lines_of_step(step, life, step * GROUPS))


class OwnMemory(threading.Thread):
    """Watches how much memory is this process's own."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_mib = 0.0
        self.start()

    def run(self) -> None:
        """Look, for ever."""
        while True:
            self.look()
            time.sleep(0.02)

    def look(self) -> None:
        """Look once."""
        lines = Path("/proc/self/status").read_text().splitlines()
        own = next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
        self.peak_mib = max(self.peak_mib, own / 1024)


def measured(name: str, folder: Path) -> None:
    """For the child: do one thing, and print seconds and peak memory: its own, and all."""
    memory = OwnMemory()
    store, began, journeys = open_store(str(folder)), time.perf_counter(), folder / "journeys"
    if name == "compaction":
        for life in range(2):
            compact_process(store, LAYOUT, f"life-{life}")
    elif name != "nothing":
        with open_trace(store, [LAYOUT]) as trace:
            lives = lives_of(trace, {})
            if name == "following groups":
                journeys.mkdir()
                follow(trace, lives, journeys)
            else:
                began = time.perf_counter()
                tables = [pl.scan_parquet(journeys / table / "*.parquet") for table in ("attempts", "groups")]
                ANALYSES[name](trace, lives, Journeys(*tables))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    seconds = time.perf_counter() - began
    memory.look()
    print(json.dumps([seconds, memory.peak_mib, peak]))


def measure(folder: Path, num_events: int) -> dict[str, tuple[float, float, float]]:
    """Seconds, own and whole peak MiB of everything, for a trace of so many events."""
    write_trace(folder, num_events)
    found = {}
    for name in ("nothing", "compaction", "following groups", *ANALYSES):
        command = [sys.executable, "-m", "benchmarks.trace_analytics", "--child", name, str(folder)]
        figures = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
        found[name] = (figures[0], figures[1], figures[2])
    return found


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=10_000_000)
    parser.add_argument("--child", nargs=2, metavar=("NAME", "FOLDER"))
    chosen = parser.parse_args()
    if chosen.child:
        measured(chosen.child[0], Path(chosen.child[1]))
        return
    sizes = (max(chosen.events // 100, 10_000), chosen.events)
    results = []
    for size in sizes:
        with tempfile.TemporaryDirectory(prefix="midflight-bench-") as folder:
            results.append(measure(Path(folder), size))
    small, large = results
    rows = [
        (
            *(name, f"{small[name][0]:.2f}", f"{large[name][0]:.2f}", f"{small[name][1]:.0f}", f"{large[name][1]:.0f}"),
            *(f"{large[name][1] / small[name][1]:.2f}", f"{small[name][2]:.0f}", f"{large[name][2]:.0f}"),
        )
        for name in small
    ]
    columns = (
        "",
        "s, small",
        "s, large",
        "own MiB, small",
        "own MiB, large",
        "ratio",
        "all MiB, small",
        "all MiB, large",
    )
    note = f"small: {sizes[0]:,} events, large: {sizes[1]:,}; `nothing` is Python with Polars alone"
    show("Analysing a trace", columns, rows, note=note)


if __name__ == "__main__":
    main()
