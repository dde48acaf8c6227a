"""`midflight chaos`: a home with services, scenarios beside each other, a table, an exit code."""

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
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


def run_chaos(planned: Sequence[Scenario], *, at_once: int, keep: bool, as_json: bool, console: Console) -> None:
    """Play the scenarios in a home of their own, `at_once` beside each other, and show what they came to.

    Raises ChaosFailed when one of them broke a promise, after everything was shown.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # cleared up as after Ctrl-C
    with _home(console, keep=keep) as home, _services(home, console) as player:
        results = _play_all(planned, player, at_once, console)
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


def _play_all(planned: Sequence[Scenario], player: Player, at_once: int, console: Console) -> list[Result]:
    """The results in the order of the scenarios. Interrupted, those that are being played are given up."""
    with console.status("") as status, ThreadPoolExecutor(at_once, thread_name_prefix="midflight-chaos") as pool:
        playing = [pool.submit(_result, scenario, player) for scenario in planned]
        try:
            for number, ended in enumerate(as_completed(playing), start=1):
                console.print(progress_line(ended.result(), number, len(planned)), soft_wrap=True, highlight=False)
                status.update(f"{number} of {len(planned)} scenarios have ended")
        except BaseException:
            player.give_up()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [ended.result() for ended in playing]


def _result(scenario: Scenario, player: Player) -> Result:
    began = time.monotonic()
    config, how = player.play(scenario)
    return judge(scenario, config, how, player.faults, time.monotonic() - began)


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
