"""Gymnasium environments played by text: their state and their generator as JSON, so that they continue exactly."""

from abc import abstractmethod
from typing import Any, ClassVar

import gymnasium
import numpy as np

from gpu_workers.environments.interface import Environment, Json, Mode, Step


class GymnasiumText(Environment):
    """An adapter: every call builds the foreign environment anew and fills it from the state.

    `gymnasium_id` and `options` are what `gymnasium.make` gets; its wrappers are left out, time limits are
    `max_turns`. A subclass reads actions, writes observations, and says what of the environment is its state.
    """

    mode: ClassVar[Mode] = Mode.EXPORTED
    gymnasium_id: ClassVar[str]
    options: ClassVar[dict[str, Any]] = {}

    @abstractmethod
    def export(self, game: Any) -> Json:
        """Everything that decides about later turns, as plain JSON, without the generator."""

    @abstractmethod
    def fill(self, game: Any, state: Json) -> None:
        """Put what `export` returned into a new game."""

    @abstractmethod
    def action_of(self, text: str) -> int | None:
        """The foreign action, or None when the text is none: the turn is lost."""

    @abstractmethod
    def describe(self, game: Any, *, first: bool) -> str:
        """What the policy reads."""

    def reset(self, task: Json, rng: np.random.Generator) -> Step:
        """Seeds the foreign generator from `rng`."""
        game = self._game()
        game.reset(seed=int(rng.integers(2**31)))
        return Step(self._state(game, turn=0), self.describe(game, first=True))

    def step(self, state: Json, action: str, rng: np.random.Generator) -> Step:
        """One foreign step with the foreign generator; `rng` is not used."""
        game, turn, number = self._game(), state["turn"] + 1, self.action_of(action)
        self.fill(game, state["game"])
        game.np_random = _generator(state["generator"])
        last = turn >= self.max_turns
        if number is None:
            return Step(self._state(game, turn=turn), "? " + self.describe(game, first=False), done=last)
        _, reward, terminated, truncated, _ = game.step(number)
        done = bool(terminated or truncated) or last
        return Step(self._state(game, turn=turn), self.describe(game, first=False), reward=float(reward), done=done)

    def _game(self) -> Any:
        return gymnasium.make(self.gymnasium_id, disable_env_checker=True, **self.options).unwrapped

    def _state(self, game: Any, *, turn: int) -> Json:
        return {"turn": turn, "game": self.export(game), "generator": _exported(game.np_random)}


def _exported(generator: np.random.Generator) -> Json:
    """PCG64's state. Its 128-bit numbers are written as text: other readers of JSON would round them."""
    saved: Any = generator.bit_generator.state
    return {
        "kind": saved["bit_generator"],
        "state": str(saved["state"]["state"]),
        "inc": str(saved["state"]["inc"]),
        "has_uint32": int(saved["has_uint32"]),
        "uinteger": int(saved["uinteger"]),
    }


def _generator(saved: Json) -> np.random.Generator:
    bits = np.random.PCG64()
    bits.state = {
        "bit_generator": saved["kind"],
        "state": {"state": int(saved["state"]), "inc": int(saved["inc"])},
        "has_uint32": saved["has_uint32"],
        "uinteger": saved["uinteger"],
    }
    return np.random.Generator(bits)
