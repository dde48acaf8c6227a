"""Arrow schemas of the rollout state's tables, with their version."""

import pyarrow as pa

STATE_SCHEMA_VERSION = 1

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

_SIBLING = _struct(
    ("generation_index", pa.int64()),
    ("attempt", pa.int64()),
    ("status", pa.string()),
    ("infrastructure_failures", pa.int64()),
    ("data_failures", pa.int64()),
    ("sealed", _SEALED),
)

REPLAY_INDEX = _schema(*_BUFFERED)
TRAINED = _schema(("step", pa.int64()), ("position", pa.int64()), *_BUFFERED)
LEDGER = _schema(
    *_PROMPT,
    ("level", pa.string()),
    ("batch", pa.int64()),
    ("order", pa.int64()),
    ("phase", pa.string()),
    ("status", pa.string()),
    ("target_step", pa.int64()),
    ("start_version", pa.int64()),
    ("siblings", _list_of(_SIBLING)),
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
}

# Every bundle holds each of these files exactly once, even when empty: a missing one is never "no entries".
STATE_KINDS = (*STATE_SCHEMAS, "progress")
