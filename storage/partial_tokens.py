"""The rows that hold the tokens of a model call that has not ended, against the record that names them."""

from collections.abc import Mapping
from typing import Any

from storage.records import PartialCall
from storage.rows import RowHandle


def chunk_defect(call: PartialCall, rows: Mapping[str, RowHandle]) -> str | None:
    """What is wrong with the rows of a call, whose ids are in order; None when they hold just its tokens."""
    start = 0
    for chunk in call.chunks:
        row = rows[chunk]
        expected = {
            "rollout_id": call.rollout_id,
            "group_id": call.rollout_id.rpartition("_g")[0],
            "attempt": call.attempt,
            "turn": call.turn,
            "start": start,
        }
        found = {name: _value(row, name) for name in expected}
        if found != expected:
            return f"row {chunk} is of {found}, expected {expected}"
        length = _length(row, "token_ids")
        if (defect := _token_defect(row) or _span_defect(row, length)) is not None:
            return f"row {chunk}: {defect}"
        start += length
    if start != call.num_tokens:
        return f"its rows hold {start} tokens, its record says {call.num_tokens}"
    return None


def _token_defect(row: RowHandle) -> str | None:
    """An engine would be asked to go on from them."""
    lowest = row.batch.column("token_ids")[row.index].values.to_numpy().min(initial=0)
    return f"it holds token {lowest}" if lowest < 0 else None


def _span_defect(row: RowHandle, length: int) -> str | None:
    """Each token has a log-probability, and one weight version."""
    if (logprobs := _length(row, "logprobs")) != length:
        return f"{length} tokens with {logprobs} log-probabilities"
    starts, versions = _value(row, "version_starts"), _value(row, "versions")
    bounds = [*starts, length]
    rising = all(one < other for one, other in zip(bounds, bounds[1:], strict=False))
    if starts[:1] != [0] or not rising or len(starts) != len(versions) or min(versions) < 0:
        return f"{length} tokens with weight versions {versions} from {starts} on"
    return None


def _length(row: RowHandle, column: str) -> int:
    """Of a list column, without copying it."""
    return len(row.batch.column(column)[row.index])


def _value(row: RowHandle, column: str) -> Any:
    return row.batch.column(column)[row.index].as_py()
