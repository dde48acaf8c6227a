"""Tables of the command line: snapshots, verification, trace, and the panel of an error."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from storage.manifests import BrokenSlot, Manifest
from storage.verdicts import Verdict
from tasks.bundle_checks import BundleCheck

BUNDLES = ("trainer_checkpoint", "rollout_snapshot")


def error_panel(error: BaseException) -> Panel:
    """One clear message; colours that a worker's log put into it are removed."""
    text = Text.from_ansi(str(error)).plain
    return Panel(Text(text), title=type(error).__name__, title_align="left", border_style="red")


def snapshots_table(
    run: str,
    log: Sequence[Manifest | BrokenSlot],
    *,
    everything: bool,
    verdicts: Mapping[int, Verdict] | None = None,
    warnings: Sequence[str] = (),
) -> Table:
    """The bundles of a run by age, or (`everything`) every slot of the log; `verdicts` of verifications by slot."""
    retired = {sequence for slot in log if isinstance(slot, Manifest) for sequence in slot.retires}
    known = verdicts or {}
    table = Table(title=f"Run {run}", title_justify="left", box=None, padding=(0, 1, 0, 0))
    for column in ("#", "kind", "step", "published", "verified", "anchor", "unfinished", "sealed", "ready", "size"):
        justify: Literal["left", "right"] = "left" if column in ("kind", "published", "verified") else "right"
        table.add_column(column, justify=justify, no_wrap=column != "verified", overflow="fold")
    for slot in log:
        if isinstance(slot, BrokenSlot):
            table.add_row(str(slot.sequence), "unreadable", style="red")
        elif everything or (slot.kind in BUNDLES and slot.sequence not in retired):
            verdict = known.get(slot.sequence)
            style = "red" if verdict is not None and verdict.problem is not None else None
            table.add_row(*_snapshot_row(slot, verdict), style="dim" if slot.sequence in retired else style)
    lines = [f"{slot.sequence}: {slot.reason}" for slot in log if isinstance(slot, BrokenSlot)]
    lines += [f"{number}: bad: {v.problem}" for number, v in sorted(known.items()) if v.problem is not None]
    table.caption = escape("\n".join([*lines, *warnings])) or None
    table.caption_justify = "left"
    return table


def _snapshot_row(manifest: Manifest, verdict: Verdict | None) -> list[str]:
    kind = manifest.kind.removeprefix("trainer_").removeprefix("rollout_")
    if manifest.kind not in BUNDLES:
        return [str(manifest.sequence), kind, "", moment(manifest.created_at)]
    counts, anchor = manifest.counts, ""
    if manifest.anchor is not None:
        anchor = "initial" if manifest.anchor.sequence is None else str(manifest.anchor.sequence)
    return [
        str(manifest.sequence),
        kind,
        str(manifest.step),
        moment(manifest.created_at),
        _verified(verdict),
        anchor,
        *(str(counts.get(name, 0)) for name in ("ledger_groups", "sealed_siblings", "buffered_groups")),
        size(sum(entry.bytes for entry in manifest.files)),
    ]


def _verified(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    return "bad" if verdict.problem is not None else moment(verdict.verified_at)


def verification_table(run: str, checks: Iterable[BundleCheck]) -> Table:
    """What became of each bundle."""
    table = Table(title=f"Verification of {run}", title_justify="left")
    for column in ("sequence", "kind", "step", "rows", "size", "result"):
        table.add_column(column, justify="left" if column in ("kind", "result") else "right", overflow="fold")
    for check in checks:
        result = Text(check.problem, style="red") if check.problem else Text("as published", style="green")
        if check.drilled and not check.problem:
            result.append(", and restored", style="green")
        if check.note:
            result.append(f" ({check.note})", style="yellow")
        step = "" if check.step is None else str(check.step)
        table.add_row(f"{check.sequence:08d}", check.kind, step, str(check.rows), size(check.bytes), result)
    return table


def facts_table(title: str, facts: Mapping[str, Any]) -> Table:
    """Names and values, one a line."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in facts.items():
        table.add_row(name.replace("_", " "), shown(value))
    return table


def shown(value: Any) -> str:
    """A value for people."""
    if isinstance(value, float):
        return f"{value:,.3f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def size(num_bytes: int) -> str:
    """Bytes for people."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.1f} {unit}" if value < 10 and unit != "B" else f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def moment(seconds: float) -> str:
    """A time for people, as this machine's clock shows it. Any number is shown: times come from files."""
    try:
        return datetime.fromtimestamp(seconds).strftime("%d %b %H:%M")
    except (OverflowError, ValueError, OSError):
        return f"{seconds:.3g} s"
