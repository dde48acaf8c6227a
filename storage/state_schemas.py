"""Arrow schemas of the rollout state's tables, by version.

Version 2 added episodes, and `resumes` to a sibling; version 3 model calls that have not ended.
"""

from collections.abc import Mapping

import pyarrow as pa

STATE_SCHEMA_VERSION = 3

_NULLABLE = ("target_step", "start_version", "claimed_by", "sealed")


def _fields(*fields: tuple[str, pa.DataType]) -> list[pa.Field]:
    return [pa.field(name, kind, nullable=name in _NULLABLE) for name, kind in fields]


def _schema(*fields: tuple[str, pa.DataType]) -> pa.Schema:
    return pa.schema(_fields(*fields))


def _list_of(kind: pa.DataType) -> pa.DataType:
    """A list whose elements are required: a file can't even express a null among them."""
    return pa.list_(pa.field("element", kind, nullable=False))


def _struct(*fields: tuple[str, pa.DataType]) -> pa.DataType:
    return pa.struct(_fields(*fields))


_PROMPT = (("prompt_id", pa.int64()), ("epoch", pa.int64()), ("content_hash", pa.string()))

_VERSION_TOKENS = _list_of(_struct(("version", pa.int64()), ("tokens", pa.int64())))

_BUFFERED = (
    *_PROMPT,
    ("order", pa.int64()),
    ("target_step", pa.int64()),
    ("start_version", pa.int64()),
    ("row_ids", _list_of(pa.string())),
    ("rewards", _list_of(pa.float64())),
    ("num_tokens", pa.int64()),
    ("version_tokens", _VERSION_TOKENS),
    ("claimed_by", pa.int64()),
)

_SEALED = _struct(
    ("call_keys", _list_of(pa.string())),
    ("digests", _list_of(pa.string())),
    ("reward", pa.float64()),
    ("masked", pa.bool_()),
    ("num_tokens", pa.int64()),
)

_SIBLING_1 = (
    ("generation_index", pa.int64()),
    ("attempt", pa.int64()),
    ("status", pa.string()),
    ("infrastructure_failures", pa.int64()),
    ("data_failures", pa.int64()),
    ("sealed", _SEALED),
)
_SIBLING = (*_SIBLING_1, ("resumes", pa.int64()))

REPLAY_INDEX = _schema(*_BUFFERED)
TRAINED = _schema(("step", pa.int64()), ("position", pa.int64()), *_BUFFERED)


def _ledger(sibling: tuple[tuple[str, pa.DataType], ...]) -> pa.Schema:
    return _schema(
        *_PROMPT,
        ("level", pa.string()),
        ("batch", pa.int64()),
        ("order", pa.int64()),
        ("phase", pa.string()),
        ("status", pa.string()),
        ("target_step", pa.int64()),
        ("start_version", pa.int64()),
        ("siblings", _list_of(_struct(*sibling))),
    )


LEDGER = _ledger(_SIBLING)
EPISODES = _schema(
    ("rollout_id", pa.string()),
    ("attempt", pa.int64()),
    ("instance", pa.string()),
    ("environment", pa.string()),
    ("version", pa.int64()),
    ("mode", pa.string()),
    ("seed", pa.int64()),
    ("task_json", pa.string()),
    ("task_digest", pa.string()),
    ("turn", pa.int64()),
    ("state_json", pa.string()),
    ("state_sha256", pa.string()),
    ("messages_json", pa.string()),
    ("rewards", _list_of(pa.float64())),
    ("calls", _list_of(pa.string())),
    ("weight_versions", _list_of(pa.int64())),
    ("deadline_left_s", pa.float64()),
    ("parked_s", pa.float64()),
)
_SAMPLING = _struct(
    ("kind", pa.string()),
    ("seed", pa.int64()),
    ("temperature", pa.float64()),
    ("top_p", pa.float64()),
    ("stop_token_ids", _list_of(pa.int64())),
)
PARTIAL_CALLS = _schema(
    ("rollout_id", pa.string()),
    ("attempt", pa.int64()),
    ("turn", pa.int64()),
    ("prompt_tokens", pa.int64()),
    ("prompt_digest", pa.string()),
    ("sampling", _SAMPLING),
    ("chunks", _list_of(pa.string())),  # row ids of its tokens, in their order
    ("num_tokens", pa.int64()),
    ("finish_reason", pa.string()),
)
SPARE_PROMPTS = _schema(*_PROMPT)
DROPPED = _schema(*_PROMPT, ("reason", pa.string()), ("target_step", pa.int64()))
ROWS = _schema(
    ("row_id", pa.string()),
    ("kind", pa.string()),
    ("part", pa.string()),  # path of the part in the store
    ("offset", pa.int64()),  # the row's place in that part
    ("digest", pa.string()),
)

STATE_SCHEMAS = {
    "replay_index": REPLAY_INDEX,
    "ledger": LEDGER,
    "spare_prompts": SPARE_PROMPTS,
    "dropped": DROPPED,
    "trained": TRAINED,
    "rows": ROWS,
    "episodes": EPISODES,
    "partial_calls": PARTIAL_CALLS,
}


def _without(*kinds: str) -> dict[str, pa.Schema]:
    return {kind: schema for kind, schema in STATE_SCHEMAS.items() if kind not in kinds}


# What a reader expects of each version that was ever written.
SCHEMAS_BY_VERSION: Mapping[int, Mapping[str, pa.Schema]] = {
    1: _without("episodes", "partial_calls") | {"ledger": _ledger(_SIBLING_1)},
    2: _without("partial_calls"),
    3: STATE_SCHEMAS,
}

# Every bundle holds each of these files exactly once, even when empty: a missing one is never "no entries".
STATE_KINDS = (*STATE_SCHEMAS, "progress")


def state_kinds(version: int) -> tuple[str, ...]:
    """The files of a bundle in a version of the format."""
    return (*SCHEMAS_BY_VERSION[version], "progress")
