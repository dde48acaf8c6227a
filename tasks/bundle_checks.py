"""Reads every published bundle of a run and judges it: files, tables, references, invariants, and a restore if asked.

Verdicts are kept beside the manifests (`storage.verdicts`), so that what is known to be bad is not offered again.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from storage.catalog import anchor_mismatch, live_bundles
from storage.errors import ConfigurationError, FormatUnsupported, NotFound, SnapshotCorrupt, StoreError
from storage.filesystem import Store
from storage.invariants import InvariantChecks, Order
from storage.layout import RunLayout
from storage.manifests import BrokenSlot, Manifest, read_log
from storage.run_config import RunConfig
from storage.runs import log_of_run, run_names, saved_config
from storage.snapshot_reader import BUNDLE_KINDS, RestoredBundle, read_bundle, verify_model_files
from storage.verdicts import Verdicts, judge, known_bad, moment, put_verdict
from tasks.accounting import prompt_order
from tasks.restore_drill import Drill

# Times of a manifest that differ by more are told: some machine's clock is wrong.
CLOCK_TOLERANCE_S = 300.0


@dataclass(frozen=True, slots=True)
class BundleCheck:
    """What became of one slot of the manifest log. `problem` is empty when everything is as promised.

    `model_problem`: the part of it that concerns the model files. `note`: what is odd, or could not be compared,
    without being a defect. `drilled`: a restore was tried. `judged`: the outcome is about the bundle itself, not about
    what this Midflight can read or build, so that it is kept.
    """

    sequence: int
    kind: str
    step: int | None
    rows: int
    bytes: int
    problem: str = ""
    model_problem: str = ""
    note: str = ""
    drilled: bool = False
    judged: bool = True


@dataclass(slots=True)
class RunReport:
    """The checks of one run, and `warnings`: verdicts that were not believed or could not be kept."""

    run: str
    checks: list[BundleCheck] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def bad(self) -> list[BundleCheck]:
        """Checks with a problem."""
        return [check for check in self.checks if check.problem]


def log_of(store: Store, layout: RunLayout) -> Sequence[Manifest | BrokenSlot]:
    """The manifest log of a run that exists. Raises NotFound naming the runs there are."""
    return log_of_run(store, layout)


def runs_of(store: Store) -> list[str]:
    """Every run of a store that has published something. Raises NotFound when it holds no run at all."""
    if names := run_names(store):
        return [name for name in names if store.list(RunLayout(name).manifests)]
    raise NotFound(f"store {store.url} holds no run at all; is --store (store_url) right?")


def verify_run(store: Store, layout: RunLayout, *, drill: Drill | None = None, record: bool = True) -> RunReport:
    """Check a run and (`record`) keep each verdict. The run may be live; a store that can't be written is a warning.

    Raises: NotFound for no such run; StoreUnavailable, and then there is no verdict on the bundle that was being read.
    """
    report = RunReport(layout.run)
    log = log_of(store, layout)
    manifests = {slot.sequence: slot for slot in log if isinstance(slot, Manifest)}
    earlier = Verdicts(store, layout)
    for check in check_run(store, layout, drill=drill):
        manifest = manifests.get(check.sequence)
        known = None if manifest is None else earlier.bad(manifest)
        if known is not None and known.drill and not check.problem and not check.drilled:
            # What a restore has found, reading files can't refute.
            check = replace(check, problem=known_bad(known), judged=False)
        report.checks.append(check)
        if record and check.judged and manifest is not None and check.kind in BUNDLE_KINDS:
            by_drill = check.drilled or (known is not None and known.drill)
            record = _keep(store, layout, manifest, replace(check, drilled=by_drill), report)
    report.warnings += earlier.warnings
    return report


def _keep(store: Store, layout: RunLayout, manifest: Manifest, check: BundleCheck, report: RunReport) -> bool:
    verdict = judge(manifest, problem=check.problem, model_problem=check.model_problem, drill=check.drilled)
    try:
        put_verdict(store, layout, verdict)
    except StoreError as error:
        report.warnings.append(f"results are shown, but not kept: {error}")
        return False
    return True


def check_run(store: Store, layout: RunLayout, *, drill: Drill | None = None) -> Iterator[BundleCheck]:
    """Every bundle that can be selected, and every slot that can't be read, oldest first. The run may be live.

    Raises NotFound when the store holds no such run.
    """
    log = log_of(store, layout)
    checkpoints, snapshots = live_bundles(log)
    live = {manifest.sequence for manifest in (*checkpoints, *snapshots)}
    checker = _RunChecker(store, layout, checkpoints, drill)
    before = 0.0
    for slot in log:
        if isinstance(slot, BrokenSlot):
            yield BundleCheck(slot.sequence, "unreadable", None, 0, 0, slot.reason)
            continue
        if slot.sequence in live:
            check = checker.check(slot)
            if not check.problem or not _was_retired(store, layout, slot.sequence):
                yield replace(check, note="; ".join(filter(None, (check.note, _odd_times(slot, before)))))
        before = max(before, slot.created_at)


class _RunChecker:
    """Goes through the bundles of a run, oldest first: what a checkpoint turned out to be counts for its snapshots."""

    def __init__(self, store: Store, layout: RunLayout, checkpoints: Sequence[Manifest], drill: Drill | None) -> None:
        self._store = store
        self._layout = layout
        self._checkpoints = {checkpoint.sequence: checkpoint for checkpoint in checkpoints}
        self._drill = drill
        self._invariants = InvariantChecks()
        self._order: Order | None = None
        self._bad_models: dict[int, BundleCheck] = {}

    def check(self, manifest: Manifest) -> BundleCheck:
        """Read one bundle with its model files, compare its tables, restore it if asked."""
        size = sum(entry.bytes for entry in manifest.files)
        check = BundleCheck(manifest.sequence, manifest.kind, manifest.step, 0, size)
        try:
            verify_model_files(self._store, manifest)
        except (SnapshotCorrupt, FormatUnsupported) as error:
            judged = isinstance(error, SnapshotCorrupt)
            check = replace(check, problem=str(error), model_problem=str(error), judged=judged)
            self._bad_models[manifest.sequence] = check
            return check
        try:
            bundle = read_bundle(self._store, self._layout, manifest)
        except (SnapshotCorrupt, FormatUnsupported) as error:
            return replace(check, problem=str(error), judged=isinstance(error, SnapshotCorrupt))
        check = self._check_anchor(replace(check, rows=len(bundle.rows)), manifest)
        return check if check.problem else self._check_whole(check, bundle)

    def _check_whole(self, check: BundleCheck, bundle: RestoredBundle) -> BundleCheck:
        """Of a bundle whose bytes are as published: its invariants, and a restore."""
        try:
            config = saved_config(self._layout, bundle.manifest)
        except FormatUnsupported as error:
            if self._drill is not None:
                return replace(check, problem=f"restore drill: it can't be restored here: {error}", judged=False)
            return replace(check, note=f"prompts, rows and stamps were not compared: {error}")
        check = replace(check, note=self._learn_order(config))
        step_size = config.algorithm.num_prompts_per_step
        if broken := self._invariants.broken(bundle, self._order, step_size=step_size):
            return replace(check, problem="; ".join(broken))
        if self._drill is None:
            return check
        found = self._drill.restore(bundle, self._anchor_of(bundle.manifest))
        if not found.tried:
            return replace(check, problem=found.problem, judged=False)
        return replace(check, problem=found.problem, drilled=True)

    def _learn_order(self, config: RunConfig) -> str:
        """Know in which order the source hands prompts out; else the note that says why not."""
        if self._order is not None:
            return ""
        try:
            self._order = prompt_order(config.data)
        except ConfigurationError as error:
            return f"prompts were not compared with the dataset: {error}"
        return ""

    def _anchor_of(self, manifest: Manifest) -> Manifest | None:
        """The checkpoint whose model a bundle stands on; itself, or None for the initial model."""
        if manifest.anchor is None:
            return manifest
        return None if manifest.anchor.sequence is None else self._checkpoints[manifest.anchor.sequence]

    def _check_anchor(self, check: BundleCheck, manifest: Manifest) -> BundleCheck:
        """What is wrong between a snapshot and the checkpoint it names, or with that one's model."""
        if manifest.kind != "rollout_snapshot":
            return check
        sequence = None if manifest.anchor is None else manifest.anchor.sequence
        if sequence is not None and sequence not in self._checkpoints:
            return replace(check, problem=f"its anchor {sequence:08d} is no trainer checkpoint that can be restored")
        if sequence is not None and sequence in self._bad_models:
            anchor = self._bad_models[sequence]
            problem = f"its anchor {sequence:08d} is not whole: {anchor.problem}"
            return replace(check, problem=problem, judged=anchor.judged)
        checkpoint = None if sequence is None else self._checkpoints[sequence]
        return replace(check, problem=anchor_mismatch(manifest, checkpoint) or "")


def _odd_times(manifest: Manifest, before: float) -> str:
    """What a wrong clock left in a manifest. Nothing depends on it: order is that of the log."""
    now, found = time.time(), []
    if max(manifest.created_at, manifest.cut_time or 0.0) > now + CLOCK_TOLERANCE_S:
        found.append(f"it says it was published at {moment(manifest.created_at)}, which is in the future here")
    if manifest.created_at < before - CLOCK_TOLERANCE_S:
        found.append(f"it says it was published at {moment(manifest.created_at)}, before the slots before it")
    return f"{'; '.join(found)}: a machine's clock is or was wrong" if found else ""


def _was_retired(store: Store, layout: RunLayout, sequence: int) -> bool:
    """Whether a live run's retention removed a bundle while it was being read; it says so before it deletes."""
    return any(isinstance(slot, Manifest) and sequence in slot.retires for slot in read_log(store, layout))


def corruption(run: str, checks: Sequence[BundleCheck]) -> SnapshotCorrupt | None:
    """The error that names every bundle that is not as promised; None when all are."""
    bad = [check for check in checks if check.problem]
    if not bad:
        return None
    details = "\n".join(f"  {check.sequence:08d} ({check.kind}): {check.problem}" for check in bad)
    return SnapshotCorrupt(f"run {run}: {len(bad)} of {len(checks)} bundles are not what was published:\n{details}")


def corruption_of(reports: Sequence[RunReport]) -> SnapshotCorrupt | None:
    """The same for several runs."""
    errors = [corruption(report.run, report.checks) for report in reports]
    found = [str(error) for error in errors if error is not None]
    return SnapshotCorrupt("\n".join(found)) if found else None
