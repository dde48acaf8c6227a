"""What a bundle means, as one hash: independent of parts, files and writers."""

import hashlib
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from storage.canonical import canonical_json
from storage.records import RolloutState
from storage.rows import RowHandle
from storage.state_records import plain_state
from storage.state_schemas import STATE_SCHEMA_VERSION

# Encoding one large value would stop every other thread until it is done.
_CHUNK = 200


def logical_digest(state: RolloutState, rows: Mapping[str, RowHandle], *, version: int = STATE_SCHEMA_VERSION) -> str:
    """sha256 over the state's records in their order and the rows' kinds and content digests by id.

    `version`: that of the format; an older one knows fewer fields.
    """
    digest = hashlib.sha256()
    for name, values in plain_state(state, version).items():
        _update(digest, name, iter(values if isinstance(values, list) else [values]))
    _update(digest, "rows", ([row_id, rows[row_id].kind.value, rows[row_id].digest] for row_id in sorted(rows)))
    return digest.hexdigest()


def _update(digest: "hashlib._Hash", name: str, values: Iterator[Any]) -> None:
    """One line for each chunk of a named list, and an empty one behind the last."""
    while chunk := list(islice(values, _CHUNK)):
        digest.update(canonical_json([name, chunk]) + b"\n")
    digest.update(b"\n")
