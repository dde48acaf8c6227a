"""How the tokens of running calls travel from a generator actor to the controller: all in one Arrow message."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gpu_workers.controller.ports import Peek, PeekedCall, SampledTokens
from storage.records import CallSampling

_CALLS = pa.schema(
    [
        ("rollout_id", pa.string()),
        ("attempt", pa.int64()),
        ("environment_attempt", pa.int64()),
        ("turn", pa.int64()),
        ("prompt_tokens", pa.int64()),
        ("prompt_digest", pa.string()),
        ("kind", pa.string()),
        ("seed", pa.int64()),
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("stop_token_ids", pa.list_(pa.int64())),
        ("start", pa.int64()),
        ("version_starts", pa.list_(pa.int64())),
        ("versions", pa.list_(pa.int64())),
        ("finish_reason", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
    ]
)
_TOKEN_COLUMNS = 2


@dataclass(frozen=True, slots=True)
class PeekMessage:
    """The calls as an Arrow message of one record batch, and why others can't be read, by rollout."""

    calls: bytes
    unreadable: Mapping[str, str]


def pack_peek(peek: Peek) -> PeekMessage:
    """For the actor."""
    rows = [_row(call) for call in peek.calls]
    columns = [pa.array([row[field.name] for row in rows], field.type) for field in list(_CALLS)[:-_TOKEN_COLUMNS]]
    sampled = [call.sampled for call in peek.calls]
    columns += [
        _lists([one.token_ids for one in sampled], np.int32),
        _lists([one.logprobs for one in sampled], np.float32),
    ]
    batch = pa.RecordBatch.from_arrays(columns, schema=_CALLS)
    return PeekMessage(batch.serialize().to_pybytes(), dict(peek.unreadable))


def unpack_peek(message: PeekMessage) -> Peek:
    """For the controller. Tokens are views of the message."""
    batch = pa.ipc.read_record_batch(pa.py_buffer(message.calls), _CALLS)
    rows = batch.select(_CALLS.names[:-_TOKEN_COLUMNS]).to_pylist()
    token_ids, logprobs = _arrays(batch.column("token_ids")), _arrays(batch.column("logprobs"))
    calls = (_call(*parts) for parts in zip(rows, token_ids, logprobs, strict=True))
    return Peek(tuple(calls), dict(message.unreadable))


def _row(call: PeekedCall) -> dict[str, Any]:
    sampling = call.sampling
    return {
        "rollout_id": call.rollout_id,
        "attempt": call.attempt,
        "environment_attempt": call.environment_attempt,
        "turn": call.turn,
        "prompt_tokens": call.prompt_tokens,
        "prompt_digest": call.prompt_digest,
        "kind": sampling.kind,
        "seed": sampling.seed,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "stop_token_ids": sampling.stop_token_ids,
        "start": call.start,
        "version_starts": call.sampled.version_starts,
        "versions": call.sampled.versions,
        "finish_reason": call.finish_reason,
    }


def _call(row: dict[str, Any], token_ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> PeekedCall:
    sampling = CallSampling(row["kind"], row["seed"], row["temperature"], row["top_p"], tuple(row["stop_token_ids"]))
    sampled = SampledTokens(token_ids, logprobs, tuple(row["version_starts"]), tuple(row["versions"]))
    return PeekedCall(
        rollout_id=row["rollout_id"],
        attempt=row["attempt"],
        environment_attempt=row["environment_attempt"],
        turn=row["turn"],
        prompt_tokens=row["prompt_tokens"],
        prompt_digest=row["prompt_digest"],
        sampling=sampling,
        start=row["start"],
        sampled=sampled,
        finish_reason=row["finish_reason"],
    )


def _lists(arrays: Sequence[NDArray[Any]], dtype: type) -> pa.Array:
    """A list column without a Python number for each token."""
    offsets = np.zeros(len(arrays) + 1, dtype=np.int32)
    np.cumsum([len(array) for array in arrays], out=offsets[1:])
    values = np.concatenate(arrays) if arrays else np.empty(0, dtype=dtype)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def _arrays(column: pa.Array) -> list[NDArray[Any]]:
    offsets, values = column.offsets.to_numpy(), column.values.to_numpy()
    return [values[begin:end] for begin, end in zip(offsets[:-1], offsets[1:], strict=True)]
