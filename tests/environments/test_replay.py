"""Games that draw from the process's own generators come back by replay, or are refused by the first turn."""

import random
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from gpu_workers.environments.games.textarena_replay import GuessTheNumber
from gpu_workers.environments.interface import Json, Mode, Step, reset_rng, turn_rng
from gpu_workers.environments.replay import Answer, ReplayedEnvironment
from gpu_workers.environments.states import canonical_state
from storage.errors import ConfigurationError, DataFailure


class Dice:
    """Each action is answered by two throws of the global dice; `six` is what the game's version calls a six."""

    def __init__(self, six: str) -> None:
        self._six = six
        self._turns = 0

    def start(self) -> Answer:
        return Answer(f"start {random.random()}")

    def act(self, action: str) -> Answer:
        self._turns += 1
        thrown = random.randint(1, 6)
        shown = self._six if thrown == 6 else str(thrown)
        return Answer(f"{action} {shown} {np.random.randint(100)}", reward=thrown / 6, done=self._turns == 8)


class DiceGame(ReplayedEnvironment):
    """The dice as an environment."""

    name = "dice"
    six = "6"

    def game(self, seed: int, task: Json) -> Dice:
        return Dice(self.six)


class OtherDiceGame(DiceGame):
    """The next version of the game, which calls a six otherwise."""

    six = "six"


def rng() -> np.random.Generator:
    return turn_rng(7, generation_index=0, turn=0)


def played(game: ReplayedEnvironment, seed: int = 7) -> list[Step]:
    steps = [game.reset({}, reset_rng(seed))]
    while not steps[-1].done:
        steps.append(game.step(steps[-1].state, f"a{len(steps)}", rng()))
    return steps


def test_a_replayed_game_continues_from_any_turn_as_if_nothing_had_happened():
    steps = played(DiceGame())
    assert DiceGame.mode is Mode.REPLAY
    assert len(steps) == 9
    for turn, step in enumerate(steps[:-1], start=1):
        assert DiceGame().step(step.state, f"a{turn}", rng()) == steps[turn]
        canonical_state(step.state, where="dice")


def test_two_games_at_once_and_the_process_s_own_draws_do_not_disturb_each_other():
    alone = [played(DiceGame(), 1), played(DiceGame(), 2)]
    game = DiceGame()
    one, two = game.reset({}, reset_rng(1)), game.reset({}, reset_rng(2))
    for turn in range(1, 5):
        random.random()
        one, two = game.step(one.state, f"a{turn}", rng()), game.step(two.state, f"a{turn}", rng())
    assert [one, two] == [alone[0][4], alone[1][4]]


def test_the_process_s_own_generators_are_left_as_they_were():
    random.seed(3)
    np.random.seed(3)
    expected = random.random(), np.random.random()
    random.seed(3)
    np.random.seed(3)
    played(DiceGame())
    assert (random.random(), np.random.random()) == expected


def test_the_first_turn_that_is_answered_differently_is_named():
    steps = played(DiceGame())
    first = next(turn for turn, step in enumerate(steps) if turn and step.reward == 1.0)
    assert OtherDiceGame().step(steps[first - 1].state, "b", rng())
    with pytest.raises(DataFailure, match=rf"answers differently after turn {first} \(action 'a{first}'\)"):
        OtherDiceGame().step(steps[-2].state, "b", rng())


def test_another_start_is_named_as_the_start():
    state = DiceGame().reset({}, reset_rng(7)).state
    with pytest.raises(DataFailure, match="differently at the start"):
        DiceGame().step(state | {"seed": state["seed"] + 1}, "b", rng())


class RecordedGuessTheNumber:
    """What textarena 0.7.4's `GuessTheNumber-v0-raw` does, by the shape of its calls."""

    def reset(self, num_players: int, seed: int | None = None) -> None:
        random.seed(seed)
        self.secret, self.rewards = random.randint(1, 20), {0: 0.0}
        self.messages: list[tuple[int, str, str]] = [(-1, "You are Player 0.\nEnter your guess.", "prompt")]

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        self.messages.append((0, action, "action"))
        guess = int(action.strip("[]"))
        if guess == self.secret:
            self.rewards = {0: 1}
            return True, {}
        self.messages.append((-1, f"The target number is {'lower' if guess > self.secret else 'higher'}.", "message"))
        return False, {}

    def get_observation(self) -> tuple[int, list[tuple[int, str, str]]]:
        new, self.messages = self.messages, []
        return 0, new

    def close(self) -> tuple[dict[int, float], dict[int, Any]]:
        return self.rewards, {}


@pytest.fixture
def textarena(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the package."""
    module: Any = ModuleType("textarena")
    module.make = lambda name: {"GuessTheNumber-v0-raw": RecordedGuessTheNumber}[name]()
    monkeypatch.setitem(sys.modules, "textarena", module)


@pytest.mark.usefixtures("textarena")
def test_a_textarena_game_is_played_by_numbers_and_continues():
    game, low, high = GuessTheNumber(), 1, 20
    step = game.reset({}, reset_rng(4))
    assert step.observation == "you are player 0. enter your guess."
    while not step.done:
        guess = (low + high) // 2
        step = GuessTheNumber().step(step.state, str(guess), rng())
        assert step.done or step.observation.startswith("the target number is ")
        low, high = (guess + 1, high) if "higher" in step.observation else (low, guess - 1)
    assert step.reward == 1.0


def test_without_textarena_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'midflight\[textarena\]'"):
        GuessTheNumber().reset({}, reset_rng(4))
