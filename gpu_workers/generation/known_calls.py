"""What the controller knows of a running call, and what a call adds to that."""

from dataclasses import replace

from gpu_workers.controller.ports import KnownCall, PeekedCall
from gpu_workers.controller.sampled_tokens import from_token


def first_to_send(known: KnownCall, *, environment_attempt: int, turn: int, tokens: int) -> int:
    """Where the controller's knowledge of a call with so many tokens ends, 0 if it is not of this very call."""
    same = (known.environment_attempt, known.turn) == (environment_attempt, turn)
    return known.tokens if same and known.tokens <= tokens else 0


def is_outdated(known: KnownCall, *, environment_attempt: int, turn: int) -> bool:
    """Whether the controller asks for a later execution, or a later turn of this one."""
    return (environment_attempt, turn) < (known.environment_attempt, known.turn)


def news(call: PeekedCall, known: KnownCall) -> PeekedCall | None:
    """What a call with all its tokens (`start` 0) adds to what the controller knows; None for an older execution."""
    if is_outdated(known, environment_attempt=call.environment_attempt, turn=call.turn):
        return None
    start = first_to_send(known, environment_attempt=call.environment_attempt, turn=call.turn, tokens=len(call.sampled))
    return replace(call, start=start, sampled=from_token(call.sampled, start))
