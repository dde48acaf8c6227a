"""The audit of a run as a table in the Prefect UI."""

from collections.abc import Mapping, Sequence
from typing import Any

from prefect.artifacts import acreate_table_artifact

from tasks.reports import artifact_key, best_effort


async def publish_audit(run: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Store the table: what was counted and found, how many, and the first ids."""
    table = [dict(row) for row in rows]
    key, description = artifact_key("audit", run), f"Every prompt and every trained row of {run}, accounted for"
    await best_effort("audit", acreate_table_artifact(table, key=key, description=description))
