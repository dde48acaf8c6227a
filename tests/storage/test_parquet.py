"""Parquet as it lies in the store: page checksums, the promised encodings, no pickle, no guessed types."""

import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.errors import SnapshotCorrupt
from storage.layout import RunLayout
from storage.parquet import decode_table, encode_table
from storage.parts import encode_part
from storage.records import RowKind
from storage.rows import handles, row_digests, take_order, take_rows
from storage.schemas import TRAINING_ROWS

SCHEMA = pa.schema([pa.field("row_id", pa.string(), nullable=False), pa.field("tokens", pa.list_(pa.int32()))])


def _part(make: Any) -> bytes:
    _, rows = make.state(buffered=tuple(range(5)))
    return bytes(encode_part(rows, RunLayout("demo"), writer="w")[1])


def test_a_part_has_the_promised_encodings_and_no_statistics_of_ragged_columns(make: Any) -> None:
    group = pq.ParquetFile(io.BytesIO(_part(make))).metadata.row_group(0)
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    for name in ("token_ids.list.element", "logprobs.list.element"):
        assert "BYTE_STREAM_SPLIT" in columns[name].encodings
        assert not columns[name].is_stats_set
    assert {column.compression for column in columns.values()} == {"ZSTD"}
    assert columns["row_id"].is_stats_set


def test_bits_flipped_behind_the_back_of_sha256_meet_the_page_checksums(make: Any) -> None:
    data = _part(make)
    whole = decode_table(data, TRAINING_ROWS, "part")
    silent = 0
    for place in range(4, len(data) - 8, 7):
        flipped = bytearray(data)
        flipped[place] ^= 1 << (place % 8)
        try:
            silent += not decode_table(bytes(flipped), TRAINING_ROWS, "part").equals(whole)
        except SnapshotCorrupt:
            continue
    assert silent == 0


@pytest.mark.parametrize(
    "wrong",
    [
        pa.schema([("row_id", pa.string()), ("tokens", pa.list_(pa.int32()))]),
        pa.schema([pa.field("row_id", pa.string(), nullable=False), ("tokens", pa.list_(pa.int64()))]),
        pa.schema([("tokens", pa.list_(pa.int32())), pa.field("row_id", pa.string(), nullable=False)]),
        pa.schema([pa.field("row_id", pa.string(), nullable=False)]),
    ],
    ids=["nullable", "int64", "order", "missing"],
)
def test_only_exactly_the_schema_is_read(wrong: pa.Schema) -> None:
    data = encode_table(pa.Table.from_pylist([{"row_id": "a", "tokens": [1]}], schema=wrong), writer="w")
    with pytest.raises(SnapshotCorrupt, match="schema"):
        decode_table(data, SCHEMA, "file")


def test_a_null_among_required_list_elements_is_refused() -> None:
    table = pa.Table.from_pylist([{"row_id": "a", "tokens": [1, None]}], schema=SCHEMA)
    with pytest.raises(SnapshotCorrupt, match="column tokens holds nulls"):
        decode_table(encode_table(table, writer="w"), SCHEMA, "file")


def test_the_digests_of_a_batch_are_those_of_its_rows_taken_one_by_one(make: Any) -> None:
    _, rows = make.state(buffered=(1, 2, 3))
    table = take_rows(list(rows.values()))
    batch = table.combine_chunks().to_batches()[0]
    assert row_digests(RowKind.TRAINING_ROW, batch) == batch.column("digest").to_pylist()
    sliced = batch.slice(1, 3)
    assert row_digests(RowKind.TRAINING_ROW, sliced) == sliced.column("digest").to_pylist()
    assert [row.row_id for row in handles(RowKind.TRAINING_ROW, sliced)] == sliced.column("row_id").to_pylist()


def test_rows_of_mixed_batches_are_taken_in_the_told_order(make: Any) -> None:
    _, rows = make.state(buffered=(1, 2, 3))
    mixed = dict(sorted(rows.items(), key=lambda item: item[0][::-1]))
    assert take_rows(list(mixed.values())).column("row_id").to_pylist() == take_order(mixed)
