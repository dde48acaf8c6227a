"""`running_sum`: a digit in every turn, to be answered with the sum so far modulo 10."""

from typing import ClassVar

import numpy as np

from gpu_workers.environments.interface import Environment, Json, Step


class RunningSum(Environment):
    """`+7=` is answered by one digit. The sum is that of the digits shown, whatever was answered.

    Reward: 1/turns for every right answer. The task's `turns` (default 5) says how many there are.
    """

    name: ClassVar[str] = "running_sum"
    max_turns: ClassVar[int] = 16

    def reset(self, task: Json, rng: np.random.Generator) -> Step:
        """All digits are drawn here, so that siblings see the same ones."""
        turns = task.get("turns", 5)
        if type(turns) is not int or not 1 <= turns <= self.max_turns:
            raise ValueError(f"running_sum has turns = {turns!r}; give a number from 1 to {self.max_turns}")
        digits = [int(digit) for digit in rng.integers(10, size=turns)]
        return Step({"digits": digits, "turn": 0}, f"+{digits[0]}=")

    def step(self, state: Json, action: str, rng: np.random.Generator) -> Step:
        """One answer."""
        digits, turn = state["digits"], state["turn"] + 1
        reward = (action == _answer(state)) / len(digits)
        after = {"digits": digits, "turn": turn}
        if turn == len(digits):
            return Step(after, "", reward=reward, done=True)
        return Step(after, f"+{digits[turn]}=", reward=reward)

    def demonstrate(self, state: Json, rng: np.random.Generator, noise: float) -> str:
        """The right digit, or any with probability `noise`."""
        blind, digit = rng.random() < noise, int(rng.integers(10))
        return str(digit) if blind else _answer(state)


def _answer(state: Json) -> str:
    return str(sum(state["digits"][: state["turn"] + 1]) % 10)
