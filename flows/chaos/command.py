"""`midflight chaos`: a home with services, scenarios one after the other, a table, an exit code."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from flows.chaos.drivers import Drivers
from flows.chaos.judgement import Result, judge
from flows.chaos.play import Player
from flows.chaos.scenario import Scenario
from flows.chaos.table import chaos_table, progress_line, repeat_command, violations
from flows.failures import ChaosFailed
from flows.home import HOME_VARIABLE, Home
from flows.local_services import local_services
from flows.service_state import MARKER_VARIABLE
from flows.store_commands import put_json
from storage.fault_points import VARIABLE

_FOREIGN = ("PREFECT_", "RAY_", "MIDFLIGHT_")


def run_chaos(played: Sequence[Scenario], *, keep: bool, as_json: bool, console: Console) -> None:
    """Play the scenarios in a home of their own and show what they came to.

    Raises ChaosFailed when one of them broke a promise, after everything was shown.
    """
    results: list[Result] = []
    with _home(console, keep=keep) as home, _services(home, console) as player:
        for scenario in played:
            with console.status(f"{len(results) + 1}/{len(played)} {scenario.run}: {scenario.described}"):
                results.append(_result(scenario, player, faults_of(home)))
            console.print(progress_line(results[-1], len(results), len(played)), soft_wrap=True, highlight=False)
    if as_json:
        put_json([{**asdict(result), "repeat": repeat_command(result)} for result in results])
    else:
        console.print(chaos_table(results))
        for line in violations(results):
            console.print(line, soft_wrap=True)
    if broken := [result for result in results if result.problems]:
        raise ChaosFailed(
            f"{len(broken)} of {len(results)} scenarios broke a promise; the first again: {repeat_command(broken[0])}"
        )


def _result(scenario: Scenario, player: Player, faults: Path) -> Result:
    began = time.monotonic()
    config, how = player.play(scenario)
    return judge(scenario, config, how, faults, time.monotonic() - began)


def faults_of(home: Home) -> Path:
    """Where the plans of a home's runs lie."""
    return home.root / "faults"


@contextmanager
def _home(console: Console, *, keep: bool) -> Iterator[Home]:
    """A new home that leads nowhere else: this process's settings of other homes and services are put aside."""
    for name in [name for name in os.environ if name.startswith(_FOREIGN)]:
        del os.environ[name]
    home = Home(Path(tempfile.mkdtemp(prefix="midflight-chaos-")).resolve())
    os.environ[HOME_VARIABLE] = str(home.root)
    os.environ[VARIABLE] = str(faults_of(home))
    try:
        yield home
    finally:
        if keep:
            console.print(f"Kept: {home.root} (logs in {home.logs})", soft_wrap=True)
        else:
            shutil.rmtree(home.root, ignore_errors=True)


@contextmanager
def _services(home: Home, console: Console) -> Iterator[Player]:
    """Prefect and Ray of this home, which hand the variable that switches faults on to all they start."""
    with ExitStack() as stack:
        with console.status("Starting Prefect and Ray"):
            state = stack.enter_context(local_services(home, {}))
        os.environ.update(state.environment(home))
        os.environ[MARKER_VARIABLE] = state.marker  # what is left of the drivers is ended with the services
        yield Player(home, Drivers(), faults_of(home))
