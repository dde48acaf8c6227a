"""The wording of refused bundles: the file, what differs, and the next step."""

from storage.errors import FormatUnsupported, SnapshotCorrupt


def corrupt(where: str, problem: str) -> SnapshotCorrupt:
    """The file or bundle `where` is not what was written."""
    return SnapshotCorrupt(f"{where}: {problem}; restore from an older one")


def unsupported(where: str, problem: str) -> FormatUnsupported:
    """The file or bundle `where` was written by another Midflight."""
    return FormatUnsupported(f"{where}: {problem}; use the Midflight that wrote it")
