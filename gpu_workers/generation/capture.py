"""Turns what the engine returned for one model call into a row of the data plane."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from gpu_workers.controller.ports import GroupOrder, SampledTokens, SiblingOrder
from gpu_workers.controller.sampled_tokens import sampled_tokens
from storage.errors import BrokenInvariant
from storage.records import RowKind, call_key, rollout_id
from storage.schemas import STAGED_CALLS, row_digest

# vLLM's label of the weights that an engine was started with; they are version 0.
_STARTING_LABEL = "default"


@dataclass(frozen=True, slots=True)
class Completion:
    """What one model call sampled: exact tokens, their log-probabilities and the weight version of each.

    `version_starts[i]` is the index of the first token of `versions[i]`. `finish_reason` is vLLM's: stop, length,
    or what went wrong.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version_starts: tuple[int, ...]
    versions: tuple[int, ...]
    finish_reason: str


def completion_of(output: Any) -> Completion:
    """From a finished `vllm.outputs.CompletionOutput` with `flat_logprobs` and one log-probability per token."""
    spans: Sequence[Any] = output.weight_versions or ()
    token_ids, logprobs = tuple(output.token_ids), tuple(output.logprobs.logprobs) if output.logprobs else ()
    if len(token_ids) != len(logprobs) or bool(token_ids) != bool(spans):
        raise BrokenInvariant(
            f"the engine returned {len(token_ids)} tokens with {len(logprobs)} log-probabilities and {len(spans)} "
            "weight version spans; tokens without either can't be trained: check that vLLM is the pinned version"
        )
    return Completion(
        token_ids=token_ids,
        logprobs=logprobs,
        version_starts=tuple(span.start for span in spans),
        versions=tuple(version_of_label(span.version) for span in spans),
        finish_reason=str(output.finish_reason),
    )


def version_of_label(label: str) -> int:
    """The weight version that vLLM's label stands for. Raises ValueError for a label of nobody's."""
    return 0 if label == _STARTING_LABEL else int(label)


def completion_from(sampled: SampledTokens, finish_reason: str) -> Completion:
    """From sampled tokens that are a whole completion."""
    return Completion(
        tuple(sampled.token_ids.tolist()),
        tuple(sampled.logprobs.tolist()),
        sampled.version_starts,
        sampled.versions,
        finish_reason,
    )


def tokens_of(completion: Completion) -> SampledTokens:
    """What a completion sampled, without its end."""
    return sampled_tokens(completion.token_ids, completion.logprobs, completion.version_starts, completion.versions)


def staged_call(
    order: GroupOrder, sibling: SiblingOrder, completion: Completion, *, prompt: tuple[int, ...], turn: int
) -> pa.RecordBatch:
    """One row of `STAGED_CALLS`, its digest filled in. `prompt`: all tokens before the completion."""
    rollout = rollout_id(order.group_id, sibling.generation_index)
    row: dict[str, Any] = {
        "row_id": call_key(rollout, attempt=sibling.attempt, turn=turn),
        "rollout_id": rollout,
        "group_id": order.group_id,
        "attempt": sibling.attempt,
        "turn": turn,
        "parent_key": call_key(rollout, attempt=sibling.attempt, turn=turn - 1) if turn else None,
        "prompt_token_ids": list(prompt),
        "token_ids": list(completion.token_ids),
        "logprobs": list(completion.logprobs),
        "version_starts": list(completion.version_starts),
        "versions": list(completion.versions),
        "finish_reason": completion.finish_reason,
    }
    row["digest"] = row_digest(RowKind.STAGED_CALL, row)
    return pa.RecordBatch.from_pylist([row], schema=STAGED_CALLS)
