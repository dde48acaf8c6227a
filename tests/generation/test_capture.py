"""From the engine's output to a row of the data plane."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from gpu_workers.controller.ports import GroupOrder, SiblingOrder
from gpu_workers.generation.capture import Completion, completion_of, staged_call
from storage.errors import BrokenInvariant
from storage.records import Prompt, PromptRef, RowKind
from storage.schemas import STAGED_CALLS, row_digest


@dataclass
class Span:
    """Like vLLM's WeightVersionSpan."""

    version: str
    start: int
    end: int


@dataclass
class Logprobs:
    """Like vLLM's FlatLogprobs."""

    logprobs: list[float]


@dataclass
class Output:
    """Like vLLM's CompletionOutput."""

    token_ids: list[int] = field(default_factory=lambda: [4, 5, 1])
    logprobs: Any = field(default_factory=lambda: Logprobs([-0.25, -1.0, -0.1]))
    weight_versions: Any = field(default_factory=lambda: [Span("default", 0, 2), Span("3", 2, 3)])
    finish_reason: str = "stop"


ORDER = GroupOrder("e0-p5", Prompt(PromptRef(5, 0, "ab"), (7, 8), "{}"), (SiblingOrder(2, 1),))


def test_each_token_keeps_its_log_probability_and_version():
    assert completion_of(Output()) == Completion((4, 5, 1), (-0.25, -1.0, -0.1), (0, 2), (0, 3), "stop")


@pytest.mark.parametrize(
    "output",
    [Output(weight_versions=None), Output(logprobs=None), Output(logprobs=Logprobs([-0.5]))],
    ids=["no versions", "no log-probabilities", "too few"],
)
def test_tokens_without_version_or_log_probability_are_a_broken_promise(output: Output):
    with pytest.raises(BrokenInvariant, match="the engine returned 3 tokens"):
        completion_of(output)


def test_a_row_names_its_attempt_and_carries_its_digest():
    row = staged_call(ORDER, ORDER.siblings[0], completion_of(Output()), prompt=ORDER.prompt.token_ids, turn=0)
    assert row.schema == STAGED_CALLS
    (content,) = row.to_pylist()
    assert content["row_id"] == "e0-p5_g2/a1/t0"
    assert content["prompt_token_ids"] == [7, 8]
    assert content["digest"] == row_digest(RowKind.STAGED_CALL, content)
