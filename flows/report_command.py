"""`midflight report`: tables in the terminal, one page with plots, or JSON. The store is read, nothing is changed."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.table import Table

from flows.inspect_command import audit_facts
from flows.store_commands import put_json
from flows.tables import shown
from storage.analytics.run_report import RunReport, read_report
from storage.audit import Audit
from storage.errors import BrokenInvariant, ConfigurationError, NoRestorableState
from storage.filesystem import Store, open_store
from storage.history import History
from storage.layout import RunLayout
from storage.restart_bias import Comparison, bias_rows, restart_bias
from storage.runs import layout_of, log_of_run
from storage.trace_reader import read_events
from tasks.accounting import audit
from tasks.bias_table import bias_tables
from tasks.report_tables import ReportTable, report_tables

_FEW = 4


def report_run(
    run: str, store_url: str, console: Console, *, against: Sequence[str], html: Path | None, as_json: bool
) -> None:
    """Report a run, beside others. Raises NotFound; BrokenInvariant, after the report, for a broken promise."""
    store = open_store(store_url)
    report = read_report(store, layout_of(run), [layout_of(other) for other in against])
    found = audit_of(store, layout_of(run))
    facts, problems = ({}, []) if found is None else (audit_facts(found), found.problems)
    bias = bias_of(store, layout_of(run))
    tables = [*report_tables(report, facts), *bias_tables(bias)]
    if html is not None:
        write_page(html, report, bias, tables, problems, store.url)
    if as_json:
        document = {**report.tables(), "restart_bias": list(bias_rows(bias)), "audit": facts, "problems": problems}
        put_json({"run": run, "against": list(against), **document})
    else:
        for table in tables:
            console.print(_rich(table, console.width))
        if html is not None:
            console.print(f"Written: {html}", soft_wrap=True)
    if problems:
        raise BrokenInvariant(f"the audit of run {run} found: {'; '.join(problems)}")


def audit_of(store: Store, layout: RunLayout) -> Audit | None:
    """The exactly-once audit; None for a run that has published nothing yet."""
    try:
        return audit(store, layout)
    except NoRestorableState:
        return None


def bias_of(store: Store, layout: RunLayout) -> list[Comparison]:
    """Work that lived through a restart of a run against work that did not."""
    return restart_bias(History(read_events(store, layout), log_of_run(store, layout)))


def write_page(
    path: Path,
    report: RunReport,
    bias: Sequence[Comparison],
    tables: Sequence[ReportTable],
    problems: Sequence[str],
    store_url: str,
) -> None:
    """The report as one HTML file, whole or not at all. Raises ConfigurationError when it can't be written there."""
    from tasks.bias_panel import bias_panels
    from tasks.report_figures import panels
    from tasks.report_page import report_page

    page = report_page(report.run, store_url, [*panels(report), *bias_panels(bias)], tables, problems)
    unfinished = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(page, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink()
        raise ConfigurationError(
            f"--html names '{path}', which can't be written: {error}; give another file"
        ) from error


def _rich(table: ReportTable, width: int) -> Table:
    """Rows as lines; as columns where they are few and their lines would not fit."""
    drawn = Table(title=table.title, title_justify="left", caption=table.note or None, caption_justify="left")
    if table.key == "summary" or (len(table.rows) <= _FEW and _needed(table) > width):
        named = table.key == "summary"
        names = ["value"] if named else [shown(value) for value in _first(table)]
        drawn.add_column("" if named else next(iter(table.rows[0])))
        for name in names:
            drawn.add_column(name, justify="right", overflow="fold")
        for column in list(table.rows[0])[0 if named else 1 :]:
            drawn.add_row(column, *(shown(row[column]) for row in table.rows))
        return drawn
    for column in table.rows[0]:
        is_text = any(isinstance(row[column], str) and row[column] for row in table.rows)
        drawn.add_column(column, justify="left" if is_text else "right", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(shown(value) for value in row.values()))
    return drawn


def _first(table: ReportTable) -> list[object]:
    """The first column, which names the rows."""
    column = next(iter(table.rows[0]))
    return [row[column] for row in table.rows]


def _needed(table: ReportTable) -> int:
    """Characters that the rows take as lines, with headings that break between words."""
    cells = [[len(shown(row[column])) for row in table.rows] for column in table.rows[0]]
    headings = [max(map(len, column.split()), default=0) for column in table.rows[0]]
    return sum(max(heading, *lengths) + 3 for heading, lengths in zip(headings, cells, strict=True)) + 1
