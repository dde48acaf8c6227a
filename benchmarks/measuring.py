"""What the benchmarks share: the machine in words, tables, medians with their spread, processor time and memory."""

import os
import platform
import random
import statistics
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

# A program of ours that is started as a module needs this where Python doesn't look into the current folder.
FINDS_BENCHMARKS = {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}


def machine() -> str:
    """This machine and how busy it is."""
    memory = psutil.virtual_memory().total / 2**30
    load = os.getloadavg()[0]
    moment = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"{os.cpu_count()} cores, {memory:.0f} GiB, Python {platform.python_version()}, {moment}, load {load:.1f}"


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, note: str = "") -> None:
    """Print a table; the first column is text, the others are numbers."""
    table = Table(title=title, title_justify="left", caption=note or None, caption_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    console = Console(width=None if Console().is_terminal else 140)
    console.print(table)
    console.print(machine(), style="dim", highlight=False)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median, and the least and the greatest of a few values."""
    if not values:
        return "-"
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def quantile(values: Sequence[float], share: float) -> float:
    """The value that this share of the values does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Where the mean lies, 90 % of the time, by drawing the values again and again."""
    draw = random.Random(1)
    means = sorted(statistics.fmean(draw.choices(values, k=len(values))) for _ in range(2000))
    return means[100], means[1900]


def verdict(ratios: Sequence[float], limit: float) -> str:
    """Whether the mean of ratios, which must be at least `limit`, is, as far as these tell."""
    low, high = interval(ratios)
    return "ok" if low >= limit else "TOO SLOW" if high < limit else f"undecided: {limit} is in the interval"


def slope(points: Sequence[tuple[float, float]]) -> float:
    """By how much y grows with x, by least squares; 0 for fewer than two points."""
    return statistics.linear_regression(*zip(*points, strict=True)).slope if len(points) > 1 else 0.0


def family(pid: int) -> list[psutil.Process]:
    """A process and those below it."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def cpu_seconds(pid: int) -> float:
    """Processor time of a process and those that live below it."""
    return sum(_cpu(process) for process in family(pid))


def resident_mib(pid: int) -> float:
    """Memory of a process and those below it that is its own (USS), in MiB."""
    return sum(_own_bytes(process) for process in family(pid)) / 2**20


def _cpu(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def _own_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().uss)
    except psutil.NoSuchProcess:
        return 0
