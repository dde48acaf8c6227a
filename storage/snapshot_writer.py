"""Writes a bundle: new rows as parts, the state's tables, the manifest last. Nothing counts before that."""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from storage.canonical import sha256
from storage.errors import BrokenInvariant
from storage.filesystem import Store
from storage.identity import identity, redacted
from storage.layout import RunLayout
from storage.logical_digest import logical_digest
from storage.manifests import Anchor, FileEntry, Manifest, ManifestDraft, ManifestLog
from storage.parts import encode_part
from storage.records import AttemptStatus, RolloutState, RowKind
from storage.rows import RowHandle
from storage.run_config import RunConfig
from storage.state_checks import defects
from storage.state_schemas import STATE_SCHEMA_VERSION
from storage.state_tables import RowPlace, encode_state

# A part with fewer live rows than this is rewritten: it would cost more at a restore than it saves now.
_MIN_LIVE_FRACTION = 0.25


@dataclass(frozen=True, slots=True)
class CapturedBundle:
    """What a cut captured, and what goes with it. `files` are the model files of a trainer checkpoint.

    `rows` holds exactly the rows that `state` refers to. `anchor` is None for a trainer checkpoint: it is its
    own. `cut_time` is wall-clock, in Unix seconds.
    """

    kind: Literal["trainer_checkpoint", "rollout_snapshot"]
    step: int
    anchor: Anchor | None
    state: RolloutState
    rows: Mapping[str, RowHandle]
    cut_time: float
    files: tuple[FileEntry, ...]
    config: RunConfig
    dataset_fingerprint: str


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a row lies in the store: row `offset` of `part`."""

    part: FileEntry
    offset: int
    digest: str


class SnapshotWriter:
    """The one writer of a run's bundles. It knows where rows lie, so that each is written once."""

    def __init__(self, store: Store, layout: RunLayout, log: ManifestLog) -> None:
        self._store = store
        self._layout = layout
        self._log = log
        self._placements: dict[str, Placement] = {}
        self._unpublished: set[str] = set()
        self._newest_cut = 0.0
        self._lock = threading.Lock()

    def adopt(self, placements: Mapping[str, Placement]) -> None:
        """Rows that a restored bundle already holds: later bundles refer to them."""
        with self._lock:
            self._placements = {**self._placements, **placements}

    def pinned_parts(self) -> frozenset[str]:
        """Paths of the parts that the next bundle may refer to; retention leaves them alone."""
        return frozenset(placement.part.path for placement in self._placements.values())

    def write(self, bundle: CapturedBundle) -> Manifest:
        """Write parts and tables, then publish the manifest. Blocking; one call at a time.

        Raises: BrokenInvariant when state and rows disagree (nothing is written); StoreError when the store
        fails (nothing is selectable, the parts written so far are used by the next attempt); Fenced.
        """
        with self._lock:
            check_bundle(bundle)
            placements = self._place_rows(bundle.rows)
            draft = self._write_tables(bundle, placements)
            manifest = self._log.append(draft)
            self._unpublished.clear()
            # A bundle that is published late does not know the rows of those that were cut after it.
            is_late = bundle.cut_time < self._newest_cut
            self._placements = {**self._placements, **placements} if is_late else placements
            self._newest_cut = max(self._newest_cut, bundle.cut_time)
            return manifest

    def _place_rows(self, rows: Mapping[str, RowHandle]) -> dict[str, Placement]:
        """Where each row lies, after writing those that lie nowhere yet."""
        self._forget_lost_parts()
        placed = {row_id: self._placements[row_id] for row_id in self._reusable(rows)}
        for kind in RowKind:
            fresh = {row_id: row for row_id, row in rows.items() if row.kind is kind and row_id not in placed}
            if not fresh:
                continue
            entry, data, order = encode_part(fresh, self._layout, writer=self._log.writer)
            self._store.write(entry.path, data)
            self._unpublished.add(entry.path)
            written = {row_id: Placement(entry, i, fresh[row_id].digest) for i, row_id in enumerate(order)}
            # Kept even if the publication fails: the part is durable, the next attempt refers to it.
            self._placements = {**self._placements, **written}
            placed.update(written)
        return placed

    def _forget_lost_parts(self) -> None:
        """Parts of an attempt that failed: a store that vanished in the middle of it may have taken them along."""
        lost = {path for path in self._unpublished if not self._store.exists(path)}
        if lost:
            self._placements = {id_: place for id_, place in self._placements.items() if place.part.path not in lost}
            self._unpublished -= lost

    def _reusable(self, rows: Mapping[str, RowHandle]) -> list[str]:
        """Rows that lie in a part of which enough is still alive."""
        known = {
            row_id: self._placements[row_id]
            for row_id, row in rows.items()
            if row_id in self._placements and self._placements[row_id].digest == row.digest
        }
        live = Counter(placement.part.path for placement in known.values())
        return [
            row_id
            for row_id, placement in known.items()
            if live[placement.part.path] >= _MIN_LIVE_FRACTION * (placement.part.rows or 1)
        ]

    def _write_tables(self, bundle: CapturedBundle, placements: Mapping[str, Placement]) -> ManifestDraft:
        places = [
            RowPlace(row_id, bundle.rows[row_id].kind.value, place.part.path, place.offset, place.digest)
            for row_id, place in placements.items()
        ]
        parts = {place.part.path: place.part for place in placements.values()}
        tables = []
        for file in encode_state(bundle.state, places, writer=self._log.writer):
            digest = sha256(file.data)
            entry = FileEntry(
                path=self._layout.state(file.kind, digest),
                bytes=len(file.data),
                sha256=digest,
                role="state",
                kind=file.kind,
                rows=file.rows,
                schema_version=STATE_SCHEMA_VERSION,
            )
            self._store.write(entry.path, file.data)
            tables.append(entry)
        return ManifestDraft(
            kind=bundle.kind,
            step=bundle.step,
            anchor=bundle.anchor,
            cut_time=bundle.cut_time,
            files=(*bundle.files, *parts.values(), *tables),
            counts=state_counts(bundle.state),
            logical_digest=logical_digest(bundle.state, bundle.rows),
            identity=identity(bundle.config).fingerprint,
            config=redacted(bundle.config),
            dataset_fingerprint=bundle.dataset_fingerprint,
        )


def state_counts(state: RolloutState, *, version: int = STATE_SCHEMA_VERSION) -> dict[str, int]:
    """The counts that a manifest states and a reader compares; manifests outlive the bundles they describe.

    `version`: that of the format; the first one did not count episodes, the second not the calls that have not ended
    (`partial_calls`, with `partial_tokens` sampled tokens).

    `reusable_siblings` are sealed ones of groups whose recovery level keeps them; `running_attempts` were
    dispatched and unsealed at the cut.
    """
    kinds = Counter(state.row_ids().values())
    siblings = [sibling for group in state.ledger for sibling in group.siblings]
    reusable = [
        sibling.sealed
        for group in state.ledger
        if group.level.keeps_siblings
        for sibling in group.siblings
        if sibling.sealed is not None
    ]
    episodes = {"episodes": len(state.episodes), "finished_turns": sum(episode.turn for episode in state.episodes)}
    calls = {
        "partial_calls": len(state.partial_calls),
        "partial_tokens": sum(call.num_tokens for call in state.partial_calls),
    }
    return {
        **(episodes if version > 1 else {}),
        **(calls if version > 2 else {}),
        "ledger_groups": len(state.ledger),
        "siblings": len(siblings),
        "sealed_siblings": sum(sibling.sealed is not None for sibling in siblings),
        "reusable_siblings": len(reusable),
        "reusable_tokens": sum(sealed.num_tokens for sealed in reusable),
        "running_attempts": sum(sibling.status is AttemptStatus.DISPATCHED for sibling in siblings),
        "buffered_tokens": sum(group.num_tokens for group in state.buffer),
        "buffered_groups": len(state.buffer),
        "claimed_groups": sum(group.claimed_by is not None for group in state.buffer),
        "spare_prompts": len(state.spares),
        "dropped_prompts": len(state.dropped),
        "trained_groups": len(state.trained),
        RowKind.TRAINING_ROW.value: kinds[RowKind.TRAINING_ROW],
        RowKind.STAGED_CALL.value: kinds[RowKind.STAGED_CALL],
    }


def check_bundle(bundle: CapturedBundle) -> None:
    """Raises BrokenInvariant unless state, rows and anchor of a captured bundle fit together."""
    found = [*defects(bundle.state), *_row_defects(bundle.state.row_ids(), bundle.rows)]
    if (bundle.anchor is None) != (bundle.kind == "trainer_checkpoint"):
        found.append(f"a {bundle.kind} must {'not ' if bundle.anchor else ''}have an anchor")
    if found:
        raise BrokenInvariant(f"{bundle.kind} at step {bundle.step} is not whole: {'; '.join(found)}")


def _row_defects(wanted: Mapping[str, RowKind], rows: Mapping[str, RowHandle]) -> Iterator[str]:
    if absent := sorted(wanted.keys() - rows.keys()):
        yield f"the state refers to {len(absent)} rows that were not captured: {absent[:3]}"
    if extra := sorted(rows.keys() - wanted.keys()):
        yield f"{len(extra)} rows were captured that the state does not refer to: {extra[:3]}"
    for row_id in wanted.keys() & rows.keys():
        row = rows[row_id]
        if row.kind is not wanted[row_id] or row.row_id != row_id:
            yield f"row {row_id} was captured as {row.kind} {row.row_id}, the state says {wanted[row_id]}"
