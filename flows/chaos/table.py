"""The table that `midflight chaos` prints, and the command that repeats one of its lines."""

from collections.abc import Sequence
from typing import Literal

from rich.table import Table
from rich.text import Text

from flows.chaos.judgement import VIOLATION, Result

_COLUMNS = ("fault", "seed", "outcome", "tokens lost", "s to recover", "s")


def chaos_table(results: Sequence[Result]) -> Table:
    """Each scenario, with what happened in it; those that broke a promise in red."""
    table = Table(title="Runs under faults", title_justify="left", box=None, padding=(0, 1, 0, 0))
    for column in _COLUMNS:
        justify: Literal["left", "right"] = "left" if column in ("fault", "outcome") else "right"
        table.add_column(column, justify=justify, overflow="fold", min_width=24 if column == "fault" else None)
    for result in results:
        table.add_row(*_row(result), style="red" if result.problems else None)
    return table


def _row(result: Result) -> list[Text | str]:
    recover = "" if result.recover_s is None else f"{result.recover_s:.1f}"
    return [
        Text.assemble((result.kind, "bold"), f"\n{result.fault}"),
        str(result.seed),
        result.outcome,
        f"{result.tokens_lost:,}",
        recover,
        f"{result.seconds:.0f}",
    ]


def violations(results: Sequence[Result]) -> list[Text]:
    """What was broken in each scenario that broke something, and how to see it again."""
    lines = []
    for result in results:
        if result.outcome == VIOLATION:
            lines.append(Text(f"{result.kind} {result.seed}: repeat with `{repeat_command(result)}`", style="red"))
            lines += [Text(f"  {problem}") for problem in result.problems]
    return lines


def repeat_command(result: Result) -> str:
    """The command that plays this very scenario."""
    return f"midflight chaos --kind {result.kind} --seed {result.seed} --count 1 --keep"


def progress_line(result: Result, number: int, count: int) -> str:
    """A scenario that has just ended."""
    took = f"{result.seconds:.0f} s, {result.starts} starts"
    return f"{number}/{count} {result.kind} {result.seed}: {result.outcome} ({took}): {result.fault}"
