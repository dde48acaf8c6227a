"""Rollouts that a Gym plays: which are running here, and the model calls that each has made so far."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pyarrow as pa

from gpu_workers.controller.ports import GroupOrder, SiblingOrder
from gpu_workers.environments.gym_task import ChatMessage, GymTask
from gpu_workers.environments.ports import EpisodeId
from gpu_workers.generation.capture import Completion, staged_call
from gpu_workers.generation.model_calls import ModelCalls


@dataclass(slots=True)
class GymRollout:
    """One rollout and its captured calls, in the order in which they were asked for; `generation_s`: their seconds."""

    order: GroupOrder
    sibling: SiblingOrder
    asked: int = 0
    generation_s: float = 0.0
    captured: dict[int, pa.RecordBatch] = field(default_factory=dict)
    _said: tuple[ChatMessage, ...] = ()
    _tokens: tuple[int, ...] = ()

    def calls(self) -> pa.RecordBatch | None:
        """Rows of `STAGED_CALLS`; None when there was no call."""
        if not self.captured:
            return None
        table = pa.Table.from_batches([self.captured[turn] for turn in sorted(self.captured)])
        return table.combine_chunks().to_batches()[0]

    def continued(self, messages: Sequence[ChatMessage]) -> tuple[tuple[int, ...], Sequence[ChatMessage]]:
        """The exact tokens of the newest call that these messages go on from, and the messages beyond it.

        What the policy sampled is never encoded anew: its text may have other tokens. Messages that go on from nothing
        known begin anew, and the rollout's calls will not join.
        """
        known = len(self._said)
        return (self._tokens, messages[known:]) if tuple(messages[:known]) == self._said else ((), messages)

    def add(self, messages: Sequence[ChatMessage], answer: str, tokens: tuple[int, ...]) -> None:
        """Remember the conversation up to a call's answer, with its exact tokens."""
        self._said, self._tokens = (*messages, ("assistant", answer)), tokens


class GymRollouts:
    """The running rollouts by their keys."""

    def __init__(self, calls: ModelCalls, task: GymTask) -> None:
        self._calls = calls
        self._task = task
        self._running: dict[str, GymRollout] = {}

    @contextmanager
    def running(self, episode: EpisodeId, order: GroupOrder, sibling: SiblingOrder) -> Iterator[GymRollout]:
        """Within the block model calls with the key `str(episode)` are answered."""
        rollout = self._running[str(episode)] = GymRollout(order, sibling)
        try:
            yield rollout
        finally:
            del self._running[str(episode)]

    def __contains__(self, key: str) -> bool:
        return key in self._running

    def prompt(self, key: str, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """The tokens that a call of a rollout is asked with."""
        tokens, further = self._running[key].continued(messages)
        return (*tokens, *self._task.chat_tokens(further))

    async def complete(self, key: str, messages: Sequence[ChatMessage]) -> tuple[str, Completion]:
        """Sample and capture the next call of a rollout: the answer as text, and as it was sampled.

        Raises InfrastructureFailure; DataFailure for messages that leave no room.
        """
        rollout = self._running[key]
        tokens, turn = self.prompt(key, messages), rollout.asked
        rollout.asked += 1
        began = time.perf_counter()
        completion = await self._calls.complete(rollout.order, rollout.sibling, tokens, turn=turn)
        rollout.generation_s += time.perf_counter() - began
        answer = self._task.text(completion.token_ids)
        rollout.captured[turn] = staged_call(rollout.order, rollout.sibling, completion, prompt=tokens, turn=turn)
        rollout.add(messages, answer, (*tokens, *completion.token_ids))
        return answer, completion
