"""Arrow schemas of the data plane's rows, with their versions, and the digest that identifies a row's content."""

import hashlib
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from storage.records import RowKind

ROW_SCHEMA_VERSION = 1

_TOKENS = pa.list_(pa.int32())
_LOGPROBS = pa.list_(pa.float32())

STAGED_CALLS = pa.schema(
    [
        pa.field("row_id", pa.string(), nullable=False),  # the call key: <rollout_id>/a<attempt>/t<turn>
        pa.field("rollout_id", pa.string(), nullable=False),
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("attempt", pa.int32(), nullable=False),
        pa.field("turn", pa.int32(), nullable=False),
        pa.field("parent_key", pa.string()),
        pa.field("prompt_token_ids", _TOKENS, nullable=False),
        pa.field("token_ids", _TOKENS, nullable=False),  # sampled tokens only
        pa.field("logprobs", _LOGPROBS, nullable=False),  # one per sampled token
        pa.field("version_starts", _TOKENS, nullable=False),  # spans over sampled tokens: start index ...
        pa.field("versions", _TOKENS, nullable=False),  # ... and the weight version from there on
        pa.field("finish_reason", pa.string(), nullable=False),  # stop | length
        pa.field("digest", pa.string(), nullable=False),
    ]
)

TRAINING_ROWS = pa.schema(
    [
        pa.field("row_id", pa.string(), nullable=False),  # the rollout id: <group_id>_g<generation_index>
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("prompt_id", pa.int64(), nullable=False),
        pa.field("epoch", pa.int32(), nullable=False),
        pa.field("generation_index", pa.int32(), nullable=False),
        pa.field("attempt", pa.int32(), nullable=False),
        pa.field("token_ids", _TOKENS, nullable=False),  # whole sequence: prompt, sampled and environment tokens
        pa.field("loss_mask", pa.list_(pa.bool_()), nullable=False),  # True where the policy sampled the token
        pa.field("logprobs", _LOGPROBS, nullable=False),  # the generator's, 0.0 where loss_mask is False
        pa.field("version_starts", _TOKENS, nullable=False),  # spans over token_ids; version -1: not sampled
        pa.field("versions", _TOKENS, nullable=False),
        pa.field("reward", pa.float32(), nullable=False),
        pa.field("masked", pa.bool_(), nullable=False),  # the whole row counts in the baseline but not in the loss
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("digest", pa.string(), nullable=False),
    ]
)

PARTIAL_TOKENS = pa.schema(
    [
        pa.field("row_id", pa.string(), nullable=False),  # <call key>/p<start>-<end>
        pa.field("rollout_id", pa.string(), nullable=False),
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("attempt", pa.int32(), nullable=False),
        pa.field("turn", pa.int32(), nullable=False),
        pa.field("start", pa.int32(), nullable=False),  # index of the first of these among the call's sampled tokens
        pa.field("token_ids", _TOKENS, nullable=False),  # sampled tokens only
        pa.field("logprobs", _LOGPROBS, nullable=False),  # one per token
        pa.field("version_starts", _TOKENS, nullable=False),  # spans over these tokens: start index, from 0 ...
        pa.field("versions", _TOKENS, nullable=False),  # ... and the weight version from there on
        pa.field("digest", pa.string(), nullable=False),
    ]
)

ROW_SCHEMAS = {
    RowKind.STAGED_CALL: STAGED_CALLS,
    RowKind.TRAINING_ROW: TRAINING_ROWS,
    RowKind.PARTIAL_TOKENS: PARTIAL_TOKENS,
}


def content_digest(*parts: str | float | Sequence[int] | Sequence[float] | np.ndarray) -> str:
    """sha256 (hex) over a row's identifying content, each part length-prefixed.

    Integers sequences hash as little-endian int32, float sequences and numbers as float32, strings as UTF-8.
    """
    digest = hashlib.sha256()
    for part in parts:
        data = _encode(part)
        digest.update(struct.pack("<q", len(data)))
        digest.update(data)
    return digest.hexdigest()


def prompt_digest(token_ids: Sequence[int] | np.ndarray) -> str:
    """What identifies everything that a model call was asked with."""
    return content_digest("prompt", token_ids)


def _encode(part: str | float | Sequence[int] | Sequence[float] | np.ndarray) -> bytes:
    if isinstance(part, str):
        return part.encode()
    if isinstance(part, bool | int | float):
        return struct.pack("<f", part)
    array = np.asarray(part)
    kind = "<f4" if array.dtype.kind == "f" else "<i4"
    return bytes(array.astype(kind).tobytes())


_DIGESTED = {
    RowKind.STAGED_CALL: (
        "row_id",
        "prompt_token_ids",
        "token_ids",
        "logprobs",
        "version_starts",
        "versions",
        "finish_reason",
    ),
    RowKind.TRAINING_ROW: (
        "row_id",
        "token_ids",
        "loss_mask",
        "logprobs",
        "version_starts",
        "versions",
        "reward",
        "masked",
        "finish_reason",
    ),
    RowKind.PARTIAL_TOKENS: ("row_id", "token_ids", "logprobs", "version_starts", "versions"),
}


def row_digest(kind: RowKind, row: dict[str, Any]) -> str:
    """The digest of a row given as a plain dict (as from `Table.to_pylist()`), without its `digest` column."""
    return content_digest(*(row[name] for name in _DIGESTED[kind]))
