"""The engine's running requests, read on its event loop without asking its process: tokens so far of each.

vLLM's `AsyncLLM` keeps every request's tokens in this process until it has ended, also when the engine's process is
dead. These are internals: what is not as it should be makes a call unreadable, and never fails it.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from gpu_workers.controller.ports import SampledTokens
from gpu_workers.controller.sampled_tokens import NO_TOKENS, sampled_tokens, spans_between
from gpu_workers.generation.capture import version_of_label


class CallUnreadable(Exception):
    """Why the tokens of a running call can't be read."""


class RunningRequest(Protocol):
    """One request, which stays readable after it has ended. All of it raises CallUnreadable."""

    def num_tokens(self) -> int:
        """How many it has sampled so far."""
        ...

    def sampled(self, start: int) -> SampledTokens:
        """Its tokens so far from index `start` on."""
        ...


class RunningRequests(Protocol):
    """All requests of an engine."""

    def find(self, request_id: str) -> RunningRequest | None:
        """The newest request of this name that has not ended. Raises CallUnreadable."""
        ...


class EngineRequests:
    """Those of vLLM's `AsyncLLM`."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def find(self, request_id: str) -> RunningRequest | None:
        """See `RunningRequests`."""
        try:
            processor = self._llm.output_processor
            internal_ids = processor.external_req_ids.get(request_id)
            state = processor.request_states.get(internal_ids[-1]) if internal_ids else None
        except (AttributeError, TypeError, IndexError) as error:
            raise CallUnreadable(f"this vLLM does not show its requests: {error!r}") from error
        return None if state is None else EngineRequest(state)


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A `vllm.v1.engine.output_processor.RequestState` of a request with `flat_logprobs` and one per token."""

    state: Any

    def num_tokens(self) -> int:
        """See `RunningRequest`."""
        try:
            return len(self.state.detokenizer.output_token_ids)
        except (AttributeError, TypeError) as error:
            raise CallUnreadable(f"this vLLM does not show the tokens of a request: {error!r}") from error

    def sampled(self, start: int) -> SampledTokens:
        """See `RunningRequest`. vLLM adds tokens, log-probabilities and versions together, so that they fit."""
        try:
            token_ids = self.state.detokenizer.output_token_ids
            logprobs = self.state.logprobs_processor.logprobs.logprobs
            spans = self.state.weight_version_starts
            versions = tuple(version_of_label(label) for label, _ in spans)
            starts = tuple(begin for _, begin in spans)
        except (AttributeError, TypeError, ValueError) as error:
            raise CallUnreadable(f"this vLLM does not show the tokens of a request: {error!r}") from error
        if not token_ids:
            return NO_TOKENS
        if len(token_ids) != len(logprobs) or not starts or starts[0] != 0:
            raise CallUnreadable(
                f"the engine holds {len(token_ids)} tokens with {len(logprobs)} log-probabilities and the weight "
                f"version spans {spans!r}, which do not fit"
            )
        starts, versions = spans_between(starts, versions, start, len(token_ids))
        return sampled_tokens(token_ids[start:], logprobs[start:], starts, versions)  # a long one is not copied again
