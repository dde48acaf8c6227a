"""`midflight snapshots` and `trace`: what the store says about a run. Nothing is started or changed."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from flows.store_commands import put_json
from flows.tables import BUNDLES, facts_table, shown, snapshots_table
from storage.audit import Audit
from storage.catalog import live_bundles
from storage.errors import BrokenInvariant, NoRestorableState
from storage.filesystem import Store, open_store
from storage.layout import RunLayout
from storage.manifests import BrokenSlot, Manifest
from storage.runs import bundle_facts, layout_of
from storage.trace_analysis import StopCost, batch_age, stop_cost
from storage.trace_compaction import compact_run
from storage.trace_reader import Event, read_events
from storage.verdicts import Verdicts
from tasks.accounting import audit
from tasks.bundle_checks import log_of


def show_snapshots(run: str, store_url: str, console: Console, *, everything: bool) -> None:
    """The bundles of a run. Raises NotFound."""
    store, layout = open_store(store_url), layout_of(run)
    log = log_of(store, layout)
    found = Verdicts(store, layout)
    verdicts = {bundle.sequence: verdict for bundle in _live(log) if (verdict := found.of(bundle)) is not None}
    console.print(snapshots_table(run, log, everything=everything, verdicts=verdicts, warnings=found.warnings))


def put_snapshots(run: str, store_url: str, *, everything: bool) -> None:
    """The bundles of a run as one JSON list, and slots that can't be read. Raises NotFound."""
    store, layout = open_store(store_url), layout_of(run)
    log = log_of(store, layout)
    verdicts, live = Verdicts(store, layout), {bundle.sequence for bundle in _live(log)}
    listed: list[dict[str, object]] = []
    for slot in log:
        if isinstance(slot, BrokenSlot):
            listed.append({"sequence": slot.sequence, "kind": "unreadable", "problem": slot.reason})
        elif slot.kind in BUNDLES:
            facts = bundle_facts(layout, log, slot, verdicts.of(slot) if slot.sequence in live else None)
            del facts["files"]
            listed += [facts] if everything or not facts["retired"] else []
        elif everything:
            listed.append({"sequence": slot.sequence, "kind": slot.kind, "published_at": slot.created_at})
    put_json(listed)


def _live(log: Sequence[Manifest | BrokenSlot]) -> list[Manifest]:
    checkpoints, snapshots = live_bundles(log)
    return [*checkpoints, *snapshots]


def show_trace(run: str, store_url: str, console: Console, *, steps: int) -> None:
    """Batch age, stops, audit. Raises NotFound; BrokenInvariant when the audit finds a broken promise."""
    store, layout = open_store(store_url), layout_of(run)
    log_of(store, layout)
    events = read_events(store, layout)
    console.print(steps_table(events, steps=steps))
    for number, cost in enumerate(stop_cost(store, layout), start=1):
        console.print(facts_table(f"Stop {number}", stop_facts(cost)))
    _show_audit(store, layout, console)


def compact_trace(run: str, store_url: str, console: Console) -> None:
    """Turn the traces of processes that have ended into Parquet. Raises NotFound, SnapshotCorrupt."""
    store, layout = open_store(store_url), layout_of(run)
    log_of(store, layout)
    done = compact_run(store, layout)
    if not done:
        console.print(f"Every trace of run {run} is compacted.")
        return
    table = Table(title="Compacted traces", title_justify="left")
    for column in ("process", "events", "bytes before", "bytes after", "note"):
        table.add_column(column, justify="left" if column in ("process", "note") else "right")
    for one in done:
        figures = map(shown, (one.events, one.bytes_before, one.bytes_after))
        table.add_row(one.process, *(("", "", "") if one.left_alone else figures), one.left_alone)
    console.print(table)


def _show_audit(store: Store, layout: RunLayout, console: Console) -> None:
    try:
        found = audit(store, layout)
    except NoRestorableState as error:
        console.print(str(error))
        return
    console.print(facts_table("Exactly-once audit", audit_facts(found)))
    require_whole(layout.run, found)


def require_whole(run: str, found: Audit) -> None:
    """Raise BrokenInvariant unless every promise was kept."""
    if found.problems:
        raise BrokenInvariant(f"the audit of run {run} found: {'; '.join(found.problems)}")


def steps_table(events: list[Event], *, steps: int) -> Table:
    """The newest steps with batch age, reward and duration."""
    reports = {int(e["step"]): e for e in events if e["event"] == "train_step"}
    table = Table(title="Train steps", title_justify="left")
    for column in ("step", "trained at version", "batch age", "tokens", "reward", "seconds"):
        table.add_column(column, justify="right")
    for age in batch_age(events)[-steps:]:
        report = reports[age.step]
        table.add_row(
            str(age.step),
            str(age.version),
            f"{age.batch_age:.3f}",
            shown(age.num_tokens),
            f"{report['rewards_mean']:.3f}",
            f"{report['seconds']:.3f}",
        )
    return table


def stop_facts(cost: StopCost) -> dict[str, object]:
    """What one stop cost, for people."""
    restored = "the initial model" if cost.sequence is None else f"{cost.sequence:08d} at step {cost.step}"
    return {
        "restored from": restored,
        "seconds until the next start": cost.down_s,
        "seconds from there to the first dispatch": cost.to_first_dispatch_s,
        "seconds between the cut and the stop": cost.lost_s,
        "thrown-away attempt seconds": cost.thrown_away_s,
        "steps trained again from their recorded batches": cost.steps_replayed,
        "steps lost": cost.steps_lost,
        "finished groups reused": cost.groups_reused,
        "unfinished groups continued": cost.groups_unfinished,
        "sealed siblings reused": cost.siblings_reused,
        "siblings resumed": cost.siblings_resumed,
        "turns kept": cost.turns_kept,
        "model calls continued": cost.calls_continued,
        "their tokens kept": cost.tokens_continued,
        "siblings run again": cost.siblings_rerun,
        "tokens kept": cost.tokens_kept,
        "tokens lost": cost.tokens_lost,
    }


def audit_facts(found: Audit) -> dict[str, object]:
    """What was compared and what it came to."""
    frontier = "nothing published" if found.sequence is None else f"bundle {found.sequence:08d}"
    return {
        "frontier": frontier,
        "prompts up to the frontier": found.frontier,
        **{f"owned: {owner.replace('_', ' ')}": count for owner, count in found.owners.items()},
        "trained (prompt, epoch, generation)": found.pairs_trained,
        "of them with a traced result": found.pairs_sealed,
        "steps rolled back by restores": found.steps_rolled_back,
        "events compared": found.events,
        "processes": found.lives,
        "bundles compared": len(found.bundles),
        "model calls compared with what was saved of them": found.calls_compared,
        "bundles that can't be read": ", ".join(f"{sequence:08d}" for sequence in found.unread) or "none",
        "broken promises": len(found.found),
    }
