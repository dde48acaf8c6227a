"""A new run that starts from a bundle of another run of the same store.

Everything is copied: the model files of the bundle's anchor, the rollout state with its rows, and what the trace says
up to the cut. The two runs share no file, so that neither's retention can take from the other. The copy is written
first and published last; it counts from its first manifest on.
"""

import json
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from storage.checkpoints import CheckpointFiles
from storage.errors import BrokenInvariant, ConfigurationError, Fenced
from storage.filesystem import Store
from storage.history import COPY_PREFIX, Event, History
from storage.layout import RunLayout
from storage.logical_digest import logical_digest
from storage.manifests import Anchor, FileEntry, Manifest, ManifestLog
from storage.refusals import corrupt
from storage.run_config import RunConfig
from storage.run_record import create_run_record
from storage.runs import Log, find_bundle, layout_of, log_of_run, require_live, run_names, saved_config
from storage.snapshot_reader import RestoredBundle, read_bundle
from storage.snapshot_writer import CapturedBundle, SnapshotWriter
from storage.trace_index import STARTS
from storage.trace_reader import read_events
from storage.verdicts import Verdicts, known_bad


@dataclass(frozen=True, slots=True)
class Fork:
    """What was made: the new run's bundle and anchor (None: the initial model), and the bundle it is a copy of."""

    run: str
    source: Manifest
    target: Manifest
    anchor: Manifest | None


def fork(store: Store, source: RunLayout, sequence: int, new_run: str) -> Fork:
    """Make `new_run` from bundle `sequence` of `source`; both kinds of bundle will do.

    Raises: NotFound for an unknown or freed bundle; ConfigurationError for a name that is taken or impossible;
    SnapshotCorrupt or FormatUnsupported for a bundle or an anchor that is not whole. Nothing is published then.
    """
    target_layout = layout_of(new_run)
    log = log_of_run(store, source)
    bundle = find_bundle(store, source, log, sequence)
    require_live(source, log, bundle)
    anchor = _anchor_of(store, source, log, bundle)
    _refuse_known_bad(Verdicts(store, source), source, bundle, anchor)
    if new_run in run_names(store):
        raise ConfigurationError(f"store {store.url} holds a run '{new_run}' already: choose another name")
    read = {m.sequence: read_bundle(store, source, m) for m in (anchor, bundle) if m is not None}
    copy = _Copy(store, source, target_layout, f"{COPY_PREFIX}{uuid.uuid4().hex[:12]}-of-{source.run}-{sequence:08d}")
    copy.trace(read[sequence], read_events(store, source), log)
    try:
        new_anchor = None if anchor is None else copy.publish(read[anchor.sequence], None)
        new_bundle = new_anchor if new_anchor and anchor is bundle else copy.publish(read[sequence], new_anchor)
    except Fenced as error:
        raise ConfigurationError(f"run '{new_run}' was begun by another process meanwhile: {error}") from error
    assert new_bundle is not None
    origin = {
        "store": store.url,
        "run": source.run,
        "sequence": sequence,
        "anchor_sequence": None if anchor is None else anchor.sequence,
        "logical_digest": bundle.logical_digest,
    }
    create_run_record(store, target_layout, copy.config(bundle), forked_from=origin)
    return Fork(new_run, bundle, new_bundle, new_anchor)


def _refuse_known_bad(verdicts: Verdicts, layout: RunLayout, bundle: Manifest, anchor: Manifest | None) -> None:
    if (verdict := verdicts.bad(bundle)) is not None:
        raise corrupt(layout.manifest(bundle.sequence), known_bad(verdict))
    verdict = None if anchor is None else verdicts.of(anchor)
    if anchor is not None and verdict is not None and verdict.model_problem is not None:
        raise corrupt(layout.manifest(anchor.sequence), known_bad(verdict, verdict.model_problem))


def _anchor_of(store: Store, layout: RunLayout, log: Log, bundle: Manifest) -> Manifest | None:
    """The trainer checkpoint that a bundle stands on: itself, another, or None for the initial model."""
    if bundle.anchor is None:
        return bundle
    if bundle.anchor.sequence is None:
        return None
    anchor = find_bundle(store, layout, log, bundle.anchor.sequence)
    require_live(layout, log, anchor)
    if bundle.anchor != Anchor.at(anchor) or anchor.kind != "trainer_checkpoint":
        raise corrupt(layout.manifest(bundle.sequence), f"its anchor is not what {anchor.sequence:08d} holds")
    return anchor


class _Copy:
    """Writes bundles of one run into another, as that run's only writer."""

    def __init__(self, store: Store, source: RunLayout, target: RunLayout, writer: str) -> None:
        self._store = store
        self._source = source
        self._target = target
        self._log = ManifestLog(store, target, writer)
        # Behind an empty log: of two forks to one name, one gets the first slot.
        if self._log.follow() != -1:
            raise ConfigurationError(f"store {store.url} holds a run '{target.run}' already: choose another name")
        self._writer = SnapshotWriter(store, target, self._log)

    def publish(self, bundle: RestoredBundle, anchor: Manifest | None) -> Manifest:
        """Model files, rows and tables, then the manifest. The state is the same, digest for digest."""
        manifest = bundle.manifest
        files = tuple(self._model_file(entry) for entry in manifest.files if entry.role not in ("part", "state"))
        new_anchor = manifest.anchor
        if anchor is not None:
            new_anchor = Anchor.at(anchor)
        if manifest.dataset_fingerprint is None:
            raise corrupt(self._source.manifest(manifest.sequence), "names no dataset")
        captured = CapturedBundle(
            kind=cast(Literal["trainer_checkpoint", "rollout_snapshot"], manifest.kind),
            step=manifest.step,
            anchor=new_anchor,
            state=bundle.state,
            rows=bundle.rows,
            cut_time=manifest.cut_time if manifest.cut_time is not None else manifest.created_at,
            files=files,
            config=self.config(manifest),
            dataset_fingerprint=manifest.dataset_fingerprint,
        )
        written = self._writer.write(captured)
        if written.logical_digest != logical_digest(bundle.state, bundle.rows):
            raise BrokenInvariant(
                f"{self._target.manifest(written.sequence)} is no copy of {self._source.manifest(manifest.sequence)}: "
                "delete the new run and report this"
            )
        return written

    def config(self, manifest: Manifest) -> RunConfig:
        """The configuration of a bundle under the new name."""
        return saved_config(self._source, manifest).model_copy(update={"name": self._target.run})

    def trace(self, bundle: RestoredBundle, events: Sequence[Event], log: Log) -> None:
        """What led to the cut, as the trace of one process: that which wrote the copies."""
        lines = [
            json.dumps({**event, "run_process": self._log.writer}, separators=(",", ":"))
            for event in sorted(_effective(bundle, events, log), key=lambda event: float(event["t"]))
        ]
        if lines:
            path = self._target.trace(self._log.writer)
            self._store.write(path, "".join(f"{line}\n" for line in lines).encode())

    def _model_file(self, entry: FileEntry) -> FileEntry:
        folder, _, name = entry.path.removeprefix(f"{self._source.checkpoints}/").partition("/")
        if not name or not entry.path.startswith(f"{self._source.checkpoints}/"):
            raise corrupt(entry.path, f"is no file of a checkpoint of run {self._source.run}")
        data = CheckpointFiles(self._store, "").fetch(entry)
        copied = CheckpointFiles(self._store, f"{self._target.checkpoints}/{folder}").put(name, data, entry.role)
        return entry.model_copy(update={"path": copied.path})


def _effective(bundle: RestoredBundle, events: Sequence[Event], log: Log) -> Iterator[Event]:
    """Steps that led to the bundle, groups that they trained or it holds, drops, and attempts that ran at its cut."""
    standing = History(events, log).at_cut(bundle.manifest.sequence)
    steps = {(step.step, step.t) for step in standing.steps}
    trained = [group for step in standing.steps for group in step.group_ids]
    groups = {*trained, *(group.group_id for group in bundle.state.buffer)}
    cut_time = bundle.manifest.cut_time if bundle.manifest.cut_time is not None else bundle.manifest.created_at
    yield from (e for e in events if e["event"] == "train_step" and (int(e["step"]), float(e["t"])) in steps)
    yield from _publications(groups, events, cut_time)
    for event in events:
        running = standing.running.get(event["rollout_id"]) if event["event"] in STARTS else None
        if running is not None and float(event["t"]) == running.began:
            yield event
    yield from _drops({dropped.prompt.group_id for dropped in bundle.state.dropped}, events)


def _drops(groups: Iterable[str], events: Sequence[Event]) -> Iterator[Event]:
    """For each dropped prompt the newest event that says why."""
    newest = {event["group_id"]: event for event in events if event["event"] in ("prompt_dropped", "group_discarded")}
    yield from (newest[group] for group in groups if group in newest)


def _publications(groups: Iterable[str], events: Sequence[Event], cut_time: float) -> Iterator[Event]:
    """For each group its newest publication before the cut; one that was recorded a moment late counts too."""
    found: dict[str, Event] = {}
    for event in events:
        if event["event"] == "group_published" and (float(event["t"]) <= cut_time or event["group_id"] not in found):
            found[event["group_id"]] = event
    yield from (found[group] for group in groups if group in found)
