"""The trace, and what follows from its facts at once: counts for each train step, when the run last got further."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from gpu_workers.controller.ports import Trace

# Facts after which the run is nearer to its end. A dispatch, a failed attempt or a snapshot is not one of them.
_PROGRESS = frozenset(
    {
        "attempt_sealed",
        "checkpoint_published",
        "checkpoint_restored",
        "group_admitted",
        "group_discarded",
        "group_published",
        "group_reserved",
        "prompt_dropped",
        "train_step",
        "weight_sync",
    }
)
_COUNTS = (
    "dropped_groups",
    "replaced_groups",
    "promoted_groups",
    "evicted_groups",
    "aborted_groups",
    "failed_attempts",
    "rollout/stalls",
)


class CountedTrace:
    """Passes every fact on. The clock is in seconds, of any origin."""

    def __init__(self, trace: Trace, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._trace = trace
        self._clock = clock
        self._counts: Counter[str] = Counter()
        self.progressed_at = clock()

    def record(self, event: str, **fields: Any) -> None:
        """Append one event."""
        self._trace.record(event, **fields)
        if event in _PROGRESS:
            self.progressed_at = self._clock()
        counted = _counted_as(event, fields)
        if counted is not None:
            self._counts[counted] += 1

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last time, by metric; each metric is there, if only as 0."""
        counts = {name: self._counts[name] for name in _COUNTS}
        counts["dropped_groups"] += counts["replaced_groups"] + counts["promoted_groups"]
        self._counts.clear()
        return counts


def _counted_as(event: str, fields: Mapping[str, Any]) -> str | None:
    match event:
        case "prompt_dropped":
            return {"replaced": "replaced_groups", "promoted": "promoted_groups"}.get(fields["place"], "dropped_groups")
        case "group_discarded":
            return {"evicted": "evicted_groups", "stale": "aborted_groups"}.get(fields["reason"])
        case "attempt_abandoned":
            return "failed_attempts" if fields["reason"] in ("infrastructure", "data") else None
        case "attempt_interrupted":
            return "failed_attempts"
        case "run_stalled":
            return "rollout/stalls"
        case _:
            return None
