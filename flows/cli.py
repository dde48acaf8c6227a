"""The `midflight` command."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flows.chaos.scenario import Kind, scenarios
from flows.config_files import load_config
from flows.config_reference import config_reference, filled
from flows.event_reference import filled_events
from flows.home import Home
from flows.store_commands import AsJson, store_app
from flows.tables import error_panel
from storage.errors import ConfigurationError, MidflightError

MISTAKE, FAILURE, INTERRUPTED = 2, 1, 130

app = typer.Typer(
    name="midflight",
    help="Asynchronous RL post-training whose rollouts survive a crash: train, be killed, restore, go on.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

ConfigFile = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="YAML file of the run, for example configs/tiny.yaml.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Replace one value, e.g. algorithm.max_steps=50. Repeatable."),
]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="Name of the run (`name` in its YAML file).")]
StoreUrl = Annotated[
    str | None, typer.Option("--store", help="Folder or fsspec URL of the store. Default: the store of this home.")
]


@app.command(
    epilog="Examples:\n\n`midflight train configs/tiny.yaml`\n\n"
    "`midflight train configs/demo.yaml --set name=second --set algorithm.max_steps=200`\n\n"
    "`midflight train configs/demo.yaml --take-over`"
)
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Take the run over from whoever trains it now, here or elsewhere.")
    ] = False,
) -> None:
    """Train a run from where it stands to its last step.

    Starts a Prefect server and worker and a Ray head for the time being, unless PREFECT_API_URL or RAY_ADDRESS name
    existing ones. A run that was stopped or killed is restored and goes on.
    """
    from flows.train_command import train_run

    train_run(load_config(config, overrides or ()), Console(), take_over=take_over)


@app.command(
    epilog="Examples:\n\n`midflight snapshots demo`\n\n`midflight snapshots demo --all --store s3://bucket/runs`"
)
def snapshots(
    run: RunName,
    store: StoreUrl = None,
    everything: Annotated[bool, typer.Option("--all", help="Also claims and what retention removed.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the trainer checkpoints and rollout snapshots that a run can be restored from."""
    from flows.inspect_command import put_snapshots, show_snapshots

    if as_json:
        put_snapshots(run, _store_url(store), everything=everything)
    else:
        show_snapshots(run, _store_url(store), Console(), everything=everything)


@app.command(epilog="Example:\n\n`midflight checkpoint demo`")
def checkpoint(run: RunName) -> None:
    """Save a trainer checkpoint of a live run at its next step boundary, and wait until it is durable."""
    from flows.checkpoint_command import save_checkpoint_of

    save_checkpoint_of(run, Console())


@app.command(
    epilog="Examples:\n\n`midflight verify demo`\n\n`midflight verify --drill --store s3://bucket/runs --json`"
)
def verify(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="Name of the run. Default: every run.")] = None,
    store: StoreUrl = None,
    drill: Annotated[bool, typer.Option("--drill", help="Also restore each bundle into a scratch runtime.")] = False,
    no_record: Annotated[bool, typer.Option("--no-record", help="Write nothing: the store is read-only.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read every published bundle of a run, or of a whole store, and compare it with its manifest. Exit code 1 when one
    is bad.

    Sizes, checksums, tables, references and invariants are compared; with --drill, also what a restore makes of them.
    The result is kept beside the manifests: a bundle that is known to be bad is not restored.
    """
    from flows.verify_command import verify_runs

    verify_runs(run, _store_url(store), drill=drill, record=not no_record, as_json=as_json)


@app.command(
    epilog="Examples:\n\n`midflight trace demo`\n\n`midflight trace demo --steps 50`\n\n"
    "`midflight trace demo --compact`"
)
def trace(
    run: RunName,
    store: StoreUrl = None,
    steps: Annotated[int, typer.Option(min=1, help="How many of the newest steps to list.")] = 20,
    compact: Annotated[
        bool, typer.Option("--compact", help="Instead turn the traces of ended processes into Parquet.")
    ] = False,
) -> None:
    """Show batch age and reward per train step, what each stop cost, and the exactly-once audit."""
    from flows.inspect_command import compact_trace, show_trace

    if compact:
        compact_trace(run, _store_url(store), Console())
        return
    show_trace(run, _store_url(store), Console(), steps=steps)


@app.command(epilog="Examples:\n\n`midflight audit demo`\n\n`midflight audit demo --store s3://bucket/runs --json`")
def audit(run: RunName, store: StoreUrl = None, as_json: AsJson = False) -> None:
    """Account for every prompt and every trained row of a run, from trace, manifests and dataset alone. Exit code 1
    when a promise is broken.

    Each (prompt, epoch, generation) was trained at most once and none was skipped, every drop is explained, tokens are
    of weights that were there, and the rows that were trained are those that were sealed.
    """
    from flows.audit_command import audit_run

    audit_run(run, _store_url(store), Console(), as_json=as_json)


@app.command(
    "restore-plan",
    epilog="Examples:\n\n`midflight restore-plan demo`\n\n`midflight restore-plan demo --store s3://bucket --json`",
)
def restore_plan(run: RunName, store: StoreUrl = None, as_json: AsJson = False) -> None:
    """Show what a restore of the run would reuse, run again and drop, with the seconds that this will take, and what
    the last restore came to beside its plan.
    """
    from flows.restore_plan_command import show_restore_plan

    show_restore_plan(run, _store_url(store), Console(), as_json=as_json)


@app.command(
    epilog="Examples:\n\n`midflight report demo --html report.html`\n\n"
    "`midflight report stopped --against whole --against another`\n\n`midflight report demo --json`"
)
def report(
    run: RunName,
    against: Annotated[
        list[str] | None,
        typer.Option(metavar="RUN", help="A run of the same store that was never stopped. Repeatable."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Also write one HTML page with interactive plots, which needs no network.")
    ] = None,
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Report what the trace tells: batch age and staleness, where the time of the groups went, snapshots, what each
    stop cost, lost progress against other runs, and the exactly-once audit.
    """
    from flows.report_command import report_run

    report_run(run, _store_url(store), Console(), against=against or (), html=html, as_json=as_json)


@app.command(
    epilog="Examples:\n\n`midflight demo`\n\n`midflight demo --multi-turn`\n\n"
    "`midflight demo --set algorithm.max_steps=60 --output /tmp/demo`"
)
def demo(
    overrides: Overrides = None,
    multi_turn: Annotated[
        bool, typer.Option("--multi-turn", help="A game of up to four turns, restored in the middle of its episodes.")
    ] = False,
    output: Annotated[
        Path, typer.Option(help="Folder for demo-report.json and demo-reward.svg.", file_okay=False)
    ] = Path(),
) -> None:
    """Train a tiny model, kill everything in mid-rollout, restore, train on, and account for every prompt.

    Takes about five minutes on two cores and leaves nothing running.
    """
    from flows.demo import run_demo

    run_demo(overrides or (), output, Console(), multi_turn=multi_turn)


@app.command(epilog="Example:\n\n`midflight up`")
def up() -> None:
    """Start the local services and keep them, so that runs start faster and the Prefect UI stays."""
    from flows.local_services import start_and_keep

    console = Console()
    with console.status("Starting Prefect and Ray"):
        state = start_and_keep(Home.current(), os.environ)
    console.print(f"Prefect UI: {state.prefect_api_url.removesuffix('/api')}\nRay: {state.ray_address}")
    console.print("`midflight down` ends both.")


@app.command(epilog="Examples:\n\n`midflight serve`\n\n`PREFECT_API_URL=https://prefect.example/api midflight serve`")
def serve() -> None:
    """Serve the deployments until Ctrl-C: Prefect server, worker and Ray on this machine, and the page to open.

    PREFECT_API_URL or RAY_ADDRESS name existing ones; a worker is started here in any case.
    """
    from flows.serve_command import serve_deployments

    serve_deployments(Home.current(), Console())


@app.command(epilog="Example:\n\n`midflight down`")
def down() -> None:
    """End the local services of this home, and with them whatever runs there."""
    from flows.local_services import stop

    home = Home.current()
    ended = stop(home)
    Console().print(f"The services of {home.root} have ended." if ended else f"No services run for {home.root}.")


@app.command(
    epilog="Examples:\n\n`midflight chaos --count 20`\n\n`midflight chaos --kind torn-file --seed 17 --count 1 --keep`"
)
def chaos(
    count: Annotated[int, typer.Option(min=1, help="How many scenarios; 20 meet every kind.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="The first seed; each scenario takes the next.")] = 0,
    kind: Annotated[list[Kind] | None, typer.Option(help="Only these kinds, in turn. Repeatable.")] = None,
    at_once: Annotated[int, typer.Option(min=1, help="How many are played beside each other.")] = 2,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the home with logs and stores, and say where.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run the real system on a tiny task under seeded faults, resume it after each, and audit what is left.

    A scenario is a function of its kind and seed. Works in a home of its own with services of its own, and leaves
    nothing. Exit code 1 when a run broke a promise; the command that repeats it is printed.
    """
    from flows.chaos.command import run_chaos

    planned = scenarios(seed, count, kind or ())
    run_chaos(planned, at_once=at_once, keep=keep, as_json=as_json, console=Console(stderr=as_json))


@app.command("config-reference", epilog="Example:\n\n`midflight config-reference > docs/configuration.md`")
def print_config_reference(
    fill: Annotated[
        list[Path] | None,
        typer.Option("--fill", metavar="PAGE", help="Rewrite the tables of keys and of events in this page instead."),
    ] = None,
) -> None:
    """Print the configuration reference as Markdown."""
    for page in fill or ():
        page.write_text(filled_events(filled(page.read_text())))
    if not fill:
        sys.stdout.write(config_reference())


app.add_typer(store_app)


def _store_url(given: str | None) -> str:
    return given or str(Home.current().store)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line: an error of ours is one panel and an exit code, without a traceback."""
    try:
        app(args=arguments)
    except MidflightError as error:
        Console(stderr=True).print(error_panel(error))
        sys.exit(MISTAKE if isinstance(error, ConfigurationError) else FAILURE)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
