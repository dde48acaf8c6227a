"""Parts: immutable Parquet files of rows of one kind, named by the hash of their bytes."""

from collections.abc import Mapping

import pyarrow as pa

from storage.canonical import sha256
from storage.layout import RunLayout
from storage.manifests import FileEntry
from storage.parquet import ROW_GROUP_ROWS, decode_table, encode_tables
from storage.records import RowKind
from storage.refusals import corrupt, unsupported
from storage.rows import RowHandle, take_order, take_rows
from storage.schemas import ROW_SCHEMA_VERSION, ROW_SCHEMAS

_REPEATING = ("group_id", "finish_reason")


def encode_part(rows: Mapping[str, RowHandle], layout: RunLayout, *, writer: str) -> tuple[FileEntry, bytes, list[str]]:
    """A part with these rows (all of one kind): its entry, its bytes and the row ids in the file's order."""
    kind, order = next(iter(rows.values())).kind, take_order(rows)
    # Never the whole part as one table: freeing its many chunks would stop every other thread.
    starts = range(0, len(order), ROW_GROUP_ROWS)
    tables = (take_rows([rows[row_id] for row_id in order[start : start + ROW_GROUP_ROWS]]) for start in starts)
    data = encode_tables(tables, ROW_SCHEMAS[kind], writer=writer, dictionary=_REPEATING)
    digest = sha256(data)
    entry = FileEntry(
        path=layout.part(digest),
        bytes=len(data),
        sha256=digest,
        role="part",
        kind=kind.value,
        rows=len(rows),
        schema_version=ROW_SCHEMA_VERSION,
    )
    return entry, data, order


def decode_part(data: bytes, entry: FileEntry) -> tuple[RowKind, pa.Table]:
    """Kind and rows of a part whose size and sha256 were verified.

    Raises: FormatUnsupported for another schema version or kind; SnapshotCorrupt for anything else.
    """
    try:
        kind = RowKind(entry.kind or "")
    except ValueError as error:
        raise unsupported(entry.path, f"rows of unknown kind {entry.kind!r}") from error
    if entry.schema_version != ROW_SCHEMA_VERSION:
        found = f"{kind} have schema version {entry.schema_version}"
        raise unsupported(entry.path, f"{found}, this Midflight reads {ROW_SCHEMA_VERSION}")
    table = decode_table(data, ROW_SCHEMAS[kind], entry.path)
    if table.num_rows != entry.rows:
        raise corrupt(entry.path, f"manifest says {entry.rows} rows, the file holds {table.num_rows}")
    return kind, table
