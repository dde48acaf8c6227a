"""`midflight runs`, `show`, `diff`, `prune`, `fork` and `query`: a store looked at and tended, without a run.

Each takes `--json` for machines: one JSON value on standard output and nothing else.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.home import Home
from flows.preflight import refuse_when_live
from flows.store_tables import bundle_tables, diff_table, prune_tables, query_tables, runs_tables
from storage.bundle_diff import diff_bundles
from storage.errors import ConfigurationError, SnapshotCorrupt
from storage.filesystem import Store, open_store
from storage.forking import fork as fork_run
from storage.pruning import plan_prune
from storage.pruning import prune as prune_run
from storage.query import query as query_run
from storage.run_config import RunConfig
from storage.runs import bundle_facts, find_bundle, layout_of, log_of_run, require_live, summaries
from storage.snapshot_reader import RestoredBundle, read_bundle
from storage.verdicts import Verdicts

store_app = typer.Typer()

RunName = Annotated[str, typer.Argument(metavar="RUN", help="Name of the run; `midflight runs` lists them.")]
Snapshot = Annotated[int, typer.Argument(metavar="SNAPSHOT", help="Number of a snapshot or trainer checkpoint.", min=0)]
StoreUrl = Annotated[
    str | None, typer.Option("--store", help="Folder or fsspec URL of the store. Default: the store of this home.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON value instead of tables.")]


def store_at(url: str | None) -> Store:
    """The store that a command was told to use."""
    return open_store(url or str(Home.current().store))


def put_json(value: Any) -> None:
    """One JSON value on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")


@store_app.command(epilog="Examples:\n\n`midflight runs`\n\n`midflight runs --store s3://bucket/runs --json`")
def runs(store: StoreUrl = None, as_json: AsJson = False) -> None:
    """List the runs of a store: step, checkpoints, snapshots, size, and what each was forked from."""
    opened = store_at(store)
    found = summaries(opened)
    if as_json:
        put_json([asdict(run) for run in found])
    else:
        _show(runs_tables(opened.url, found))


@store_app.command(epilog="Examples:\n\n`midflight show demo 12`\n\n`midflight show demo 12 --files --json`")
def show(
    run: RunName,
    snapshot: Snapshot,
    store: StoreUrl = None,
    files: Annotated[bool, typer.Option("--files", help="Also every file with its size.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show one snapshot or trainer checkpoint: step, anchor, model step, age, owners, counts and files."""
    opened, layout = store_at(store), layout_of(run)
    log = log_of_run(opened, layout)
    bundle, verdicts = find_bundle(opened, layout, log, snapshot), Verdicts(opened, layout)
    facts = bundle_facts(layout, log, bundle, verdicts.of(bundle))
    if as_json:
        put_json({**facts, "warnings": verdicts.warnings})
    else:
        _show(bundle_tables(facts, files=files))
        _show(map(Text, verdicts.warnings))


@store_app.command(
    epilog="Examples:\n\n`midflight diff demo/12 demo/15`\n\n`midflight diff demo/12 second-try/1 --json`"
)
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A bundle, as RUN/SNAPSHOT.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Compare two snapshots or trainer checkpoints: what appeared, was sealed, published, trained or dropped from A to
    B, and which configuration keys differ.
    """
    opened = store_at(store)
    found = diff_bundles(_bundle_named(opened, a), _bundle_named(opened, b))
    if as_json:
        put_json({"a": a, "b": b, **asdict(found)})
    else:
        Console().print(diff_table(a, b, found))


@store_app.command(epilog="Examples:\n\n`midflight prune demo`\n\n`midflight prune demo --apply`")
def prune(
    run: RunName,
    store: StoreUrl = None,
    apply: Annotated[bool, typer.Option("--apply", help="Do it. Without this, only show it.")] = False,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="With --apply: fence a controller that may still be live.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what retention would free: snapshots beyond the run's own limits, and files that nothing names any more.

    A live run does this by itself. `--apply` is refused while the run's controller may be live.
    """
    if take_over and not apply:
        raise ConfigurationError("--take-over is given without --apply: nothing is taken over by looking; add --apply")
    opened, layout = store_at(store), layout_of(run)
    plan, done = plan_prune(opened, layout), None
    if apply:
        if not take_over:
            refuse_when_live(RunConfig(name=run), Home.current())
        plan, done = prune_run(opened, layout, take_over=take_over)
    if as_json:
        facts = {**asdict(plan), "bytes": plan.bytes, "may_be_live": plan.may_be_live, "applied": apply}
        put_json(facts | ({} if done is None else {"done": asdict(done)}))
    else:
        _show(prune_tables(plan, done))


@store_app.command(
    epilog="Examples:\n\n`midflight fork demo 12 second-try`\n\n`midflight fork demo 12 second-try --json`"
)
def fork(
    run: RunName,
    snapshot: Snapshot,
    new_run: Annotated[str, typer.Argument(metavar="NEW_RUN", help="Name of the new run.")],
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Make a new run that starts from any snapshot or trainer checkpoint of another one.

    Everything is copied: the runs share no file. Train it with a configuration of that name: a copy of the run's YAML
    file with another `name`.
    """
    made = fork_run(store_at(store), layout_of(run), snapshot, new_run)
    facts: Mapping[str, Any] = {
        "run": made.run,
        "snapshot": made.target.sequence,
        "anchor": None if made.anchor is None else made.anchor.sequence,
        "step": made.target.step,
        "forked_from": {"run": run, "sequence": made.source.sequence},
    }
    if as_json:
        put_json(facts)
        return
    Console().print(
        f"Run {made.run} starts from snapshot {snapshot} of {run}, at step {made.target.step}. Train it with "
        f"`midflight train CONFIG --set name={made.run}`.",
        soft_wrap=True,
    )


@store_app.command(
    epilog='Examples:\n\n`midflight query demo "SELECT owner, count(*) AS groups FROM groups GROUP BY owner"`\n\n'
    "`midflight query demo \"SELECT step, rewards_mean FROM trace WHERE event = 'train_step'\" --json`"
)
def query(
    run: RunName,
    sql: Annotated[
        str, typer.Argument(metavar="SQL", help="One SELECT over rows, groups, calls, trace and snapshots.")
    ],
    store: StoreUrl = None,
    snapshot: Annotated[
        int | None,
        typer.Option(min=0, help="Whose rows, groups and calls. Default: those that a restore would choose."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Lines of the table at most (not of --json).")] = 100,
    as_json: AsJson = False,
) -> None:
    """Ask a run in SQL (Polars): frames `rows`, `groups`, `calls`, `trace` and `snapshots`. Nothing is changed."""
    found = query_run(store_at(store), layout_of(run), sql, sequence=snapshot)
    if as_json:
        put_json(found.to_dicts())
    else:
        _show(query_tables(found, limit=limit))


def _show(things: Iterable[Table | Text]) -> None:
    console = Console()
    for thing in things:
        console.print(thing, soft_wrap=isinstance(thing, Text))


def _bundle_named(store: Store, name: str) -> RestoredBundle:
    """The bundle RUN/SNAPSHOT, read and verified."""
    run, separator, number = name.rpartition("/")
    if not separator or not number.isdecimal():
        raise ConfigurationError(f"'{name}' names no bundle: give RUN/SNAPSHOT, such as demo/12")
    layout = layout_of(run)
    log = log_of_run(store, layout)
    manifest = find_bundle(store, layout, log, int(number))
    require_live(layout, log, manifest)
    try:
        return read_bundle(store, layout, manifest)
    except SnapshotCorrupt as error:
        require_live(layout, log_of_run(store, layout), manifest)
        raise error
