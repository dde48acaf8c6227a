"""What the author of an environment writes: two pure functions over a JSON state.

    class GuessLetter(Environment):
        name = "guess_letter"

        def reset(self, task, rng):
            secret = task.get("secret") or str(rng.choice(list("abcdefgh")))
            return Step({"secret": secret}, "a-h?")

        def step(self, state, action, rng):
            if action == state["secret"]:
                return Step(state, "", reward=1.0, done=True)
            return Step(state, "<" if state["secret"] < action else ">")

Nothing else is saved than the state: `rng` is made anew from (seed, turn) for every call.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

import numpy as np

Json = dict[str, Any]


class Mode(StrEnum):
    """How an episode comes back after a restart.

    `pure`: the state is all there is. `exported`: an adapter keeps the foreign environment's state as JSON in its own.
    `replay`: the state holds seed, actions and digests of observations; the restore plays them again and refuses the
    first turn that differs. `restart_only`: it can't come back, the rollout is run again.
    """

    PURE = "pure"
    EXPORTED = "exported"
    REPLAY = "replay"
    RESTART_ONLY = "restart_only"


@dataclass(frozen=True, slots=True)
class Step:
    """What the environment answers: its new state (plain JSON), what the policy reads next, the turn's reward.

    After `done` no turn follows, and `observation` is not shown to the policy.
    """

    state: Json
    observation: str
    reward: float = 0.0
    done: bool = False


class Environment(ABC):
    """Pure functions: the same arguments give the same answer, and nothing outside of the state remembers anything.

    `name` is how configurations and snapshots call it; a change that makes old states unreadable raises `version`.
    `blocking` says that a call takes long: it is made in a thread, and others go on meanwhile.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    mode: ClassVar[Mode] = Mode.PURE
    max_turns: ClassVar[int] = 16
    blocking: ClassVar[bool] = False

    @abstractmethod
    def reset(self, task: Json, rng: np.random.Generator) -> Step:
        """The first state and observation. `task` is the prompt's own JSON; siblings of a group share task and rng.

        Raises ValueError when the task is not one of this environment's.
        """

    @abstractmethod
    def step(self, state: Json, action: str, rng: np.random.Generator) -> Step:
        """What an action leads to. `state` is never changed in place."""

    def demonstrate(self, state: Json, rng: np.random.Generator, noise: float) -> str:
        """An action for warm starts, wrong with probability `noise`. Optional."""
        raise NotImplementedError(f"environment '{self.name}' shows no actions: set policy.warm_start_steps to 0")


def reset_rng(seed: int) -> np.random.Generator:
    """The generator of an episode's reset: that of its prompt, the same for all siblings."""
    return np.random.default_rng([seed, 0])


def turn_rng(seed: int, *, generation_index: int, turn: int) -> np.random.Generator:
    """The generator of one turn (from 0) of one sibling."""
    return np.random.default_rng([seed, 1, generation_index, turn])
