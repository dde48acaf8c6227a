"""How old the tokens of a train step are, against sums made by hand."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from storage.trace_analysis import batch_age


def _published(**versions: Sequence[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    for group, tokens in versions.items():
        yield {"event": "group_published", "group_id": group, "version_tokens": [list(pair) for pair in tokens]}


def _trained(step: int, *groups: str) -> dict[str, Any]:
    return {"event": "train_step", "t": float(step), "step": step, "version": step, "group_ids": list(groups)}


def test_batch_age_equals_an_independent_sum() -> None:
    events = [*_published(a=((0, 30), (1, 10)), b=((2, 5),), c=((2, 7), (3, 7)), d=((2, 7), (3, 7)))]
    third, fourth = batch_age([*events, _trained(3, "a", "b"), _trained(4, "c", "d")])
    assert (third.step, third.version, third.num_tokens) == (3, 2, 45)
    assert third.batch_age == pytest.approx((30 * 2 + 10 * 1 + 5 * 0) / 45)
    assert fourth.batch_age == pytest.approx((14 * 1 + 14 * 0) / 28)


def test_a_step_that_was_trained_again_has_the_age_it_was_trained_at_last() -> None:
    events = [*_published(a=((0, 10),)), _trained(2, "a"), *_published(a=((1, 10),)), _trained(2, "a")]
    (age,) = batch_age(events)
    assert age.batch_age == 0.0
