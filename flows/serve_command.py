"""The `serve` command: services and deployments of one machine in the foreground, with the pages to open."""

import signal
import threading

from rich.console import Console
from rich.table import Table

from flows.home import Home
from flows.local_services import require_services
from flows.service_state import WORK_POOL, ServiceState
from flows.train_command import deployed_services

WATCH_S = 1.0


def serve_deployments(home: Home, console: Console) -> None:
    """Start what is missing, deploy, and stay until SIGINT or SIGTERM. Raises ServicesFailed when a service ends."""
    asked_to_end = threading.Event()
    with deployed_services(home, console) as state:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: asked_to_end.set())
        console.print(pages(state, home))
        console.print("Ctrl-C ends what was started here, and with it whatever runs there.")
        while not asked_to_end.wait(WATCH_S):
            require_services(home)
        console.print("Ending")


def pages(state: ServiceState, home: Home) -> Table:
    """Where to look, and what serves it."""
    ui = state.prefect_api_url.removesuffix("/api")
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("Prefect UI", ui)
    table.add_row("deployments", f"{ui}/deployments")
    table.add_row("flow runs", f"{ui}/runs")
    table.add_row("work pool", f"{WORK_POOL} ({'server started here' if state.owns_prefect else 'existing server'})")
    table.add_row("Ray", f"{state.ray_address} ({'started here' if state.owns_ray else 'existing cluster'})")
    table.add_row("logs", str(home.logs))
    table.add_row("start a run", "midflight train configs/tiny.yaml, or Run on the `train` deployment's page")
    return table
