"""Frees what no kept bundle needs. The log itself stays for ever: a freed slot could be filled by a stale writer.

A `retired` manifest is published before anything is deleted, so that nobody selects what is going away. Ages are by the
store's own clock: a file that was written just now tells how far this machine's is off.
"""

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass

from storage.catalog import anchored_to, live_bundles
from storage.errors import Fenced, StoreError
from storage.filesystem import Store
from storage.layout import RunLayout
from storage.manifests import BrokenSlot, Manifest, ManifestDraft, ManifestLog
from storage.verdicts import Verdicts

# Files that no manifest refers to may belong to a bundle that is being written.
GRACE_S = 3600.0
# What a file that was written just now may seem old without the clocks being off.
_TOLERATED_SKEW_S = 60.0


@dataclass(frozen=True, slots=True)
class Keep:
    """What stays: the newest `checkpoints`, for each of them the newest `per_anchor` snapshots, and the `best`
    checkpoints with the highest `score` (None: not known, never among the best), of equal ones the newest. Bundles that
    a verification found bad don't count: as many others stay besides.
    """

    checkpoints: int
    per_anchor: int
    best: int = 0
    score: Callable[[Manifest], float | None] = lambda checkpoint: None


@dataclass(frozen=True, slots=True)
class Retained:
    """What one retention did: retired sequences, deleted paths, and what the store refused to do."""

    retired: tuple[int, ...] = ()
    deleted: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def retain(
    store: Store,
    layout: RunLayout,
    log: ManifestLog,
    *,
    keep: Keep,
    pinned: Set[str] = frozenset(),
    being_written: str | None = None,
    grace_s: float = GRACE_S,
) -> Retained:
    """Keep what `keep` says; free the rest. Call it after a publication.

    The newest durable checkpoint, the newest snapshot and what that is anchored to always stay. `pinned` are parts that
    the writer may still refer to, `being_written` is the folder of a checkpoint that is not published yet. A store that
    fails here is reported, not raised: the publication before it stands, and the next retention tries again.

    Raises: Fenced when another writer took over the run; nothing was deleted then.
    """
    try:
        slots = log.read()
        if slots and slots[-1].sequence != log.last_seen:
            raise Fenced(
                f"run {layout.run}: slot {slots[-1].sequence:08d} was written by another controller; "
                "this one deletes nothing, end it"
            )
        kept, retired = split(slots, keep)
        if retired:
            kept, retired = split(slots, keep, bad=known_bad_of(store, layout, slots))
        if retired:
            log.append(ManifestDraft(kind="retired", retires=retired))
        fresh = None if log.last_seen is None else layout.manifest(log.last_seen)
        garbage = garbage_of(store, layout, slots, kept=kept, pinned=pinned, grace_s=grace_s, fresh=fresh)
        garbage = [path for path in garbage if being_written is None or not path.startswith(f"{being_written}/")]
    except StoreError as error:
        return Retained(problems=(str(error),))
    deleted, problems = [], []
    for path in garbage:
        try:
            store.delete(path)
            deleted.append(path)
        except StoreError as error:
            problems.append(str(error))
    return Retained(retired, tuple(deleted), tuple(problems))


def split(
    slots: Sequence[Manifest | BrokenSlot], keep: Keep, *, bad: Set[int] = frozenset()
) -> tuple[list[Manifest], tuple[int, ...]]:
    """Bundles to keep, and the sequences of those to retire. `bad` are sequences that are known to be bad."""
    checkpoints, snapshots = live_bundles(slots)
    newest_anchor = {s.anchor.sequence for s in _newest(snapshots, 1, bad) if s.anchor is not None}
    anchors: list[Manifest | None] = [*_newest(checkpoints, keep.checkpoints, bad)]
    anchors += [c for c in checkpoints if c.sequence in newest_anchor and c not in anchors]
    if None in newest_anchor or not anchors:
        anchors.append(None)
    best = _best([c for c in checkpoints if c.sequence not in bad], keep)
    kept = [anchor for anchor in anchors if anchor is not None] + best
    for anchor in anchors:
        kept += _newest(anchored_to(anchor, snapshots), keep.per_anchor, bad)
    sequences = {manifest.sequence for manifest in kept}
    return kept, tuple(m.sequence for m in (*checkpoints, *snapshots) if m.sequence not in sequences)


def known_bad_of(store: Store, layout: RunLayout, slots: Iterable[Manifest | BrokenSlot]) -> frozenset[int]:
    """Sequences of the live bundles that a verification found bad. Raises StoreUnavailable."""
    verdicts = Verdicts(store, layout)
    checkpoints, snapshots = live_bundles(slots)
    return frozenset(bundle.sequence for bundle in (*checkpoints, *snapshots) if verdicts.bad(bundle) is not None)


def _newest(bundles: Sequence[Manifest], count: int, bad: Set[int]) -> list[Manifest]:
    """The newest `count`, and the newest `count` of those that are not known to be bad."""
    count = max(count, 1)
    good = [bundle for bundle in bundles if bundle.sequence not in bad]
    wanted = {bundle.sequence for bundle in (*bundles[-count:], *good[-count:])}
    return [bundle for bundle in bundles if bundle.sequence in wanted]


def _best(checkpoints: Sequence[Manifest], keep: Keep) -> list[Manifest]:
    if not keep.best:
        return []
    scored = [(score, c.sequence, c) for c in checkpoints if (score := keep.score(c)) is not None]
    return [checkpoint for *_, checkpoint in sorted(scored, key=lambda entry: entry[:2])[-keep.best :]]


def garbage_of(
    store: Store,
    layout: RunLayout,
    slots: Sequence[Manifest | BrokenSlot],
    *,
    kept: Iterable[Manifest],
    pinned: Set[str],
    grace_s: float,
    fresh: str | None = None,
) -> list[str]:
    """Files of retired bundles that no kept one reaches, their verdicts, and old files that no manifest names.

    `fresh` is a file that was written just now; without one, the clocks of store and machine are taken for equal.
    """
    kept = list(kept)
    reachable = pinned | {entry.path for manifest in kept for entry in manifest.files}
    named = {entry.path for slot in slots if isinstance(slot, Manifest) for entry in slot.files}
    present = [
        path
        for folder in (layout.parts, layout.states, layout.checkpoints)
        for path in store.list(folder)
        if path not in reachable
    ]
    gone = {slot.sequence for slot in slots if isinstance(slot, Manifest)} - {manifest.sequence for manifest in kept}
    verdicts = [path for path in store.list(layout.verifications) if layout.sequence_of(path) in gone]
    # An unreadable manifest may name any file, so that only what readable ones name is known to be garbage.
    certain = not any(isinstance(slot, BrokenSlot) for slot in slots)
    unnamed = [path for path in present if path not in named] if certain else []
    skew = clock_skew_s(store, fresh) if unnamed and fresh is not None else 0.0
    old = {path for path in unnamed if store.age_s(path) - skew > grace_s}
    return [*(path for path in present if path in named or path in old), *verdicts]


def clock_skew_s(store: Store, fresh: str) -> float:
    """By how much files in the store seem older than they are: what a fresh one's age is, if that is no delay."""
    age = store.age_s(fresh)
    return age if abs(age) > _TOLERATED_SKEW_S else 0.0
