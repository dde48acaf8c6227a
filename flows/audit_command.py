"""`midflight audit`: what became of every prompt and row of a run, for people and machines. Nothing is written."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from flows.inspect_command import audit_facts, require_whole
from flows.store_commands import put_json
from flows.tables import facts_table
from storage.audit import Audit
from storage.audit_findings import Finding
from storage.filesystem import open_store
from storage.runs import layout_of
from tasks.accounting import audit

SHOWN = 10


def audit_run(run: str, store_url: str, console: Console, *, as_json: bool) -> None:
    """Account for a run. Raises NotFound; NoRestorableState while nothing was published; BrokenInvariant naming every
    broken promise, after everything was shown.
    """
    store = open_store(store_url)
    found = audit(store, layout_of(run))
    if as_json:
        put_json({"run": run, "store": store.url, **audit_document(found)})
    else:
        console.print(facts_table(f"Audit of {run}", audit_facts(found)))
        for title, kept in (("Broken promises", found.found), ("Not to be proved: events are lost", found.unproven)):
            if kept:
                console.print(findings_table(title, kept))
    require_whole(run, found)


def findings_table(title: str, findings: Sequence[Finding]) -> Table:
    """One line for each promise: how many break it, and the first of them."""
    table = Table(title=title, title_justify="left")
    for column in ("what", "number", "first"):
        table.add_column(column, justify="right" if column == "number" else "left", overflow="fold")
    for row in finding_rows(findings):
        table.add_row(*map(str, row.values()))
    return table


def finding_rows(findings: Sequence[Finding]) -> Iterator[dict[str, Any]]:
    """The lines of that table as plain values."""
    for finding in findings:
        first = ", ".join(finding.ids[:SHOWN]) + " ..." * (len(finding.ids) > SHOWN)
        yield {"what": finding.what, "number": len(finding.ids), "first": first}


def audit_document(found: Audit) -> dict[str, Any]:
    """Everything that was found as plain values, with all ids."""
    fields = asdict(found)
    for several in ("inconsistent", "trained_twice", "skipped", "owned_twice", "beyond_frontier", "missing_steps"):
        del fields[several]
    del fields["replayed_otherwise"]
    return {**fields, "broken": [asdict(finding) for finding in found.found]}
