"""Parquet as Midflight writes it: page checksums, zstd 1, one schema per table, nothing guessed."""

import io
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage.refusals import corrupt

ROW_GROUP_ROWS = 2000
_SPLIT_TYPES = (pa.int32(), pa.float32())
_WRITER_KEY = b"midflight.writer"


def encode_table(table: pa.Table, *, writer: str) -> bytes:
    """A table as Parquet bytes; see `encode_tables`."""
    return encode_tables([table], table.schema, writer=writer)


def encode_tables(
    tables: Iterable[pa.Table], schema: pa.Schema, *, writer: str, dictionary: Sequence[str] = ()
) -> bytes:
    """Tables of one schema as one Parquet file. `dictionary` names the columns whose values repeat.

    `writer` goes into the file so that two controllers never write one content-addressed name: a fenced one
    that still deletes its own garbage can't hit what its successor has just written.
    """
    lists = [field.name for field in schema if pa.types.is_list(field.type)]
    split = {
        f"{name}.list.element": "BYTE_STREAM_SPLIT"
        for name in lists
        if schema.field(name).type.value_type in _SPLIT_TYPES
    }
    plain = [field.name for field in schema if not pa.types.is_nested(field.type)]
    # A Python sink takes pages one by one; Arrow's own would be copied whole while the interpreter stands still.
    sink = io.BytesIO()
    with pq.ParquetWriter(
        sink,
        schema.with_metadata({_WRITER_KEY: writer.encode()}),
        compression="zstd",
        compression_level=1,
        use_dictionary=list(dictionary),
        column_encoding=split or None,
        # Statistics of ragged columns cost space and time and tell nothing.
        write_statistics=plain,
        write_page_checksum=True,
    ) as file:
        for table in tables:
            file.write_table(table.cast(file.schema), row_group_size=ROW_GROUP_ROWS)
    return sink.getvalue()


def decode_table(data: bytes, schema: pa.Schema, path: str) -> pa.Table:
    """The table in bytes whose sha256 was verified, with exactly this schema and one chunk per column.

    Raises: SnapshotCorrupt for a failed page checksum, another schema, or nulls where the schema has none.
    """
    try:
        with pq.ParquetFile(
            pa.BufferReader(data), page_checksum_verification=True, arrow_extensions_enabled=False
        ) as file:
            if not file.schema_arrow.equals(schema, check_metadata=False):
                raise corrupt(path, _schema_difference(file.schema_arrow, schema))
            table = file.read(use_threads=False)
        table = table.replace_schema_metadata(None).cast(schema).combine_chunks()
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise corrupt(path, f"not readable as Parquet ({error})") from error
    for field in schema:
        if _has_forbidden_null(table.column(field.name), field):
            raise corrupt(path, f"column {field.name} holds nulls")
    return table


def _has_forbidden_null(column: Any, field: pa.Field) -> bool:
    if column.null_count and not field.nullable:
        return True
    if not pa.types.is_list(field.type):
        return False
    return any(chunk.flatten().null_count for chunk in column.chunks)


def _schema_difference(found: pa.Schema, expected: pa.Schema) -> str:
    unknown = sorted(set(found.names) - set(expected.names))
    missing = sorted(set(expected.names) - set(found.names))
    if unknown or missing:
        return f"schema has unknown fields {unknown} and lacks {missing}"
    changed = [
        f"{field.name} is {found.field(field.name)}, expected {field}"
        for field in expected
        if not found.field(field.name).equals(field)
    ]
    return f"schema differs: {'; '.join(changed) or f'order of columns {found.names}'}"
