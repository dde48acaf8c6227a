"""Sampled tokens cut and joined: token ids, log-probabilities and the spans of their weight versions together."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gpu_workers.controller.ports import KnownCall, PeekedCall, SampledTokens


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
    if start == 0:
        return sampled
    starts, versions = spans_from(sampled.version_starts, sampled.versions, len(sampled), start)
    return SampledTokens(sampled.token_ids[start:], sampled.logprobs[start:], starts, versions)


def spans_from(
    version_starts: Sequence[int], versions: Sequence[int], length: int, start: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Starts and versions of the spans over the tokens from index `start` on, counted from there, of `length`."""
    ends = (*version_starts[1:], length) if version_starts else ()
    spans = [
        (max(0, begin - start), version)
        for begin, end, version in zip(version_starts, ends, versions, strict=True)
        if end > start
    ]
    return tuple(begin for begin, _ in spans), tuple(version for _, version in spans)


def joined(first: SampledTokens, second: SampledTokens) -> SampledTokens:
    """The one behind the other; a version that goes on is one span."""
    if not len(first) or not len(second):
        return second if not len(first) else first
    goes_on = first.versions[-1] == second.versions[0]
    starts = tuple(begin + len(first) for begin in second.version_starts)
    return SampledTokens(
        np.concatenate([first.token_ids, second.token_ids]),
        np.concatenate([first.logprobs, second.logprobs]),
        (*first.version_starts, *starts[goes_on:]),
        (*first.versions, *second.versions[goes_on:]),
    )


def first_to_send(known: KnownCall, *, environment_attempt: int, turn: int, tokens: int) -> int:
    """Where the controller's knowledge of a call with so many tokens ends, 0 if it is not of this very call."""
    same = (known.environment_attempt, known.turn) == (environment_attempt, turn)
    return known.tokens if same and known.tokens <= tokens else 0


def is_outdated(known: KnownCall, *, environment_attempt: int, turn: int) -> bool:
    """Whether the controller asks for a later execution, or a later turn of this one."""
    return (environment_attempt, turn) < (known.environment_attempt, known.turn)


def news(call: PeekedCall, known: KnownCall) -> PeekedCall | None:
    """What a call with all its tokens (`start` 0) adds to what the controller knows; None for an older execution."""
    if is_outdated(known, environment_attempt=call.environment_attempt, turn=call.turn):
        return None
    start = first_to_send(known, environment_attempt=call.environment_attempt, turn=call.turn, tokens=len(call.sampled))
    return replace(call, start=start, sampled=from_token(call.sampled, start))
