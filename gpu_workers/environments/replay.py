"""Foreign games that can't be saved: their seed and actions are, and every turn plays them again from the start."""

import random
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock
from typing import Any, ClassVar, Protocol

import numpy as np

from gpu_workers.environments.interface import Environment, Json, Mode, Step
from gpu_workers.environments.states import digest_of
from storage.canonical import canonical_json
from storage.errors import DataFailure


@dataclass(frozen=True, slots=True)
class Answer:
    """What a foreign game says after its start or after an action."""

    observation: str
    reward: float = 0.0
    done: bool = False


class Game(Protocol):
    """One episode of a foreign game. It may draw from the global `random` and `numpy.random`."""

    def start(self) -> Answer:
        """The first answer."""
        ...

    def act(self, action: str) -> Answer:
        """The answer to one action."""
        ...


class ReplayedEnvironment(Environment):
    """The state is {seed, task, actions, digests}; `digests` has one entry for the start and one for each action.

    A game that answers differently when it is played again is refused with a DataFailure that names the first turn.
    """

    mode: ClassVar[Mode] = Mode.REPLAY

    @abstractmethod
    def game(self, seed: int, task: Json) -> Game:
        """A new game. Called, as all of the game, with the global generators seeded by `seed`."""

    def reset(self, task: Json, rng: np.random.Generator) -> Step:
        """The start of a game with a seed drawn from `rng`."""
        seed = int(rng.integers(2**31))
        with _own_randomness(seed):
            answer = self.game(seed, task).start()
        state = {"seed": seed, "task": task, "actions": [], "digests": [_digest(answer)]}
        return Step(state, answer.observation, reward=answer.reward, done=answer.done)

    def step(self, state: Json, action: str, rng: np.random.Generator) -> Step:
        """All actions so far, then this one."""
        with _own_randomness(state["seed"]):
            answer = self._replayed(state).act(action)
        after = state | {"actions": [*state["actions"], action], "digests": [*state["digests"], _digest(answer)]}
        return Step(after, answer.observation, reward=answer.reward, done=answer.done)

    def _replayed(self, state: Json) -> Game:
        game = self.game(state["seed"], state["task"])
        self._compare(0, game.start(), state)
        for turn, action in enumerate(state["actions"], start=1):
            self._compare(turn, game.act(action), state)
        return game

    def _compare(self, turn: int, answer: Answer, state: Json) -> None:
        saved, found = state["digests"][turn], _digest(answer)
        if saved != found:
            when = f"after turn {turn} (action {state['actions'][turn - 1]!r})" if turn else "at the start"
            raise DataFailure(
                f"environment '{self.name}' with seed {state['seed']} answers differently {when} when it is played "
                f"again: the state says sha256 {saved[:12]}…, the game says {found[:12]}… ({answer.observation!r}); "
                "it is not deterministic, or another version of it is installed: run the rollout again from its start"
            )


def _digest(answer: Answer) -> str:
    return digest_of(canonical_json([answer.observation, answer.reward, answer.done]).decode())


_RANDOMNESS = RLock()  # the global generators belong to the process; one game at a time has them


@contextmanager
def _own_randomness(seed: int) -> Iterator[None]:
    """The global generators, seeded; what they were is put back."""
    with _RANDOMNESS:
        before: tuple[Any, Any] = random.getstate(), np.random.get_state()
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
