"""Retention from outside: what it would free in a run that no controller holds, and freeing it.

Pruning publishes a `retired` manifest in the slot behind the newest before it deletes anything. A controller that
publishes in between wins that slot and nothing is deleted; one that comes later finds the slot taken and is fenced.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from storage.checkpoint_metrics import score_of
from storage.errors import Fenced, NotFound, RunAlreadyLive, StoreError
from storage.filesystem import Store
from storage.layout import RunLayout
from storage.manifests import BrokenSlot, Manifest, ManifestDraft, ManifestLog
from storage.retention import GRACE_S, Keep, clock_skew_s, garbage_of, known_bad_of, split
from storage.run_config import RunConfig
from storage.runs import Log, log_of_run, saved_config

# A live controller writes its trace all the time; one that was silent for so long is dead or stuck.
QUIET_S = 600.0


@dataclass(frozen=True, slots=True)
class Freed:
    """One file that goes, and why: `retired` (only retired bundles name it, or it is the result of verifying one) or
    `unreachable` (no manifest names it).
    """

    path: str
    bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """What pruning does: bundles to retire, files to delete. `quiet_s`: seconds since the run last wrote anything.

    `behind` is the newest slot of the log that the plan was made from.
    """

    run: str
    behind: int
    retires: tuple[int, ...]
    files: tuple[Freed, ...]
    quiet_s: float

    @property
    def may_be_live(self) -> bool:
        """Whether a controller may still write to the run."""
        return self.quiet_s < QUIET_S

    @property
    def bytes(self) -> int:
        """Bytes that are freed."""
        return sum(file.bytes for file in self.files)


@dataclass(frozen=True, slots=True)
class Pruned:
    """What was done: the slot of the `retired` manifest (None: nothing to do), deleted paths, refused deletions."""

    sequence: int | None
    deleted: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def plan_prune(store: Store, layout: RunLayout, *, keep: Keep | None = None, grace_s: float = GRACE_S) -> PrunePlan:
    """What pruning would free now. Reads only. `keep` None: what the newest configuration of the run says.

    Raises: NotFound for no such run; StoreUnavailable.
    """
    return _plan(store, layout, log_of_run(store, layout), keep=keep, grace_s=grace_s)


def prune(
    store: Store,
    layout: RunLayout,
    *,
    keep: Keep | None = None,
    grace_s: float = GRACE_S,
    take_over: bool = False,
) -> tuple[PrunePlan, Pruned]:
    """Free what `plan_prune` shows.

    Raises: NotFound; RunAlreadyLive when the run wrote in the last `QUIET_S` seconds (unless `take_over`: a controller
    that still lives is fenced then), or when one published while this was at work. Nothing was deleted then.
    """
    log_of_run(store, layout)
    log = ManifestLog(store, layout, f"prune-{uuid.uuid4().hex[:12]}")
    last = log.follow()
    plan = _plan(store, layout, log.read()[: last + 1], keep=keep, grace_s=grace_s, skew_s=_measured_skew_s(store))
    if plan.may_be_live and not take_over:
        raise RunAlreadyLive(
            f"run '{layout.run}' wrote to {store.url} {plan.quiet_s:.0f} s ago: its controller may be live, and it "
            f"does this by itself. End it, wait until {QUIET_S:.0f} s have passed, or give --take-over, which fences it"
        )
    if not plan.retires and not plan.files:
        return plan, Pruned(None)
    try:
        sequence = log.append(ManifestDraft(kind="retired", retires=plan.retires)).sequence
    except Fenced as error:
        raise RunAlreadyLive(
            f"run '{layout.run}': a controller published while it was to be pruned ({error}); nothing was deleted, it "
            "does this by itself"
        ) from error
    deleted, problems = [], []
    for file in plan.files:
        try:
            store.delete(file.path)
            deleted.append(file.path)
        except StoreError as error:
            problems.append(str(error))
    return plan, Pruned(sequence, tuple(deleted), tuple(problems))


def keep_of(store: Store, config: RunConfig) -> Keep:
    """What a run's own retention keeps under this configuration."""
    return Keep(
        checkpoints=config.checkpointing.keep,
        per_anchor=config.rollout_checkpointing.keep_per_anchor,
        best=config.checkpointing.keep_best,
        score=lambda checkpoint: score_of(store, checkpoint, config.checkpointing),
    )


def _plan(
    store: Store, layout: RunLayout, slots: Log, *, keep: Keep | None, grace_s: float, skew_s: float = 0.0
) -> PrunePlan:
    bad = known_bad_of(store, layout, slots)
    kept, retires = split(slots, keep or _keep_of_newest(store, layout, slots), bad=bad)
    paths = garbage_of(store, layout, slots, kept=kept, pinned=frozenset(), grace_s=grace_s + skew_s)
    named = {entry.path: entry.bytes for slot in slots if isinstance(slot, Manifest) for entry in slot.files}
    files = [_freed(store, layout, path, named) for path in paths]
    return PrunePlan(layout.run, slots[-1].sequence, retires, tuple(files), _quiet_s(store, layout, slots, skew_s))


def _freed(store: Store, layout: RunLayout, path: str, named: Mapping[str, int]) -> Freed:
    if path in named:
        return Freed(path, named[path], "retired")
    is_verdict = path.startswith(f"{layout.verifications}/")
    return Freed(path, _size(store, path), "retired" if is_verdict else "unreachable")


def _measured_skew_s(store: Store) -> float:
    """How far this machine's clock is ahead of the store's, by a file that is written for it: with a wrong clock a live
    run would look quiet, and its newest files old.
    """
    path = f"probe-{uuid.uuid4().hex}"
    store.write(path, b"")
    try:
        return clock_skew_s(store, path)
    finally:
        store.delete(path)


def _keep_of_newest(store: Store, layout: RunLayout, slots: Sequence[Manifest | BrokenSlot]) -> Keep:
    for slot in reversed(slots):
        if isinstance(slot, Manifest) and slot.config:
            return keep_of(store, saved_config(layout, slot))
    return keep_of(store, RunConfig(name=layout.run))


def _quiet_s(store: Store, layout: RunLayout, slots: Log, skew_s: float) -> float:
    """Seconds since the newest manifest or trace was written."""
    ages = []
    for path in [layout.manifest(slots[-1].sequence), *filter(layout.is_trace_source, store.list(layout.traces))]:
        try:
            ages.append(store.age_s(path) - skew_s)
        except NotFound:
            continue
    return max(min(ages, default=QUIET_S), 0.0)


def _size(store: Store, path: str) -> int:
    try:
        return store.size(path)
    except NotFound:
        return 0
