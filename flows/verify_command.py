"""`midflight verify`: what verification finds, for people and machines. Nothing but its results is written."""

from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from flows.store_commands import put_json
from flows.tables import verification_table
from storage.filesystem import open_store
from storage.runs import layout_of
from tasks.bundle_checks import RunReport, corruption_of, runs_of, verify_run
from tasks.restore_drill import Drill


def verify_runs(run: str | None, store_url: str, *, drill: bool, record: bool, as_json: bool) -> None:
    """One run, or every run of a store. Raises SnapshotCorrupt naming each defect, after everything was shown."""
    store = open_store(store_url)
    layouts = [layout_of(name) for name in (runs_of(store) if run is None else [run])]
    scratch = Drill() if drill else None
    reports: list[RunReport] = []
    for layout in layouts:
        reports.append(verify_run(store, layout, drill=scratch, record=record))
        if not as_json:
            _show(reports[-1])
    if as_json:
        put_json({"store": store.url, "drill": drill, "runs": [_facts(report) for report in reports]})
    error = corruption_of(reports)
    if error is not None:
        raise error


def _show(report: RunReport) -> None:
    console = Console()
    console.print(verification_table(report.run, report.checks))
    for warning in report.warnings:
        console.print(Text(warning, style="yellow"), soft_wrap=True)


def _facts(report: RunReport) -> dict[str, object]:
    return {**asdict(report), "bad": len(report.bad)}
