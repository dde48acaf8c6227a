"""The plain values of a checkpoint as JSON with a format version and exactly the expected fields."""

import json
from collections.abc import Mapping
from typing import Any

from storage.errors import FormatUnsupported, SnapshotCorrupt

FORMAT_VERSION = 1


def encode_scalars(content: Mapping[str, Any]) -> bytes:
    """Sorted and indented, so that people can read and compare it."""
    return json.dumps({"format_version": FORMAT_VERSION, **content}, indent=1, sort_keys=True).encode()


def decode_scalars(data: bytes, path: str, expected: frozenset[str]) -> dict[str, Any]:
    """The content, which has exactly the `expected` fields. Raises: SnapshotCorrupt, FormatUnsupported."""
    try:
        content: dict[str, Any] = json.loads(data)
        version = content.pop("format_version")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SnapshotCorrupt(
            f"{path}: not the scalars of a trainer ({error!r}); restore an older checkpoint"
        ) from error
    if version != FORMAT_VERSION:
        raise FormatUnsupported(
            f"{path}: format_version is {version!r}, this Midflight reads {FORMAT_VERSION}; use the one that wrote it"
        )
    if content.keys() != expected:
        different = sorted(content.keys() ^ expected)
        raise FormatUnsupported(f"{path}: unknown or missing fields {different}; use the Midflight that wrote it")
    return content
