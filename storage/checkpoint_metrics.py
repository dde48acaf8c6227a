"""The metrics of the step that a trainer checkpoint was saved after, a file of it: retention chooses by them."""

import json
import math
from collections.abc import Mapping

from storage.canonical import canonical_json
from storage.checkpointing_config import CheckpointingConfig
from storage.checkpoints import CheckpointFiles
from storage.errors import NotFound
from storage.filesystem import Store
from storage.manifests import FileEntry, Manifest

METRICS, ROLE = "metrics.json", "metrics"


def put_metrics(files: CheckpointFiles, step: int, metrics: Mapping[str, float]) -> FileEntry:
    """Write the metrics of a step beside the model; values that are not finite say nothing and are left out."""
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    return files.put(METRICS, canonical_json({"step": step, "metrics": finite}) + b"\n", ROLE)


def metric_of(store: Store, checkpoint: Manifest, name: str) -> float | None:
    """One metric of a published checkpoint; None if it is not known or can't be read. Raises StoreUnavailable."""
    entry = next((entry for entry in checkpoint.files if entry.role == ROLE), None)
    if entry is None:
        return None
    try:
        value = json.loads(store.read(entry.path))["metrics"].get(name)
    except (NotFound, ValueError, KeyError, TypeError, AttributeError):
        return None
    return float(value) if isinstance(value, int | float) else None


def score_of(store: Store, checkpoint: Manifest, config: CheckpointingConfig) -> float | None:
    """The metric that the best checkpoints are chosen by, turned so that higher is better. Raises StoreUnavailable."""
    value = metric_of(store, checkpoint, config.metric_name or "")
    return value if config.higher_is_better or value is None else -value
