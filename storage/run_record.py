"""`run.json`: what a run is, written once by its first controller, for people and tools that look into a store."""

import json
import time
from dataclasses import asdict, dataclass
from typing import Any

from storage.canonical import canonical_json
from storage.errors import AlreadyExists
from storage.filesystem import Store
from storage.identity import identity, redacted
from storage.layout import RunLayout
from storage.refusals import corrupt
from storage.run_config import RunConfig


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Name, creation time (Unix seconds), fingerprint of the identity, and the redacted first configuration."""

    name: str
    created_at: float
    fingerprint: str
    config: dict[str, Any]


def create_run_record(store: Store, layout: RunLayout, config: RunConfig) -> RunRecord:
    """Record the run unless it is recorded already; returns what the store holds. Raises StoreError."""
    record = RunRecord(config.name, time.time(), identity(config).fingerprint, redacted(config))
    try:
        store.create_exclusive(layout.run_json, canonical_json(asdict(record)) + b"\n")
    except AlreadyExists:
        return read_run_record(store, layout)
    return record


def read_run_record(store: Store, layout: RunLayout) -> RunRecord:
    """The record of a run. Raises NotFound, SnapshotCorrupt for one that can't be read, StoreUnavailable."""
    data = store.read(layout.run_json)
    try:
        return RunRecord(**json.loads(data))
    except (ValueError, TypeError) as error:
        raise corrupt(layout.run_json, f"not a run record ({error})") from error
