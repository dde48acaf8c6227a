"""Frees what no kept bundle needs. The log itself stays for ever: a freed slot could be filled by a stale writer.

A `retired` manifest is published before anything is deleted, so that nobody selects what is going away.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from storage.catalog import anchored_to, live_bundles
from storage.errors import Fenced, StoreError
from storage.filesystem import Store
from storage.layout import RunLayout
from storage.manifests import BrokenSlot, Manifest, ManifestDraft, ManifestLog

# Files that no manifest refers to may belong to a bundle that is being written.
_GRACE_S = 3600.0


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
    keep_checkpoints: int,
    keep_per_anchor: int,
    pinned: Set[str] = frozenset(),
    grace_s: float = _GRACE_S,
) -> Retained:
    """Keep the newest checkpoints and, for each, its newest snapshots; free the rest. Call it after a publication.

    The newest durable checkpoint, the newest snapshot and what that is anchored to always stay. `pinned` are parts
    that the writer may still refer to. A store that fails here is reported, not raised: the publication before it
    stands, and the next retention tries again.

    Raises: Fenced when another writer took over the run; nothing was deleted then.
    """
    try:
        slots = log.read()
        if slots and slots[-1].sequence != log.last_seen:
            raise Fenced(
                f"run {layout.run}: slot {slots[-1].sequence:08d} was written by another controller; "
                "this one deletes nothing, end it"
            )
        kept, retired = _split(slots, keep_checkpoints=keep_checkpoints, keep_per_anchor=keep_per_anchor)
        if retired:
            log.append(ManifestDraft(kind="retired", retires=retired))
        garbage = _garbage(store, layout, slots, kept=kept, pinned=pinned, grace_s=grace_s)
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


def _split(
    slots: Sequence[Manifest | BrokenSlot], *, keep_checkpoints: int, keep_per_anchor: int
) -> tuple[list[Manifest], tuple[int, ...]]:
    """Bundles to keep, and the sequences of those to retire."""
    checkpoints, snapshots = live_bundles(slots)
    newest_anchor = {s.anchor.sequence for s in snapshots[-1:] if s.anchor is not None}
    anchors: list[Manifest | None] = [*checkpoints[-max(keep_checkpoints, 1) :]] or [None]
    anchors += [c for c in checkpoints if c.sequence in newest_anchor and c not in anchors]
    kept = [anchor for anchor in anchors if anchor is not None]
    for anchor in anchors:
        kept += anchored_to(anchor, snapshots)[-max(keep_per_anchor, 1) :]
    sequences = {manifest.sequence for manifest in kept}
    return kept, tuple(m.sequence for m in (*checkpoints, *snapshots) if m.sequence not in sequences)


def _garbage(
    store: Store,
    layout: RunLayout,
    slots: Sequence[Manifest | BrokenSlot],
    *,
    kept: Iterable[Manifest],
    pinned: Set[str],
    grace_s: float,
) -> list[str]:
    """Files of retired bundles that no kept one reaches, and old files that no manifest names."""
    reachable = pinned | {entry.path for manifest in kept for entry in manifest.files}
    named = {entry.path for slot in slots if isinstance(slot, Manifest) for entry in slot.files}
    present = [
        path
        for folder in (layout.parts, layout.states, layout.checkpoints)
        for path in store.list(folder)
        if path not in reachable
    ]
    # An unreadable manifest may name any file, so that only what readable ones name is known to be garbage.
    certain = not any(isinstance(slot, BrokenSlot) for slot in slots)
    return [path for path in present if path in named or (certain and store.age_s(path) > grace_s)]
