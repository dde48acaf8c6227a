"""Which runs a store holds, and one bundle of a run by its number. Reads only."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from storage.catalog import live_bundles
from storage.errors import ConfigurationError, FormatUnsupported, NotFound, SnapshotCorrupt
from storage.filesystem import Store
from storage.layout import RunLayout
from storage.manifests import BrokenSlot, Manifest, read_log
from storage.refusals import unsupported
from storage.run_config import RunConfig
from storage.run_record import RunRecord, read_run_record
from storage.verdicts import Verdict

RUN_NAME = r"^[a-z0-9][a-z0-9._-]{0,62}$"
_MARKS = re.compile(r"(?P<run>[^/]+)/(?:manifests/[^/]+|run\.json)")
_OWNERS = {
    "trained": "trained_groups",
    "buffer": "buffered_groups",
    "ledger": "ledger_groups",
    "spares": "spare_prompts",
    "dropped": "dropped_prompts",
}

Log = Sequence[Manifest | BrokenSlot]


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run of a store. `problem` is empty unless its record or its log can't be read as a whole.

    Times in Unix seconds; `bytes` are those that the bundles which can be restored refer to, each file once.
    """

    name: str
    created_at: float | None
    published_at: float | None
    step: int | None
    checkpoints: int
    snapshots: int
    bytes: int
    forked_from: dict[str, Any] | None
    problem: str


def layout_of(run: str) -> RunLayout:
    """The layout of a run that was named by a person. Raises ConfigurationError for what can't be a run's name."""
    if not re.fullmatch(RUN_NAME, run):
        raise ConfigurationError(
            f"'{run}' is no name of a run (small letters, digits, '.', '_' and '-'): give the `name` in its YAML file; "
            "`midflight runs` lists those of the store"
        )
    return RunLayout(run)


def run_names(store: Store) -> list[str]:
    """Every folder of the store that holds a manifest log or a run record."""
    found = (_MARKS.fullmatch(path) for path in store.list(""))
    return sorted({match["run"] for match in found if match is not None})


def log_of_run(store: Store, layout: RunLayout) -> Log:
    """The manifest log of a run that exists. Raises NotFound naming the runs there are."""
    log = read_log(store, layout)
    if log:
        return log
    names = run_names(store)
    if layout.run in names:
        raise NotFound(f"run '{layout.run}' in {store.url} has no manifest yet: nothing was published")
    known = f"it holds {', '.join(names)}" if names else "it holds no run at all; is --store right?"
    raise NotFound(f"store {store.url} holds no run '{layout.run}': {known}")


def summaries(store: Store) -> list[RunSummary]:
    """Every run of a store, by name. Raises StoreUnavailable."""
    return [_summary(store, RunLayout(name)) for name in run_names(store)]


def _summary(store: Store, layout: RunLayout) -> RunSummary:
    log, problems = read_log(store, layout), []
    record: RunRecord | None = None
    try:
        record = read_run_record(store, layout)
    except NotFound:
        pass  # a run that was never started by a controller, only claimed, has none
    except (SnapshotCorrupt, FormatUnsupported) as error:
        problems.append(str(error))
    problems += [slot.reason for slot in log if isinstance(slot, BrokenSlot)]
    checkpoints, snapshots = live_bundles(log)
    live = [*checkpoints, *snapshots]
    files = {entry.path: entry.bytes for bundle in live for entry in bundle.files}
    return RunSummary(
        name=layout.run,
        created_at=None if record is None else record.created_at,
        published_at=max((bundle.created_at for bundle in live), default=None),
        step=max((bundle.step for bundle in live), default=None),
        checkpoints=len(checkpoints),
        snapshots=len(snapshots),
        bytes=sum(files.values()),
        forked_from=None if record is None else record.forked_from,
        problem="; ".join(problems),
    )


def find_bundle(store: Store, layout: RunLayout, log: Log, sequence: int) -> Manifest:
    """The trainer checkpoint or snapshot in one slot of the log, retired or not.

    Raises: NotFound for no such bundle, naming those there are; SnapshotCorrupt for a slot that can't be read.
    """
    slot = next((slot for slot in log if slot.sequence == sequence), None)
    if isinstance(slot, BrokenSlot):
        raise SnapshotCorrupt(f"{slot.reason}; choose another snapshot of `midflight snapshots {layout.run}`")
    if isinstance(slot, Manifest) and slot.kind in ("trainer_checkpoint", "rollout_snapshot"):
        return slot
    what = "is not there" if slot is None else f"is a {slot.kind} of the log"
    checkpoints, snapshots = live_bundles(log)
    numbers = ", ".join(str(number) for number in sorted(b.sequence for b in (*checkpoints, *snapshots))) or "none yet"
    raise NotFound(
        f"run '{layout.run}' in {store.url}: {sequence} {what}; its snapshots and checkpoints are {numbers} "
        f"(`midflight snapshots {layout.run}`)"
    )


def require_live(layout: RunLayout, log: Log, bundle: Manifest) -> None:
    """Raises NotFound for a bundle whose files retention has freed."""
    retired_by = [s.sequence for s in log if isinstance(s, Manifest) and bundle.sequence in s.retires]
    if retired_by:
        raise NotFound(
            f"{layout.manifest(bundle.sequence)}: retired by {retired_by[0]:08d}, its files are freed; choose another "
            f"snapshot of `midflight snapshots {layout.run}`"
        )


def saved_config(layout: RunLayout, bundle: Manifest) -> RunConfig:
    """The configuration that a bundle was written under. Raises FormatUnsupported when this Midflight can't read it."""
    try:
        return RunConfig.model_validate(bundle.config)
    except ValidationError as error:
        keys = sorted({".".join(map(str, problem["loc"])) for problem in error.errors()})
        raise unsupported(layout.manifest(bundle.sequence), f"its configuration has {', '.join(keys)}") from error


def bundle_facts(layout: RunLayout, log: Log, bundle: Manifest, verdict: Verdict | None = None) -> dict[str, Any]:
    """What log and newest verification say of one bundle, as plain values. Times in Unix seconds."""
    anchor = bundle.anchor
    retired = any(isinstance(slot, Manifest) and bundle.sequence in slot.retires for slot in log)
    cut_time = bundle.cut_time if bundle.cut_time is not None else bundle.created_at
    return {
        "run": layout.run,
        "sequence": bundle.sequence,
        "kind": bundle.kind,
        "step": bundle.step,
        "model_step": bundle.step if anchor is None else anchor.step,
        "anchor": None if anchor is None else anchor.model_dump(mode="json", include={"kind", "step", "sequence"}),
        "retired": retired,
        "cut_time": cut_time,
        "published_at": bundle.created_at,
        "age_s": max(time.time() - cut_time, 0.0),
        "writer": bundle.writer,
        "identity": bundle.identity,
        "logical_digest": bundle.logical_digest,
        "bytes": sum(entry.bytes for entry in bundle.files),
        "owners": {owner: bundle.counts.get(count, 0) for owner, count in _OWNERS.items()},
        "counts": dict(bundle.counts),
        "verification": None
        if verdict is None
        else {"verified_at": verdict.verified_at, "drill": verdict.drill, "problem": verdict.problem},
        "files": [entry.model_dump(mode="json") for entry in bundle.files],
    }
