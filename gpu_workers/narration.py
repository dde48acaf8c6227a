"""The few events of a trace that a person wants to read in a log, as sentences."""

from collections.abc import Callable, Mapping
from typing import Any

from gpu_workers.controller.ports import Trace

Say = Callable[[str, str], None]  # level, message


class NarratedTrace:
    """Passes every event on, and tells those that are rare and matter."""

    def __init__(self, trace: Trace, say: Say) -> None:
        self._trace = trace
        self._say = say

    def record(self, event: str, **fields: Any) -> None:
        """Append one event."""
        self._trace.record(event, **fields)
        told = sentence(event, fields)
        if told is not None:
            self._say(*told)


def sentence(event: str, fields: Mapping[str, Any]) -> tuple[str, str] | None:
    """Level and text of an event; None for the many that belong to the trace only."""
    match event:
        case "generator_died":
            groups = fields["groups"]
            return "WARNING", f"generator {fields['index']} died with {groups} groups in flight: {fields['reason']}"
        case "generator_restarted":
            return "INFO", f"generator {fields['index']} runs again after {float(fields['seconds']):.1f} s"
        case "generator_lost":
            return "ERROR", f"generator {fields['index']} is given up: {fields['reason']}"
        case "checkpoint_failed":
            return "ERROR", f"trainer checkpoint of step {fields['step']} was not published: {fields['reason']}"
        case "snapshot_attempt" if fields["outcome"] not in ("completed", "skipped"):
            return "WARNING", f"snapshot attempt {fields['number']} {fields['outcome']}: {fields['reason']}"
        case "prompt_dropped":
            return "WARNING", f"prompt {fields['group_id']} is dropped: {fields['reason']}"
        case "run_stalled":
            return "ERROR", f"nothing got any further for {float(fields['seconds']):.0f} s"
        case "finalization_unknown":
            return "ERROR", f"group {fields['group_id']}: its rows may or may not be there ({fields['reason']})"
        case "run_ended":
            return "INFO", f"the controller ended: {fields['reason']}"
    return None
