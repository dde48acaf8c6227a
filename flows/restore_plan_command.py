"""`midflight restore-plan`: what a restore would reuse, run again and drop, and what the last one came to."""

from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from flows.store_commands import put_json
from storage.errors import FormatUnsupported, NoRestorableState, SnapshotCorrupt, StoreError
from storage.filesystem import open_store
from storage.layout import RunLayout
from storage.restore_figures import RestoreFigures, side_by_side
from storage.run_config import RunConfig
from storage.runs import layout_of
from tasks.accounting import config_of
from tasks.planned_restores import PlannedRestore, last_restore, plan_next


def show_restore_plan(run: str, store_url: str, console: Console, *, as_json: bool) -> None:
    """Raises NotFound; NoRestorableState while nothing was published, or when no bundle is valid."""
    store, layout = open_store(store_url), layout_of(run)
    config = config_of(store, layout)
    following, past = plan_next(store, layout, config), last_restore(store, layout, config)
    if as_json:
        put_json(
            {
                "run": run,
                "next": None if following is None else asdict(following),
                "last": None if past is None else asdict(past),
            }
        )
        return
    if past is not None:
        so_far = "" if past.outcome.is_complete else ", so far"
        title = f"Restored from {past.sequence:08d} at step {past.step}{so_far}"
        console.print(figures_table(title, past.plan, past.outcome.figures))
    if following is not None:
        title = f"If restored now: from {following.sequence:08d} at step {following.step}"
        console.print(figures_table(title, following.figures, None))


def show_plan(config: RunConfig, console: Console) -> PlannedRestore | None:
    """Before a run is trained: what it will be restored from, unless its runtime still lives. Nothing is said of a run
    that can't be restored: the restore itself does.
    """
    store, layout = open_store(config.store.url, deadline_s=config.store.deadline_s), RunLayout(config.name)
    try:
        planned = plan_next(store, layout, config)
    except (NoRestorableState, SnapshotCorrupt, FormatUnsupported, StoreError):
        return None
    if planned is not None:
        title = f"If {config.name} has to be restored: {planned.sequence:08d}, step {planned.step}"
        console.print(figures_table(title, planned.figures, None))
    return planned


def show_outcome(config: RunConfig, planned: PlannedRestore, console: Console) -> None:
    """After it was trained: what the restore came to, if there was one from the planned bundle."""
    store, layout = open_store(config.store.url, deadline_s=config.store.deadline_s), RunLayout(config.name)
    try:
        past = last_restore(store, layout, config, with_plan=False)
    except (SnapshotCorrupt, StoreError):
        return
    if past is not None and past.sequence == planned.sequence:
        so_far = "" if past.outcome.is_complete else ", so far"
        title = f"Restored from {past.sequence:08d}, step {past.step}{so_far}"
        console.print(figures_table(title, planned.figures, past.outcome.figures))


def figures_table(title: str, plan: RestoreFigures | None, actual: RestoreFigures | None) -> Table:
    """Plan and actual side by side; a column of which nothing is known is left out."""
    table = Table("what", title=title, title_justify="left")
    columns = [name for name, figures in (("planned", plan), ("actual", actual)) if figures is not None]
    for name in columns:
        table.add_column(name, justify="right")
    for what, planned, found in side_by_side(plan, actual):
        values = {"planned": planned, "actual": found}
        table.add_row(what, *(values[name] for name in columns))
    return table
