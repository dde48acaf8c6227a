"""`textarena_guess`: TextArena's GuessTheNumber for one player, by replay. Needs the extra `textarena`."""

from importlib import import_module
from typing import Any, ClassVar

from gpu_workers.environments.interface import Json
from gpu_workers.environments.plain_text import plain_text
from gpu_workers.environments.replay import Answer, Game, ReplayedEnvironment
from storage.errors import ConfigurationError

_PLAYER = 0


class TextArenaGame:
    """A raw single-player game of TextArena; observations hold what is new, without the player's own words."""

    def __init__(self, game: Any, seed: int) -> None:
        self._game = game
        self._seed = seed

    def start(self) -> Answer:
        """The game's rules."""
        self._game.reset(num_players=1, seed=self._seed)
        return Answer(self._news())

    def act(self, action: str) -> Answer:
        """Its reply; the reward is known when the game is over."""
        done, _ = self._game.step(action)
        if not done:
            return Answer(self._news())
        rewards = self._game.close()
        # Depending on the game, `close` returns the rewards alone or together with facts about the game.
        by_player = rewards[0] if isinstance(rewards, tuple) else rewards
        return Answer("", reward=float(by_player.get(_PLAYER, 0.0)), done=True)

    def _news(self) -> str:
        _, messages = self._game.get_observation()
        return plain_text(" ".join(str(message[1]) for message in messages if message[0] != _PLAYER))


class GuessTheNumber(ReplayedEnvironment):
    """An action is a number; TextArena reads it in square brackets, which are added. Replies hold `higher` or `lower`.

    Reward: TextArena's own, 1 for the right number.
    """

    name: ClassVar[str] = "textarena_guess"
    max_turns: ClassVar[int] = 10
    textarena_id: ClassVar[str] = "GuessTheNumber-v0-raw"

    def game(self, seed: int, task: Json) -> Game:
        """A new game; ConfigurationError when textarena is not installed."""
        try:
            textarena: Any = import_module("textarena")
        except ImportError as error:
            raise ConfigurationError(
                f"environment '{self.name}' needs the package textarena ({error}): pip install 'midflight[textarena]'"
            ) from error
        return _Bracketed(TextArenaGame(textarena.make(self.textarena_id), seed))


class _Bracketed:
    def __init__(self, game: Game) -> None:
        self._game = game

    def start(self) -> Answer:
        return self._game.start()

    def act(self, action: str) -> Answer:
        return self._game.act(f"[{action}]")
