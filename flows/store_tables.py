"""Tables of the commands that look into a store."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import polars as pl
from rich.table import Table
from rich.text import Text

from flows.tables import facts_table, moment, shown, size
from storage.bundle_diff import BundleDiff
from storage.pruning import Pruned, PrunePlan
from storage.runs import RunSummary

_SHOWN = 8


def runs_tables(url: str, runs: Sequence[RunSummary]) -> Iterator[Table | Text]:
    """The runs of a store, by name, and what is wrong with them."""
    table = _plain_table(f"Runs in {url}", "run", "step", "checkpoints", "snapshots", "size", "newest", "forked from")
    for run in runs:
        origin = run.forked_from
        table.add_row(
            run.name,
            "" if run.step is None else str(run.step),
            str(run.checkpoints),
            str(run.snapshots),
            size(run.bytes),
            "" if run.published_at is None else moment(run.published_at),
            "" if origin is None else f"{origin['run']}/{origin['sequence']}",
            style="red" if run.problem else None,
        )
    problems = [f"{run.name}: {run.problem}" for run in runs if run.problem]
    if not runs:
        problems = ["This store holds no run. Is --store right?"]
    yield table
    yield from map(Text, problems)


def bundle_tables(facts: Mapping[str, Any], *, files: bool) -> Iterator[Table]:
    """One bundle: what it is, who owns its groups, its files by role (or each of them)."""
    anchor = facts["anchor"]
    stands_on = "itself" if anchor is None else "the initial model"
    if anchor is not None and anchor["sequence"] is not None:
        stands_on = f"checkpoint {anchor['sequence']} of step {anchor['step']}"
    yield facts_table(
        f"{facts['run']}/{facts['sequence']}",
        {
            "kind": facts["kind"].replace("_", " ") + (" (retired)" if facts["retired"] else ""),
            "train step": facts["step"],
            "step of its model": facts["model_step"],
            "anchor": stands_on,
            "cut": moment(facts["cut_time"]),
            "age": duration(facts["age_s"]),
            "verified": _verified(facts["verification"]),
            "written by": facts["writer"],
            "identity": facts["identity"][:12],
            "size": size(facts["bytes"]),
        },
    )
    yield facts_table("Owners of prompt groups", facts["owners"])
    yield facts_table("Counts", facts["counts"])
    yield _files_table(facts["files"], each=files)


def _verified(verification: Mapping[str, Any] | None) -> str:
    if verification is None:
        return "never"
    when = moment(verification["verified_at"]) + (", by a restore drill" if verification["drill"] else "")
    problem = verification["problem"]
    return when if problem is None else f"bad since {when}: {problem}"


def _files_table(files: Sequence[Mapping[str, Any]], *, each: bool) -> Table:
    table = Table(title="Files", title_justify="left")
    for column in ("role", "kind", "rows", "size", "path" if each else "files"):
        table.add_column(column, justify="left" if column in ("role", "kind", "path") else "right", overflow="fold")
    if each:
        for file in files:
            rows = "" if file["rows"] is None else shown(file["rows"])
            table.add_row(file["role"], file["kind"] or "", rows, size(file["bytes"]), file["path"])
        return table
    sums: dict[tuple[str, str], list[int]] = {}
    for file in files:
        entry = sums.setdefault((file["role"], file["kind"] or ""), [0, 0, 0])
        for place, value in enumerate((file["rows"] or 0, file["bytes"], 1)):
            entry[place] += value
    for (role, kind), (num_rows, num_bytes, count) in sums.items():
        table.add_row(role, kind, shown(num_rows) if kind else "", size(num_bytes), str(count))
    return table


def diff_table(a: str, b: str, found: BundleDiff) -> Table:
    """What happened from A to B: numbers, and the first ids."""
    table = Table(title=f"From {a} to {b}", title_justify="left")
    table.add_column("what", style="bold")
    table.add_column("number", justify="right")
    table.add_column("which", overflow="fold")
    words = {
        "groups that appeared": found.appeared,
        "siblings sealed": found.sealed,
        "groups published": found.published,
        "groups trained": found.trained,
        "prompts dropped": found.dropped,
        "model calls that went on": found.calls_went_on,
        "model calls that ended": found.calls_ended,
        f"groups that {b} does not know": found.absent,
    }
    for what, ids in words.items():
        table.add_row(what, str(len(ids)), ", ".join(ids[:_SHOWN]) + (" ..." if len(ids) > _SHOWN else ""))
    table.add_section()
    for name, (before, now) in found.counts.items():
        table.add_row(name.replace("_", " "), f"{now - before:+,}", f"{before:,} to {now:,}")
    table.add_section()
    for difference in found.config:
        table.add_row("configuration", "", Text(difference))
    return table


def prune_tables(plan: PrunePlan, done: Pruned | None) -> Iterator[Table | Text]:
    """What is freed, or was; the lines below say what comes next."""
    table = Table(title=f"Retention of {plan.run}", title_justify="left")
    for column in ("why", "files", "size"):
        table.add_column(column, justify="left" if column == "why" else "right")
    reasons = {"retired": "only retired snapshots name them", "unreachable": "nothing names them (older than an hour)"}
    for reason, words in reasons.items():
        files = [file for file in plan.files if file.reason == reason]
        table.add_row(words, str(len(files)), size(sum(file.bytes for file in files)))
    retires = ", ".join(map(str, plan.retires)) or "none"
    lines = [f"Snapshots and checkpoints to retire: {retires}."]
    if done is None:
        lines.append("Nothing was changed: this is a dry run; --apply does it.")
        if plan.may_be_live:
            lines.append(f"The run wrote {plan.quiet_s:.0f} s ago: its controller may be live and does this by itself.")
    else:
        lines = [f"Retired: {retires}. Deleted {len(done.deleted)} files ({size(plan.bytes)} with those that failed)."]
        lines += list(done.problems)
    yield table
    yield from map(Text, lines)


def query_tables(frame: pl.DataFrame, *, limit: int) -> Iterator[Table | Text]:
    """The first lines of an answer, and how many more there are."""
    table = _plain_table("", *frame.columns)
    for row in frame.head(limit).iter_rows():
        table.add_row(*(Text("" if value is None else shown_cell(value)) for value in row))
    yield table
    if frame.height > limit:
        yield Text(f"{frame.height - limit:,} more lines: raise --limit")


def shown_cell(value: Any) -> str:
    """A value as SQL gave it: numbers without thousands separators, so that they can be pasted."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def duration(seconds: float) -> str:
    """A span of time for people."""
    for unit, length in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"


def _plain_table(title: str, *columns: str) -> Table:
    table = Table(title=title or None, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
