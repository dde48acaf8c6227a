"""The newest model call of each rollout that runs here, with its tokens: what a peek reports.

    opened --(the engine samples)--> running --> ended --> delivered, and forgotten once nobody wants it
                                     running --(aborted, failed, the engine died)--> kept, until it is run again
                                                                             or nobody wants it

A call that has ended stays until the controller no longer asks for it, since its result may still be under way.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from gpu_workers.controller.ports import KnownCall, Peek, PeekedCall, SampledTokens, SiblingOrder, SiblingResult
from gpu_workers.controller.sampled_tokens import from_token, joined
from gpu_workers.generation.capture import Completion, tokens_of
from gpu_workers.generation.engine_requests import CallUnreadable, RunningRequest, RunningRequests
from gpu_workers.generation.known_calls import first_to_send, is_outdated
from gpu_workers.generation.model_call import ModelCall


def blames_prompt(result: SiblingResult | None) -> bool:
    """Whether an execution came to a data failure, which another attempt answers: its tokens are of no use. Without a
    result it was aborted, or its engine died.
    """
    failure = None if result is None else result.failure
    return failure is not None and not (failure.infrastructure or failure.refused)


class BookedCall:
    """One call, and where its tokens are: those that it went on from, then those of the engine's request."""

    def __init__(
        self, call: ModelCall, started_from: SampledTokens, requests: RunningRequests, *, sampled_anew: bool
    ) -> None:
        self.call = call
        self.running = True
        self._started_from = started_from
        self._sampled_anew = sampled_anew
        self._requests = requests
        self._asked = False
        self._request: RunningRequest | None = None
        self._completion: Completion | None = None
        self._kept: SampledTokens | None = None
        self._unreadable = ""

    def asked(self) -> None:
        """The engine has been asked: it knows the request from now on, until that has ended."""
        self._asked = True
        with suppress(CallUnreadable):  # whoever peeks will learn of it
            self._found()

    def end(self, completion: Completion) -> None:
        """The call has all its tokens."""
        self._completion = completion

    def settle(self) -> None:
        """The engine is done with the request, or was told to be: keep the tokens, not what belongs to the engine."""
        try:
            self._kept = tokens_of(self._completion) if self._completion else self._sampled(0)
        except CallUnreadable as error:
            self._unreadable = str(error)
        self._asked, self._request = False, None

    def peeked(self, known: KnownCall) -> PeekedCall:
        """The call as it is now, without the tokens that the controller knows. Raises CallUnreadable."""
        call, sibling = self.call, self.call.sibling
        # What is sampled anew is not what the controller may still hold of this call.
        start = 0 if self._sampled_anew else self._first_to_send(known)
        return PeekedCall(
            rollout_id=call.rollout_id,
            attempt=sibling.attempt,
            environment_attempt=sibling.environment_attempt,
            turn=call.turn,
            prompt_tokens=len(call.prompt),
            prompt_digest=call.prompt_digest,
            sampling=call.sampling,
            start=start,
            sampled=self._sampled(start),
            finish_reason=self._completion.finish_reason if self._completion else "",
        )

    def is_outdated(self, known: KnownCall) -> bool:
        """Whether the controller asks for a later execution or turn than this call's."""
        executed = self.call.sibling.environment_attempt
        return is_outdated(known, environment_attempt=executed, turn=self.call.turn)

    def _first_to_send(self, known: KnownCall) -> int:
        if self._kept is not None:
            tokens = len(self._kept)
        else:
            request = self._found()
            tokens = len(self._started_from) + (request.num_tokens() if request else 0)
        executed = self.call.sibling.environment_attempt
        return first_to_send(known, environment_attempt=executed, turn=self.call.turn, tokens=tokens)

    def _sampled(self, start: int) -> SampledTokens:
        if self._kept is not None:
            return from_token(self._kept, start)
        before, request = len(self._started_from), self._found()
        if request is None or start < before:
            first = from_token(self._started_from, start)
            return joined((first, request.sampled(0))) if request else first
        return request.sampled(start - before)

    def _found(self) -> RunningRequest | None:
        """The engine's request; None before the engine was asked."""
        if self._unreadable:
            raise CallUnreadable(self._unreadable)
        if self._request is None and self._asked:
            self._request = self._requests.find(self.call.request_id)
            if self._request is None:
                raise CallUnreadable(f"the engine does not know request {self.call.request_id}")
        return self._request


class CallBook:
    """The calls by rollout, of groups whose running attempts are kept: nobody asks for others, nor has them forgotten.
    One that `keeps` nothing is for whoever never asks.
    """

    def __init__(self, requests: RunningRequests, *, keeps: bool, unreadable: str = "") -> None:
        """`unreadable`: why no call of this generator can be continued."""
        self._requests = requests
        self._keeps = keeps
        self._unreadable = unreadable
        self._calls: dict[str, BookedCall] = {}

    def __len__(self) -> int:
        return len(self._calls)

    @contextmanager
    def opened(self, call: ModelCall, started_from: SampledTokens, *, sampled_anew: bool) -> Iterator[BookedCall]:
        """The call while it is sampled. It takes the place of its rollout's last one."""
        booked = BookedCall(call, started_from, self._requests, sampled_anew=sampled_anew)
        if not (self._keeps and call.order.keeps_running):
            yield booked
            return
        last = self._calls.get(call.rollout_id)
        if last is None or last.call.sibling.environment_attempt <= call.sibling.environment_attempt:
            self._calls[call.rollout_id] = booked
        try:
            yield booked
        finally:
            booked.settle()

    def over(self, rollout: str, sibling: SiblingOrder, *, forget: bool) -> None:
        """This execution of a sibling runs here no more."""
        booked = self._calls.get(rollout)
        if booked is None or booked.call.sibling.environment_attempt != sibling.environment_attempt:
            return
        booked.running = False
        if forget:
            del self._calls[rollout]

    def peek(self, wanted: Mapping[str, KnownCall] | None) -> Peek:
        """The calls of these rollouts; None: all of them, whole. Others that do not run any more are forgotten."""
        if wanted is None:
            asked_for = {rollout: KnownCall(0) for rollout in self._calls}
        else:
            asked_for = {rollout: known for rollout, known in wanted.items() if rollout in self._calls}
            self._calls = {r: booked for r, booked in self._calls.items() if booked.running or r in wanted}
        calls: list[PeekedCall] = []
        unreadable: dict[str, str] = {}
        for rollout, known in asked_for.items():
            booked = self._calls[rollout]
            if booked.is_outdated(known):
                continue
            try:
                if self._unreadable:
                    raise CallUnreadable(self._unreadable)
                calls.append(booked.peeked(known))
            except CallUnreadable as error:
                unreadable[rollout] = str(error)
        return Peek(tuple(calls), unreadable)
