"""Reads a bundle and believes nothing: sizes, checksums, schemas, ids, counts and digests must agree."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from storage.canonical import sha256
from storage.errors import NotFound
from storage.filesystem import Store
from storage.layout import RunLayout
from storage.logical_digest import logical_digest
from storage.manifests import FileEntry, Manifest
from storage.partial_tokens import chunk_defect
from storage.parts import decode_part
from storage.records import RolloutState
from storage.refusals import corrupt, unsupported
from storage.rows import RowHandle, row_digests
from storage.schemas import ROW_SCHEMAS
from storage.snapshot_writer import Placement, state_counts
from storage.state_schemas import SCHEMAS_BY_VERSION, state_kinds
from storage.state_tables import RowPlace, decode_state

BUNDLE_KINDS = ("trainer_checkpoint", "rollout_snapshot")


@dataclass(frozen=True, slots=True)
class RestoredBundle:
    """A bundle that was read whole and verified."""

    state: RolloutState
    rows: dict[str, RowHandle]
    placements: dict[str, Placement]
    manifest: Manifest


def read_verified(store: Store, entry: FileEntry) -> bytes:
    """The bytes of a manifest's file, after their size and sha256 were compared.

    Raises: SnapshotCorrupt naming the file and the difference; StoreUnavailable.
    """
    try:
        data = store.read(entry.path)
    except NotFound as error:
        raise corrupt(entry.path, f"missing from store {store.url}") from error
    if len(data) != entry.bytes:
        raise corrupt(entry.path, f"manifest says {entry.bytes} bytes, the store holds {len(data)}")
    if (actual := sha256(data)) != entry.sha256:
        raise corrupt(entry.path, f"manifest says sha256 {entry.sha256}, the store holds {actual}")
    return data


def verify_files(store: Store, manifest: Manifest, *, roles: Iterable[str] | None = None) -> int:
    """Read every file of a manifest (or only those of some roles) and compare; returns the bytes read.

    Raises: SnapshotCorrupt for the first that differs; StoreUnavailable.
    """
    wanted = None if roles is None else frozenset(roles)
    files = [entry for entry in manifest.files if wanted is None or entry.role in wanted]
    return sum(len(read_verified(store, entry)) for entry in files)


def verify_model_files(store: Store, manifest: Manifest) -> int:
    """Like `verify_files` for everything but rollout state: what a snapshot needs of its anchor."""
    _require_anchor_of_kind(manifest)
    return verify_files(store, manifest, roles={e.role for e in manifest.files} - {"part", "state"})


def read_bundle(store: Store, layout: RunLayout, manifest: Manifest) -> RestoredBundle:
    """State and rows of a trainer checkpoint or rollout snapshot; its model files are not read.

    Raises: SnapshotCorrupt naming the file and what differs; FormatUnsupported; StoreUnavailable.
    """
    where = layout.manifest(manifest.sequence)
    if manifest.kind not in BUNDLE_KINDS:
        raise corrupt(where, f"is a {manifest.kind}, not a bundle that can be restored")
    _require_anchor_of_kind(manifest)
    _refuse_duplicates([entry.path for entry in manifest.files], "file", where)
    version = _state_version(manifest, where)
    state, places = decode_state(_read_tables(store, manifest, where, version), version=version)
    _refuse_duplicates([place.row_id for place in places], "row", where)
    _compare_ids(state, places, where)
    rows, placements = _read_rows(store, manifest, places, where)
    _compare_calls(state, rows, where)
    _compare_totals(manifest, state, rows, where, version)
    return RestoredBundle(state, rows, placements, manifest)


def _require_anchor_of_kind(manifest: Manifest) -> None:
    """A trainer checkpoint is its own anchor; a snapshot names one."""
    if (manifest.anchor is None) == (manifest.kind == "rollout_snapshot"):
        found = "names no anchor" if manifest.anchor is None else f"names an anchor at step {manifest.anchor.step}"
        raise corrupt(RunLayout(manifest.run).manifest(manifest.sequence), f"is a {manifest.kind} that {found}")


def _state_version(manifest: Manifest, where: str) -> int:
    """The version of the format that all tables of a bundle have."""
    versions: dict[int, str] = {}
    for entry in manifest.files:
        if entry.role == "state":
            if entry.schema_version is None or entry.schema_version not in SCHEMAS_BY_VERSION:
                known = sorted(SCHEMAS_BY_VERSION)
                raise unsupported(entry.path, f"schema version {entry.schema_version}, this Midflight reads {known}")
            versions[entry.schema_version] = entry.path
    if len(versions) != 1:
        raise corrupt(
            where, f"mixes state files of the schema versions {sorted(versions)}: {sorted(versions.values())}"
        )
    return next(iter(versions))


def _read_tables(store: Store, manifest: Manifest, where: str, version: int) -> dict[str, tuple[str, bytes]]:
    entries = [entry for entry in manifest.files if entry.role == "state"]
    kinds = Counter(entry.kind for entry in entries)
    if kinds != Counter(state_kinds(version)):
        found = sorted(map(str, kinds.elements()))
        raise corrupt(where, f"lists state files {found}, expected each of {sorted(state_kinds(version))} once")
    return {str(entry.kind): (entry.path, read_verified(store, entry)) for entry in entries}


def _compare_ids(state: RolloutState, places: list[RowPlace], where: str) -> None:
    wanted = {row_id: kind.value for row_id, kind in state.row_ids().items()}
    held = {place.row_id: place.kind for place in places}
    if wanted != held:
        absent, extra = sorted(wanted.items() - held.items()), sorted(held.items() - wanted.items())
        raise corrupt(
            where,
            f"the index refers to {len(absent)} rows that are not there {absent[:3]}, and {len(extra)} rows "
            f"are there that the index does not refer to {extra[:3]}",
        )


def _read_rows(
    store: Store, manifest: Manifest, places: list[RowPlace], where: str
) -> tuple[dict[str, RowHandle], dict[str, Placement]]:
    parts = {entry.path: entry for entry in manifest.files if entry.role == "part"}
    by_part: dict[str, list[RowPlace]] = {}
    for place in places:
        by_part.setdefault(place.part, []).append(place)
    if parts.keys() != by_part.keys():
        unlisted, unused = sorted(by_part.keys() - parts.keys()), sorted(parts.keys() - by_part.keys())
        raise corrupt(
            where,
            f"rows lie in parts that the manifest does not list {unlisted[:3]}, and it lists parts where no "
            f"row lies {unused[:3]}",
        )
    rows: dict[str, RowHandle] = {}
    placements: dict[str, Placement] = {}
    for path, entry in parts.items():
        rows.update(_rows_of_part(store, entry, by_part[path]))
        placements.update((p.row_id, Placement(entry, p.offset, p.digest)) for p in by_part[path])
    return rows, placements


def _rows_of_part(store: Store, entry: FileEntry, places: list[RowPlace]) -> dict[str, RowHandle]:
    """Only the live rows are kept, copied out of the part."""
    kind, table = decode_part(read_verified(store, entry), entry)
    if any(not 0 <= place.offset < table.num_rows for place in places):
        raise corrupt(entry.path, f"rows are looked for beyond its {table.num_rows} rows")
    taken = table.take([place.offset for place in places]).combine_chunks().to_batches()
    batch = taken[0].cast(ROW_SCHEMAS[kind])
    ids, stated = batch.column("row_id").to_pylist(), batch.column("digest").to_pylist()
    actual = row_digests(kind, batch)
    for index, place in enumerate(places):
        if (ids[index], kind.value) != (place.row_id, place.kind):
            found = f"row {place.offset} is {kind} {ids[index]}"
            raise corrupt(entry.path, f"{found}, the rows table says {place.kind} {place.row_id}")
        if not stated[index] == actual[index] == place.digest:
            raise corrupt(
                entry.path,
                f"row {place.row_id} has digest {actual[index]}, its column says {stated[index]} and the "
                f"rows table {place.digest}",
            )
    return {place.row_id: RowHandle(kind, batch, index, place.digest) for index, place in enumerate(places)}


def _compare_calls(state: RolloutState, rows: Mapping[str, RowHandle], where: str) -> None:
    """The ledger names calls with their digests, and partial calls the rows with their tokens; they must be those."""
    for episode in state.episodes:
        for key in episode.calls:
            if (found := rows[key].batch.column("rollout_id")[rows[key].index].as_py()) != episode.rollout_id:
                raise corrupt(where, f"episode {episode.row_key} includes call {key}, which is one of {found}")
    for group in state.ledger:
        for sealed in (sibling.sealed for sibling in group.siblings if sibling.sealed is not None):
            for key, digest in zip(sealed.call_keys, sealed.digests, strict=True):
                if rows[key].digest != digest:
                    found = f"staged call {key} has digest {rows[key].digest}"
                    raise corrupt(where, f"{found}, the ledger says {digest}")
    for call in state.partial_calls:
        if (defect := chunk_defect(call, rows)) is not None:
            raise corrupt(where, f"partial call {call.key}: {defect}")


def _compare_totals(
    manifest: Manifest, state: RolloutState, rows: Mapping[str, RowHandle], where: str, version: int
) -> None:
    counts = state_counts(state, version=version)
    if counts != manifest.counts:
        raise corrupt(where, f"counts are {counts}, the manifest says {manifest.counts}")
    by_kind = {entry.kind: entry.rows for entry in manifest.files if entry.role == "state"}
    held = {
        "replay_index": len(state.buffer),
        "ledger": len(state.ledger),
        "spare_prompts": len(state.spares),
        "dropped": len(state.dropped),
        "trained": len(state.trained),
        "rows": len(rows),
        "episodes": len(state.episodes),
        "partial_calls": len(state.partial_calls),
        "progress": None,
    }
    held = {kind: held[kind] for kind in state_kinds(version)}
    if by_kind != held:
        raise corrupt(where, f"tables hold {held} rows, the manifest says {by_kind}")
    if (actual := logical_digest(state, rows, version=version)) != manifest.logical_digest:
        raise corrupt(where, f"logical digest is {actual}, the manifest says {manifest.logical_digest}")


def _refuse_duplicates(names: list[str], what: str, where: str) -> None:
    repeated = sorted(name for name, count in Counter(names).items() if count > 1)
    if repeated:
        raise corrupt(where, f"{what} {repeated[0]} is listed more than once")
