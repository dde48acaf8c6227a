"""What Prefect costs a run: `python -m benchmarks.orchestration_cost [--short] [--speed-up 1]`.

A real Prefect server (SQLite, the settings of `midflight up`) and the real `train` flow from `drive` on, over a runtime
whose steps only wait, one task run a step, with a snapshot attempt every 5 s: 2,000 steps of 2 s. With `--speed-up 5`,
the default, steps and all intervals are five times as short; what the server does by the clock instead of by the step
(its idle processor time) is measured apart and counted for whole 2-second steps. `--speed-up 1` takes 70 minutes.
Before and after it run the same calls without Prefect.

Shown: the wall time that a step takes longer than without Prefect (at most 3 % is the requirement), processor time of
flow and server per step, memory over the steps, and what the database holds and grows by.
"""

import argparse
import json
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.measuring import FINDS_BENCHMARKS, cpu_seconds, resident_mib, show, slope, spread
from benchmarks.stub_run import STEP_S
from flows.home import Home
from flows.processes import ProcessId, end_processes, free_port, start_detached, tail, tied_to_parent
from flows.service_state import prefect_environment, without_prefect_settings

INTERVAL_S = 5.0
SAMPLES = 20
# Server and flow still fill their caches before that: nothing to extrapolate from.
ENOUGH_STEPS = 1000
LIMIT = 0.03
IDLE_S = 20.0


@dataclass(frozen=True, slots=True)
class Sample:
    """Where flow and server stand after so many steps. Processor time in seconds, memory in MiB."""

    step: int
    t: float
    flow_cpu_s: float
    flow_mib: float
    server_cpu_s: float
    server_mib: float
    database_mib: float


@dataclass(frozen=True, slots=True)
class Server:
    """A Prefect server of its own."""

    pid: int
    home: Home
    environment: dict[str, str]

    @property
    def database(self) -> Path:
        """Its SQLite file."""
        return self.home.prefect / "prefect.db"


@contextmanager
def prefect_server(folder: Path, settings: Mapping[str, str] | None = None) -> Iterator[Server]:
    """A server as `midflight up` starts it, apart from `settings`; ended afterwards."""
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    home, port = Home(folder), free_port()
    home.prefect.mkdir(parents=True, exist_ok=True)
    environment = without_prefect_settings(os.environ) | prefect_environment(home) | dict(settings or {})
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    log = home.logs / "server.log"
    process = start_detached(tied_to_parent(command), environment=environment, log=log, cwd=folder)
    url = f"http://127.0.0.1:{port}/api"
    try:
        _await_answer(f"{url}/health", process, log)
        yield Server(process.pid, home, environment | {"PREFECT_API_URL": url})
    finally:
        handle = process.process()
        end_processes([handle] if handle is not None else [], grace_s=10)


def _await_answer(url: str, process: ProcessId, log: Path) -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and process.is_alive():
        try:
            if httpx.get(url, timeout=2, trust_env=False).is_success:
                return
        except httpx.HTTPError:
            time.sleep(0.2)
    raise RuntimeError(f"the Prefect server did not start; {log}:\n{tail(log)}")


def follow(server: Server, way: str, *, steps: int, speed_up: float) -> list[Sample]:
    """Run the stub run to its end; a sample at every 20th part of it."""
    every = max(1, steps // SAMPLES)
    with tempfile.TemporaryDirectory() as store, (server.home.logs / f"{way}.log").open("ab") as log:
        settings = [str(value) for value in (steps, STEP_S / speed_up, INTERVAL_S / speed_up, every)]
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.stub_run", store, way, *settings],
            env=server.environment | FINDS_BENCHMARKS,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        assert process.stdout is not None
        samples = [_sample(json.loads(line), server) for line in process.stdout if line.startswith("{")]
        if process.wait() != 0:
            raise RuntimeError(f"the {way} run failed:\n{tail(server.home.logs / f'{way}.log')}")
    return samples


def _sample(line: dict[str, float], server: Server) -> Sample:
    sizes = [server.database.with_name(server.database.name + end) for end in ("", "-wal")]
    return Sample(
        step=int(line["step"]),
        t=line["t"],
        flow_cpu_s=line["cpu_s"],
        flow_mib=line["mib"],
        server_cpu_s=cpu_seconds(server.pid),
        server_mib=resident_mib(server.pid),
        database_mib=sum(path.stat().st_size for path in sizes if path.exists()) / 2**20,
    )


def idle_share(server: Server) -> float:
    """Processor time of the server per second while nothing runs."""
    before, started = cpu_seconds(server.pid), time.perf_counter()
    time.sleep(IDLE_S)
    return (cpu_seconds(server.pid) - before) / (time.perf_counter() - started)


def tables_of(database: Path) -> dict[str, tuple[int, float]]:
    """Rows and MiB of each table with its indices, the largest first."""
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        sizes = connection.execute(
            "SELECT s.tbl_name, SUM(d.pgsize) FROM dbstat d JOIN sqlite_master s ON s.name = d.name "
            "GROUP BY s.tbl_name ORDER BY 2 DESC"
        ).fetchall()
        return {
            table: (connection.execute(f'SELECT COUNT(*) FROM "{table}"').fetchone()[0], size / 2**20)
            for table, size in sizes
        }


@dataclass(frozen=True, slots=True)
class Cost:
    """Processor time per step (seconds) of one stretch of steps, and seconds from step to step."""

    flow_s: float
    server_s: float
    period_s: float


def costs(samples: list[Sample], *, idle: float) -> list[Cost]:
    """One for each stretch between two samples; start-up is not among them, the server's idle time neither."""
    found = []
    for one, other in zip(samples[1:], samples[2:], strict=False):
        steps, seconds = other.step - one.step, other.t - one.t
        server_s = other.server_cpu_s - one.server_cpu_s - idle * seconds
        found.append(Cost((other.flow_cpu_s - one.flow_cpu_s) / steps, server_s / steps, seconds / steps))
    return found


def print_cost(with_prefect: list[Cost], bare: list[Cost], *, idle: float) -> None:
    """Per step of 2 s: processor time and wall time."""
    rows = [
        ("flow process", *_shares([c.flow_s for c in with_prefect])),
        ("the same calls without Prefect", *_shares([c.flow_s for c in bare])),
        ("server, for the step", *_shares([c.server_s for c in with_prefect])),
        ("server, idle", *_shares([idle * STEP_S])),
    ]
    added = [c.flow_s + c.server_s + idle * STEP_S - sum(b.flow_s for b in bare) / len(bare) for c in with_prefect]
    rows.append(("added by Prefect", *_shares(added)))
    columns = ("", "ms, median (range)", "of one core", f"of the {os.cpu_count()} cores")
    show("Processor time per step of 2 s", columns, rows)
    without = statistics.median(b.period_s for b in bare)
    longer = [c.period_s - without for c in with_prefect]
    share = statistics.median(longer) / STEP_S
    row = ("ok" if share <= LIMIT else "TOO SLOW", spread([1000 * s for s in longer], 1), f"{100 * share:.2f} %")
    show("Wall time that a step takes longer", ("", "ms, median (range)", "of 2 s"), [row])


def _shares(seconds: list[float]) -> tuple[str, ...]:
    percent = 100 * statistics.median(seconds) / STEP_S
    return spread([1000 * s for s in seconds], 1), f"{percent:.2f} %", f"{percent / (os.cpu_count() or 1):.2f} %"


def events_of(database: Path) -> list[tuple[str, str, str]]:
    """Kinds of events: how many, and their bytes without indices and resources."""
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        found = connection.execute(
            "SELECT event, COUNT(*), SUM(LENGTH(payload) + LENGTH(resource) + LENGTH(related) + LENGTH(resource_id)) "
            "FROM events GROUP BY event ORDER BY 3 DESC LIMIT 8"
        ).fetchall()
    return [(event, str(count), f"{size / count / 1024:.1f}") for event, count, size in found]


def print_growth(samples: list[Sample], tables: dict[str, tuple[int, float]]) -> None:
    """Memory and database over the steps, and what 10,000 steps would need at the rate of the second half."""
    chosen = [samples[round(part * (len(samples) - 1) / 5)] for part in range(6)]
    rows: list[tuple[str, ...]] = [
        (str(s.step), f"{s.flow_mib:.1f}", f"{s.server_mib:.1f}", f"{s.database_mib:.1f}") for s in chosen
    ]
    half = samples[len(samples) // 2 :]
    per_step = [
        1024 * slope([(s.step, getattr(s, name)) for s in half]) for name in ("flow_mib", "server_mib", "database_mib")
    ]
    rows.append(("KiB per step, second half", *(f"{kib:.2f}" for kib in per_step)))
    if samples[-1].step >= ENOUGH_STEPS:
        rows.append(("MiB more after 10,000 steps", *(f"{kib * 10_000 / 1024:.0f}" for kib in per_step)))
    show("Memory (USS) and database", ("after steps", "flow MiB", "server MiB", "database MiB"), rows)
    shown = [(name, str(count), f"{mib:.2f}") for name, (count, mib) in tables.items() if mib >= 0.1]
    show("What the database holds", ("table with its indices", "rows", "MiB"), shown)


def main() -> None:
    """Run it and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--speed-up", type=float, default=5.0, help="let steps and intervals be this much shorter")
    parser.add_argument("--short", action="store_true", help="200 steps (3 minutes)")
    arguments = parser.parse_args()
    steps, speed_up = 200 if arguments.short else arguments.steps, arguments.speed_up
    with tempfile.TemporaryDirectory() as folder, prefect_server(Path(folder) / "home") as server:
        first_bare = follow(server, "bare", steps=min(steps, 60), speed_up=speed_up)
        idle = idle_share(server)
        samples = follow(server, "prefect", steps=steps, speed_up=speed_up)
        last_bare = follow(server, "bare", steps=min(steps, 60), speed_up=speed_up)
        bare = costs(first_bare, idle=idle) + costs(last_bare, idle=idle)
        print_cost(costs(samples, idle=idle), bare, idle=idle)
        print_growth(samples, tables_of(server.database))
        show("Its events", ("event", "rows", "KiB each"), events_of(server.database))


if __name__ == "__main__":
    main()
