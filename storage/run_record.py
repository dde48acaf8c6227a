"""`run.json`: what a run is, written once by its first controller, for people and tools that look into a store.

Format 1 has no `format_version`. A forked run has format 2: it also says which bundle of which run it started from.
"""

import json
import time
from dataclasses import asdict, dataclass
from typing import Any

from storage.canonical import canonical_json
from storage.errors import AlreadyExists
from storage.filesystem import Store
from storage.identity import identity, redacted
from storage.layout import RunLayout
from storage.refusals import corrupt, unsupported
from storage.run_config import RunConfig

RECORD_FIELDS = {
    1: ("name", "created_at", "fingerprint", "config"),
    2: ("name", "created_at", "fingerprint", "config", "format_version", "forked_from"),
}


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Name, creation time (Unix seconds), fingerprint of the identity, and the redacted first configuration.

    `forked_from` (None: it began by itself) names `run`, `sequence`, `anchor_sequence`, `logical_digest` and `store`.
    """

    name: str
    created_at: float
    fingerprint: str
    config: dict[str, Any]
    forked_from: dict[str, Any] | None = None


def create_run_record(
    store: Store, layout: RunLayout, config: RunConfig, *, forked_from: dict[str, Any] | None = None
) -> RunRecord:
    """Record the run unless it is recorded already; returns what the store holds. Raises StoreError."""
    record = RunRecord(config.name, time.time(), identity(config).fingerprint, redacted(config), forked_from)
    body = asdict(record)
    if forked_from is None:
        del body["forked_from"]
    else:
        body["format_version"] = 2
    try:
        store.create_exclusive(layout.run_json, canonical_json(body) + b"\n")
    except AlreadyExists:
        return read_run_record(store, layout)
    return record


def read_run_record(store: Store, layout: RunLayout) -> RunRecord:
    """The record of a run.

    Raises: NotFound; FormatUnsupported for another version or an unknown field; SnapshotCorrupt for one that can't be
    read; StoreUnavailable.
    """
    path, data = layout.run_json, store.read(layout.run_json)
    try:
        body = dict(json.loads(data))
    except (ValueError, TypeError) as error:
        raise corrupt(path, f"not a run record ({error})") from error
    version = body.get("format_version", 1)
    if type(version) is not int or version not in RECORD_FIELDS:
        raise unsupported(path, f"format_version is {version!r}, this Midflight reads {sorted(RECORD_FIELDS)}")
    if unknown := sorted(body.keys() - set(RECORD_FIELDS[version])):
        raise unsupported(path, f"unknown fields {unknown}")
    body.pop("format_version", None)
    try:
        record = RunRecord(**body)
    except TypeError as error:
        raise corrupt(path, f"not a run record ({error})") from error
    if record.name != layout.run:
        raise corrupt(path, f"is the record of run {record.name!r}, it was copied here")
    return record
