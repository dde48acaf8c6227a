"""A handle on one immutable row: which batch of the data plane holds it, where, and its content digest."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from storage.records import RowKind
from storage.schemas import ROW_SCHEMAS, row_digest


@dataclass(frozen=True, slots=True)
class RowHandle:
    """Row `index` of `batch`. Handles are equal when kind and digest are: the digest covers the id."""

    kind: RowKind
    batch: pa.RecordBatch = field(compare=False, repr=False)
    index: int = field(compare=False)
    digest: str

    @property
    def row_id(self) -> str:
        """The row's id: column `row_id` of its batch."""
        return str(self.batch.column("row_id")[self.index].as_py())


def handles(kind: RowKind, batch: pa.RecordBatch) -> Iterator[RowHandle]:
    """A handle for each row of a batch, with the digests that its `digest` column states."""
    for index, digest in enumerate(batch.column("digest").to_pylist()):
        yield RowHandle(kind, batch, index, digest)


def row_digests(kind: RowKind, batch: pa.RecordBatch) -> list[str]:
    """The digests of all rows, computed from their content; the `digest` column is not looked at."""
    columns = {name: _values(batch.column(name)) for name in ROW_SCHEMAS[kind].names if name != "digest"}
    return [
        row_digest(kind, {name: values[index] for name, values in columns.items()}) for index in range(batch.num_rows)
    ]


def take_rows(rows: Sequence[RowHandle]) -> pa.Table:
    """The rows of one kind as one table, in an order that groups rows of one batch; see `take_order`."""
    kind = rows[0].kind
    batches = [_pick(batch, indices) for batch, indices in _by_batch(rows)]
    return pa.Table.from_batches(batches, schema=ROW_SCHEMAS[kind])


def _pick(batch: pa.RecordBatch, indices: list[int]) -> pa.RecordBatch:
    """Rows of one batch; neighbours are a slice, without a copy."""
    first, count = indices[0], len(indices)
    if indices == list(range(first, first + count)):
        return batch.slice(first, count)
    return batch.take(pa.array(indices))


def take_order(rows: Mapping[str, RowHandle]) -> list[str]:
    """Ids in the order in which `take_rows(list(rows.values()))` puts the rows."""
    by_batch: dict[int, list[str]] = {}
    for row_id, handle in rows.items():
        by_batch.setdefault(id(handle.batch), []).append(row_id)
    return [row_id for ids in by_batch.values() for row_id in ids]


def _by_batch(rows: Sequence[RowHandle]) -> Iterator[tuple[pa.RecordBatch, list[int]]]:
    by_batch: dict[int, tuple[pa.RecordBatch, list[int]]] = {}
    for row in rows:
        by_batch.setdefault(id(row.batch), (row.batch, []))[1].append(row.index)
    yield from by_batch.values()


def _values(column: pa.Array) -> Sequence[Any]:
    """Rows of a column; list columns as numpy slices of one flat buffer, far faster than Python lists."""
    if not pa.types.is_list(column.type):
        return list(column.to_pylist())
    flat: np.ndarray = column.flatten().to_numpy(zero_copy_only=False)
    offsets = column.offsets.to_numpy() - column.offsets[0].as_py()
    return [flat[offsets[index] : offsets[index + 1]] for index in range(len(column))]
