"""`midflight demo`: train, be killed in mid-rollout, restore, train on, and account for every prompt."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from flows.config_files import load_config
from flows.failures import DemoFailed
from flows.home import Home
from flows.preflight import check
from flows.tables import facts_table
from flows.train_command import deployed_services
from storage.filesystem import open_store
from storage.layout import RunLayout
from storage.run_config import RunConfig

CONFIG_FILE = Path(__file__).resolve().parents[1] / "configs" / "demo.yaml"
MULTI_TURN_FILE = CONFIG_FILE.with_name("demo-multiturn.yaml")
MODEL_DEADLINE_S = 300.0


def run_demo(overrides: Sequence[str], output: Path, console: Console, *, multi_turn: bool = False) -> None:
    """The whole demo. Raises DemoFailed when it does not show what it promises, with the report written."""
    from flows.demo_report import build_report, rewards_around, shortcomings, write_report  # loads matplotlib
    from storage.trace_reader import read_events

    started, home = time.monotonic(), Home.current()
    config = demo_config(overrides, multi_turn=multi_turn)
    check(config)
    store = open_store(config.store.url)
    with model_in_the_making(config, home) as model, deployed_services(home, console) as state:
        with console.status("Warming up the tiny model"):
            await_model(model, home)
        # Prefect and Ray read the environment that leads to the services when they are imported.
        from flows.demo_run import kill_and_continue

        killed = asyncio.run(kill_and_continue(config, store, state, console))
    leftovers = [role for role, process in killed.processes.items() if process.is_alive()]
    report = build_report(store, config.name, killed_at=killed.at, seconds_total=time.monotonic() - started)
    rewards = rewards_around(read_events(store, RunLayout(config.name)), killed.at)
    paths = write_report(report, rewards, output)
    console.print(facts_table("What the demo showed", {k: v for k, v in report.items() if not isinstance(v, dict)}))
    console.print(f"Written: {paths[0]}, {paths[1]}. More: `midflight trace {config.name}`", soft_wrap=True)
    missing = shortcomings(report, multi_turn=multi_turn) + [f"still running: {role}" for role in leftovers]
    if missing:
        raise DemoFailed("; ".join(missing))


def demo_config(overrides: Sequence[str], *, multi_turn: bool = False) -> RunConfig:
    """configs/demo.yaml, or demo-multiturn.yaml, under a name that no earlier demo had, unless one is given."""
    unique = f"name=demo-{time.strftime('%Y%m%d-%H%M%S')}"
    return load_config(MULTI_TURN_FILE if multi_turn else CONFIG_FILE, [unique, *overrides])


@contextmanager
def model_in_the_making(config: RunConfig, home: Home) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that makes the tiny model; ended with the block."""
    home.logs.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "flows.prepare_model", str(home.cache)]
    with (
        (home.logs / "prepare-model.log").open("wb") as log,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT) as process,
    ):
        assert process.stdin is not None
        process.stdin.write(config.model_dump_json().encode())
        process.stdin.close()
        try:
            yield process
        finally:
            process.kill()


def await_model(process: "subprocess.Popen[bytes]", home: Home) -> None:
    """Wait for the model. Raises DemoFailed with the place of the log."""
    log = home.logs / "prepare-model.log"
    try:
        status = process.wait(timeout=MODEL_DEADLINE_S)
    except subprocess.TimeoutExpired as error:
        raise DemoFailed(f"the tiny model was not made within {MODEL_DEADLINE_S:.0f} s; see {log}") from error
    if status != 0:
        raise DemoFailed(f"the tiny model could not be made; see {log}:\n{log.read_text()[-2000:]}")
