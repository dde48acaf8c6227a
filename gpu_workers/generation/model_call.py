"""Which model call: whose, what it is asked with, and how its tokens are drawn."""

from dataclasses import dataclass
from functools import cached_property

from gpu_workers.controller.ports import GroupOrder, PartialCompletion, SampledTokens, SiblingOrder
from gpu_workers.generation.sampling import ENGINE_KIND
from storage.records import CallSampling, call_key, rollout_id
from storage.schemas import prompt_digest


@dataclass(frozen=True)
class ModelCall:
    """One call of one execution of a sibling. `budget`: most tokens that it may sample."""

    order: GroupOrder
    sibling: SiblingOrder
    turn: int
    prompt: tuple[int, ...]
    sampling: CallSampling
    budget: int

    @cached_property
    def rollout_id(self) -> str:
        """Whose call it is."""
        return rollout_id(self.order.group_id, self.sibling.generation_index)

    @cached_property
    def prompt_digest(self) -> str:
        """What identifies its prompt."""
        return prompt_digest(self.prompt)

    @property
    def request_id(self) -> str:
        """What the engine calls it: another name for each execution, since it may still know the one before."""
        key = call_key(self.rollout_id, attempt=self.sibling.attempt, turn=self.turn)
        executed = self.sibling.environment_attempt
        return key if executed == self.sibling.attempt else f"{key}/{executed}"

    @property
    def partial(self) -> PartialCompletion | None:
        """What there may be of it already: an execution goes on in the middle of its first call only."""
        return self.sibling.partial if self.turn == self.sibling.turns else None

    def finish_reason(self, sampled: SampledTokens) -> str:
        """Why these tokens are the whole completion, in vLLM's words and order; empty when more follow."""
        if len(sampled) and int(sampled.token_ids[-1]) in self.sampling.stop_token_ids:
            return "stop"
        return "length" if len(sampled) >= self.budget else ""

    def refusal(self, partial: PartialCompletion) -> str:
        """Why the call can't go on from these tokens; empty when it can."""
        if partial.turn != self.turn:
            return f"they are of turn {partial.turn}, and turn {self.turn} is the next"
        if partial.prompt_digest != self.prompt_digest:
            return f"the prompt of turn {self.turn} is not the one that they followed"
        if partial.sampling != self.sampling:
            return f"they were drawn with {partial.sampling}, and now it is {self.sampling}"
        if self.sampling.kind == ENGINE_KIND:
            return "the engine's own seeds (generation.seeding 'engine') can't go on from the middle"
        if len(partial.sampled) > self.budget:
            return f"they are {len(partial.sampled)} tokens, more than the {self.budget} that the call may have now"
        return ""
