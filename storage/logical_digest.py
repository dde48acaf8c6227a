"""What a bundle means, as one hash: independent of parts, files and writers."""

from collections.abc import Mapping

from storage.canonical import canonical_json, sha256
from storage.records import RolloutState
from storage.rows import RowHandle
from storage.state_records import plain_state


def logical_digest(state: RolloutState, rows: Mapping[str, RowHandle]) -> str:
    """sha256 over the state's records in their order and the rows' kinds and content digests by id."""
    content = {row_id: [row.kind.value, row.digest] for row_id, row in rows.items()}
    return sha256(canonical_json({"state": plain_state(state), "rows": content}))
