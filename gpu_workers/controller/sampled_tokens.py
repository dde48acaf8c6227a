"""Sampled tokens cut and joined: token ids, log-probabilities and the spans of their weight versions together."""

from collections.abc import Sequence

import numpy as np

from gpu_workers.controller.ports import SampledTokens


def sampled_tokens(
    token_ids: Sequence[int], logprobs: Sequence[float], version_starts: Sequence[int], versions: Sequence[int]
) -> SampledTokens:
    """From plain numbers."""
    return SampledTokens(
        np.array(token_ids, dtype=np.int32),
        np.array(logprobs, dtype=np.float32),
        tuple(version_starts),
        tuple(versions),
    )


NO_TOKENS = sampled_tokens((), (), (), ())


def from_token(sampled: SampledTokens, start: int) -> SampledTokens:
    """Everything from index `start` on; nothing when there are not so many."""
    return part_of(sampled, start, len(sampled))


def part_of(sampled: SampledTokens, start: int, end: int) -> SampledTokens:
    """Tokens `start` to `end` (exclusive), with their spans."""
    if (start, end) == (0, len(sampled)):
        return sampled
    if start >= end:
        return NO_TOKENS
    starts, versions = spans_between(sampled.version_starts, sampled.versions, start, end)
    return SampledTokens(sampled.token_ids[start:end], sampled.logprobs[start:end], starts, versions)


def spans_between(
    version_starts: Sequence[int], versions: Sequence[int], start: int, end: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Starts and versions of the spans over tokens `start` to `end` (exclusive), counted from `start`."""
    ends = (*version_starts[1:], end) if version_starts else ()
    spans = [
        (max(0, begin - start), version)
        for begin, until, version in zip(version_starts, ends, versions, strict=True)
        if until > start and begin < end
    ]
    return tuple(begin for begin, _ in spans), tuple(version for _, version in spans)


def joined(parts: Sequence[SampledTokens]) -> SampledTokens:
    """All tokens one after the other; neighbouring spans of one version are one span."""
    if len(parts) < 2:
        return parts[0] if parts else NO_TOKENS
    starts: list[int] = []
    versions: list[int] = []
    length = 0
    for part in parts:
        for start, version in zip(part.version_starts, part.versions, strict=True):
            if not versions or versions[-1] != version:
                starts.append(length + start)
                versions.append(version)
        length += len(part)
    return SampledTokens(
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        tuple(starts),
        tuple(versions),
    )
