"""What all selections have in common."""

from collections.abc import Sequence

from storage.records import BufferedGroup


def bounded(selectable: Sequence[BufferedGroup], *, least: int, most: int) -> list[BufferedGroup]:
    """The first `most` groups, or none at all where there are fewer than `least`."""
    return list(selectable[:most]) if len(selectable) >= least else []
