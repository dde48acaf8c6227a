"""The restore that a run would get now, and what its last one came to, from the store alone. Reads only."""

from dataclasses import dataclass

from storage.catalog import live_bundles, select
from storage.errors import FormatUnsupported, SnapshotCorrupt
from storage.filesystem import Store
from storage.history import History
from storage.layout import RunLayout
from storage.manifests import Manifest, read_log
from storage.restore_figures import RestoreFigures
from storage.restore_outcome import Outcome, outcome_of
from storage.restore_plan import plan_of
from storage.run_config import RunConfig
from storage.snapshot_reader import read_bundle
from storage.trace_reader import read_events


@dataclass(frozen=True, slots=True)
class PlannedRestore:
    """The bundle that is to be restored and what that will come to."""

    sequence: int
    kind: str
    step: int
    figures: RestoreFigures


@dataclass(frozen=True, slots=True)
class PastRestore:
    """What the last restore came to. `plan` is None once retention has freed its bundle."""

    sequence: int
    step: int
    plan: RestoreFigures | None
    outcome: Outcome


def plan_next(store: Store, layout: RunLayout, config: RunConfig) -> PlannedRestore | None:
    """What a restore of the run would come to now; None while nothing is published.

    Raises: NoRestorableState when no candidate is valid; StoreUnavailable.
    """
    saving = config.checkpointing
    target = select(store, layout, mode=saving.restore_mode, allow_older=saving.allow_older).target
    return None if target is None else plan_for(store, layout, target, config)


def plan_for(store: Store, layout: RunLayout, target: Manifest, config: RunConfig) -> PlannedRestore:
    """What a restore of this bundle would come to now. Raises SnapshotCorrupt, FormatUnsupported, StoreUnavailable."""
    bundle = read_bundle(store, layout, target)
    history = History(read_events(store, layout), read_log(store, layout))
    figures = plan_of(bundle, history, keeps_buffer=config.checkpointing.load_replay_buffer)
    return PlannedRestore(target.sequence, target.kind, target.step, figures)


def last_restore(store: Store, layout: RunLayout, config: RunConfig, *, with_plan: bool = True) -> PastRestore | None:
    """What the newest process that restored something came to; None when none has.

    Its plan is made again from its bundle, while that is there. Raises StoreUnavailable.
    """
    log = read_log(store, layout)
    history = History(read_events(store, layout), log)
    restored = [life for life in history.lives if life.restored is not None and life.restored["sequence"] is not None]
    target = history.manifest(int(restored[-1].restored["sequence"])) if restored and restored[-1].restored else None
    if target is None:
        return None
    life = restored[-1]
    before = {earlier.run_process for earlier in history.lives[: history.lives.index(life)]}
    earlier = History([event for event in history.events if event["run_process"] in before], log)
    plan = None
    if with_plan and target in [bundle for kind in live_bundles(log) for bundle in kind]:
        plan = _planned(store, layout, target, earlier, config)
    outcome = outcome_of(history, life)
    return None if outcome is None else PastRestore(target.sequence, target.step, plan, outcome)


def _planned(
    store: Store, layout: RunLayout, target: Manifest, history: History, config: RunConfig
) -> RestoreFigures | None:
    try:
        bundle = read_bundle(store, layout, target)
    except (SnapshotCorrupt, FormatUnsupported):  # freed meanwhile, or damaged: only the plan is missing then
        return None
    return plan_of(bundle, history, keeps_buffer=config.checkpointing.load_replay_buffer)
