"""The data plane of one process: immutable Arrow rows by id, captured by copying an index."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import pyarrow as pa

from gpu_workers.controller.barrier import Cut, Mutation
from storage.errors import BrokenInvariant
from storage.records import RowKind
from storage.rows import RowHandle


class DataPlane(Protocol):
    """Where rows live until the step that trained them is durable. Another (distributed) plane plugs in behind this."""

    def put(self, mutation: Mutation, kind: RowKind, batch: pa.RecordBatch) -> None: ...

    def remove(self, mutation: Mutation, row_ids: Iterable[str]) -> None: ...

    def rows(self, row_ids: Iterable[str]) -> list[RowHandle]: ...

    def capture(self, cut: Cut) -> Mapping[str, RowHandle]: ...

    def load(self, mutation: Mutation, rows: Mapping[str, RowHandle]) -> None: ...


class RowStore:
    """Rows stay alive as long as someone, such as a snapshot being written, holds their handle."""

    def __init__(self) -> None:
        self._rows: dict[str, RowHandle] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, mutation: Mutation, kind: RowKind, batch: pa.RecordBatch) -> None:
        """Add every row of `batch`. An id may not be there already: a training row is written once."""
        mutation.require_live()
        ids = batch.column("row_id").to_pylist()
        digests = batch.column("digest").to_pylist()
        for index, (row_id, digest) in enumerate(zip(ids, digests, strict=True)):
            if row_id in self._rows:
                raise BrokenInvariant(f"row {row_id} is already in the data plane")
            self._rows[row_id] = RowHandle(kind, batch, index, digest)

    def remove(self, mutation: Mutation, row_ids: Iterable[str]) -> None:
        """Forget rows that were consumed or discarded: all of them, or none when one is not there."""
        mutation.require_live()
        going = list(row_ids)
        for row_id in going:
            if row_id not in self._rows:
                raise BrokenInvariant(f"row {row_id} is not in the data plane")
        for row_id in going:
            del self._rows[row_id]

    def rows(self, row_ids: Iterable[str]) -> list[RowHandle]:
        """Handles of rows, in the order asked for."""
        try:
            return [self._rows[row_id] for row_id in row_ids]
        except KeyError as missing:
            raise BrokenInvariant(f"row {missing} is referred to, but not in the data plane") from missing

    def capture(self, cut: Cut) -> Mapping[str, RowHandle]:
        """A copy of the index; the rows themselves are shared."""
        cut.require_live()
        return self._rows.copy()

    def load(self, mutation: Mutation, rows: Mapping[str, RowHandle]) -> None:
        """Replace everything by restored rows."""
        mutation.require_live()
        self._rows = dict(rows)


def gather(handles: Sequence[RowHandle]) -> pa.RecordBatch:
    """One record batch of these rows, in this order; without a copy where they are one slice of one batch."""
    runs: list[pa.RecordBatch] = []
    first = 0
    while first < len(handles):
        end = first + 1
        while end < len(handles) and _follows(handles[end - 1], handles[end]):
            end += 1
        runs.append(handles[first].batch.slice(handles[first].index, end - first))
        first = end
    return runs[0] if len(runs) == 1 else pa.concat_batches(runs)


def _follows(one: RowHandle, other: RowHandle) -> bool:
    return one.batch is other.batch and one.index + 1 == other.index
