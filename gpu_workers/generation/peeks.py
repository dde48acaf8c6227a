"""Answers of several generators put together, and what a dead one left behind."""

from collections.abc import Iterable, Mapping

from gpu_workers.controller.ports import KnownCall, Peek, PeekedCall
from gpu_workers.generation.known_calls import news


def merged(peeks: Iterable[Peek]) -> Peek:
    """One answer; of a rollout that two know, the later execution's call. What can be read needs no reason."""
    calls: dict[str, PeekedCall] = {}
    unreadable: dict[str, str] = {}
    for peek in peeks:
        for call in peek.calls:
            other = calls.get(call.rollout_id)
            if other is None or _age(other) < _age(call):
                calls[call.rollout_id] = call
        unreadable |= peek.unreadable
    return Peek(tuple(calls.values()), {rollout: why for rollout, why in unreadable.items() if rollout not in calls})


def _age(call: PeekedCall) -> tuple[int, int]:
    return call.environment_attempt, call.turn


class Salvage:
    """The calls of a generator that died, each given out until whoever wants it has it: an answer may be lost."""

    def __init__(self, found: Peek | None = None) -> None:
        """`found`: the answer to being asked for everything."""
        found = found or Peek()
        self._calls = {call.rollout_id: call for call in found.calls}
        self._unreadable = dict(found.unreadable)

    def take(self, wanted: Mapping[str, KnownCall]) -> Peek:
        """What it adds to what is known of these rollouts; calls of which all is known, or of older executions, are
        forgotten unsaid.
        """
        calls = []
        for rollout in [rollout for rollout in wanted if rollout in self._calls]:
            found = news(self._calls[rollout], wanted[rollout])
            if found is None or (found.start and not len(found.sampled)):
                del self._calls[rollout]
            else:
                calls.append(found)
        unreadable = {r: self._unreadable.pop(r) for r in wanted if r in self._unreadable}
        return Peek(tuple(calls), unreadable)
