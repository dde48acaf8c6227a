"""Sampled tokens with their weight versions: cut anywhere and joined again they are the same."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gpu_workers.controller.ports import SampledTokens
from gpu_workers.controller.sampled_tokens import NO_TOKENS, from_token, joined, part_of, sampled_tokens


def of_versions(versions: list[int]) -> SampledTokens:
    """As many tokens as versions; spans begin where the version changes."""
    starts = [place for place, version in enumerate(versions) if place == 0 or versions[place - 1] != version]
    count = len(versions)
    return sampled_tokens(
        range(100, 100 + count), [-0.5 * n for n in range(count)], starts, [versions[place] for place in starts]
    )


def plain(sampled: SampledTokens) -> tuple[list[int], list[float], tuple[int, ...], tuple[int, ...]]:
    return sampled.token_ids.tolist(), sampled.logprobs.tolist(), sampled.version_starts, sampled.versions


def beginning(versions: list[int], end: int) -> SampledTokens:
    return of_versions(versions[:end])


VERSIONS = st.lists(st.integers(0, 2), max_size=12)


@given(VERSIONS, st.integers(0, 13))
def test_what_is_cut_in_two_joins_to_the_whole(versions: list[int], cut: int):
    whole = of_versions(versions)
    assert plain(joined((beginning(versions, cut), from_token(whole, cut)))) == plain(whole)


@given(VERSIONS, st.integers(0, 13), st.integers(0, 13))
def test_a_part_is_that_of_its_tokens_alone(versions: list[int], start: int, end: int):
    start, end = sorted((min(start, len(versions)), min(end, len(versions))))
    part, alone = part_of(of_versions(versions), start, end), of_versions(versions[start:end])
    assert (part.version_starts, part.versions) == (alone.version_starts, alone.versions)
    assert part.token_ids.tolist() == list(range(100 + start, 100 + end))


@given(VERSIONS, st.integers(0, 13))
def test_the_rest_has_its_own_spans_counted_from_its_first_token(versions: list[int], cut: int):
    rest = from_token(of_versions(versions), cut)
    expected = of_versions(versions[cut:])
    assert (rest.version_starts, rest.versions) == (expected.version_starts, expected.versions)
    assert rest.token_ids.tolist() == list(range(100 + cut, 100 + len(versions)))


def test_nothing_is_joined_to_nothing():
    assert plain(joined((NO_TOKENS, NO_TOKENS))) == ([], [], (), ())
    assert (NO_TOKENS.token_ids.dtype, NO_TOKENS.logprobs.dtype) == (np.int32, np.float32)
