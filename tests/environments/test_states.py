"""States are plain JSON, or are refused by the name of what is not."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_workers.environments.states import canonical_state, digest_of
from storage.errors import DataFailure

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text("aä€"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab.", max_size=2), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text("abc", max_size=2), PLAIN, max_size=4))
def test_a_plain_state_is_read_back_as_it_was(state: dict[str, Any]):
    text = canonical_state(state, where="state")
    assert json.loads(text) == state
    assert canonical_state(json.loads(text), where="state") == text


def test_the_spelling_does_not_depend_on_the_order_of_keys():
    assert canonical_state({"b": [1, None], "a": 2.5}, where="state") == '{"a":2.5,"b":[1,null]}'


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"hand": (1, 2)}, r"state of x\.hand is of type tuple, .*use a list"),
        ({"seen": [{"a": {1}}]}, r"state of x\.seen\[0\]\.a is of type set"),
        ({"n": np.int64(3)}, r"state of x\.n is of type numpy\.int64, .*\.tolist\(\)"),
        ({"n": np.float64(3)}, r"state of x\.n is of type numpy\.float64"),
        ({"p": float("nan")}, r"state of x\.p is nan"),
        ({"p": [float("inf")]}, r"state of x\.p\[0\] is inf"),
        ({3: "x"}, r"state of x has the key 3 of type int"),
        ({"o": object()}, r"state of x\.o is of type object"),
        ({"t": "\ud800"}, r"state of x\.t has the text .* not valid Unicode"),
        ([], r"state of x is of type list; an environment's state is a dict"),
    ],
)
def test_what_json_would_change_is_refused_by_place_and_type(state: Any, message: str):
    with pytest.raises(DataFailure, match=message):
        canonical_state(state, where="state of x")


def test_the_digest_is_sha256_of_utf8():
    assert digest_of("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
