"""A line of the trace, and which lines a kill may have torn."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from storage.refusals import corrupt

Event = dict[str, Any]


def parsed(line: bytes) -> Event | None:
    """The event of a line; None when it is none."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or not isinstance(event.get("t"), int | float):
        return None
    named = isinstance(event.get("event"), str) and isinstance(event.get("run_process"), str)
    return event if named else None


def parsed_lines(lines: Iterable[bytes], path: str) -> Iterator[Event]:
    """The events of one file. A process that was killed leaves one torn line, which is left out: the last, or the one
    before another process goes on.

    Raises: SnapshotCorrupt naming file and line for any other line that is no event.
    """
    before: Event | None = None
    torn: tuple[int, bytes] | None = None
    for number, line in enumerate((line for line in lines if line.strip()), start=1):
        event = parsed(line)
        if torn is not None:
            if event is None or before is None or before["run_process"] == event["run_process"]:
                raise corrupt(path, f"line {torn[0]} is no trace event: {torn[1][:80]!r}")
            torn = None
        if event is None:
            torn = (number, line.rstrip(b"\n"))
            continue
        before = event
        yield event
