"""`guess15x4`: a secret letter from a to o, to be found in four turns by binary search."""

from typing import ClassVar

import numpy as np

from gpu_workers.environments.interface import Environment, Json, Step

_LETTERS = "abcdefghijklmno"


class GuessLetter(Environment):
    """The reply to a guess is `<` (the secret comes before it), `>` (after it) or `?` (not a letter of the game).

    Reward: 1 for the right guess in any turn. The task may name its `secret`.
    """

    name: ClassVar[str] = "guess15x4"
    max_turns: ClassVar[int] = 4

    def reset(self, task: Json, rng: np.random.Generator) -> Step:
        """Draws the secret unless the task has one."""
        drawn = _LETTERS[int(rng.integers(len(_LETTERS)))]
        secret = task.get("secret", drawn)
        if not isinstance(secret, str) or len(secret) != 1 or secret not in _LETTERS:
            raise ValueError(f"guess15x4 has the secret {secret!r}; give one letter from a to o")
        return Step({"secret": secret, "turn": 0, "low": 0, "high": len(_LETTERS) - 1}, "a-o?")

    def step(self, state: Json, action: str, rng: np.random.Generator) -> Step:
        """One guess; `low` and `high` remember what the replies leave over."""
        turn = state["turn"] + 1
        if action == state["secret"]:
            return Step(state | {"turn": turn}, "", reward=1.0, done=True)
        done = turn >= self.max_turns
        if len(action) != 1 or action not in _LETTERS:
            return Step(state | {"turn": turn}, "?", done=done)
        guess = _LETTERS.index(action)
        if state["secret"] < action:
            return Step(state | {"turn": turn, "high": min(state["high"], guess - 1)}, "<", done=done)
        return Step(state | {"turn": turn, "low": max(state["low"], guess + 1)}, ">", done=done)

    def demonstrate(self, state: Json, rng: np.random.Generator, noise: float) -> str:
        """The middle of what is left, or any letter with probability `noise`."""
        blind, guess = rng.random() < noise, int(rng.integers(len(_LETTERS)))
        return _LETTERS[guess if blind else (state["low"] + state["high"]) // 2]
