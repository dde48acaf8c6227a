"""A dataset of games: prompts are the first observations of a multi-turn environment, each with its own seed."""

import hashlib
import json
from collections.abc import Sequence
from urllib.parse import parse_qsl

import numpy as np

from gpu_workers.environments.character_task import CharacterTask
from gpu_workers.environments.interface import Environment, Json, Step, reset_rng, turn_rng
from gpu_workers.environments.registry import find_environment
from gpu_workers.models.tokenizer import END_TOKEN_ID
from storage.canonical import canonical_json
from storage.errors import ConfigurationError, DataFailure
from storage.run_config import DataConfig

# Share of blind actions before a demonstrated one: a policy meets its own mistakes, and must have seen some.
_CONTEXT_NOISE = 0.25


class EnvironmentTask(CharacterTask):
    """`data.task` names the environment; `name?turns=6` gives every game of it the task {"turns": 6}.

    A conversation: the observation's tokens, the action's with an end token, the next observation's, and so on.
    """

    is_multi_turn = True

    def __init__(self, data: DataConfig) -> None:
        name, _, query = data.task.partition("?")
        super().__init__(data)
        self._environment = find_environment(name)
        self._fields = _fields(data.task, query)
        self._check()

    @property
    def environment(self) -> Environment:
        """The environment whose games these are."""
        return self._environment

    def prompt(self, ordinal: int) -> tuple[tuple[int, ...], str]:
        """The first observation of game `ordinal`; the JSON has `environment`, `version`, `seed` and `task`."""
        self._require(ordinal)
        seed = self._seed("prompt", ordinal)
        task = {
            "environment": self._environment.name,
            "version": self._environment.version,
            "seed": seed,
            "task": self._fields,
        }
        return self.observation_tokens(self._reset(seed).observation), canonical_json(task).decode()

    @property
    def agents(self) -> frozenset[str]:
        """The environment."""
        return frozenset({self._environment.name})

    def agent(self, ordinal: int) -> str:
        """The environment."""
        self._require(ordinal)
        return self._environment.name

    def score(self, task_json: str, token_ids: Sequence[int]) -> float:
        """Never: raises ValueError."""
        raise ValueError(f"environment '{self._environment.name}' rewards its turns; a completion has no score")

    def warm_start_prompt(self, ordinal: int) -> tuple[int, ...]:
        """The conversation of a game of its own up to one of its turns, as a rollout sees it."""
        return self._started_game(ordinal)[0]

    def demonstration(self, ordinal: int, noise: float) -> tuple[int, ...]:
        """The environment's own action there, blind with probability `noise`."""
        seed = self._seed("demonstration", ordinal)
        return self._action_tokens(self._demonstrated(self._started_game(ordinal)[1], seed, 0, noise))

    def fingerprint(self) -> str:
        """Over the environment's name and version, the settings and the first prompts."""
        settings = [self._environment.name, self._environment.version, self._fields, self._data.seed, len(self)]
        first = [self.prompt(ordinal) for ordinal in range(min(len(self), 64))]
        return hashlib.sha256(canonical_json([settings, first])).hexdigest()

    def observation_tokens(self, text: str) -> tuple[int, ...]:
        """An observation as the policy reads it; DataFailure for a character that the tokenizer lacks."""
        try:
            return self._tokenizer.encode(text)
        except ValueError as error:
            raise DataFailure(
                f"environment '{self._environment.name}' shows what the policy can't read: {error}; "
                "pass it through gpu_workers.environments.plain_text.plain_text"
            ) from error

    def action_text(self, token_ids: Sequence[int]) -> str:
        """A completion as the environment reads it: the text before the first end token."""
        said = list(token_ids)
        return self._tokenizer.decode(said[: said.index(END_TOKEN_ID)] if END_TOKEN_ID in said else said)

    def _check(self) -> None:
        """Play the first reset, so that a task which can't work is refused before anything starts."""
        try:
            first = self._reset(self._seed("prompt", 0))
        except ValueError as error:
            raise ConfigurationError(f"data.task is {self._data.task!r}: {error}") from error
        if first.done or not first.observation:
            raise ConfigurationError(
                f"data.task is {self._data.task!r}, but a game of '{self._environment.name}' starts with the "
                f"observation {first.observation!r} and done = {first.done}; it must show something and not be over"
            )

    def _reset(self, seed: int) -> Step:
        return self._environment.reset(dict(self._fields), reset_rng(seed))

    def _started_game(self, ordinal: int) -> tuple[tuple[int, ...], Json]:
        """The tokens up to one turn of a game, and the state there."""
        seed = self._seed("warm start", ordinal)
        step = self._reset(seed)
        tokens = self.observation_tokens(step.observation)
        reached = [(tokens, step.state)]
        for turn in range(self._environment.max_turns - 1):
            action = self._demonstrated(step.state, seed, turn, _CONTEXT_NOISE)
            step = self._environment.step(step.state, action, turn_rng(seed, generation_index=0, turn=turn))
            if step.done:
                break
            tokens = (*tokens, *self._action_tokens(action), *self.observation_tokens(step.observation))
            reached.append((tokens, step.state))
        return reached[self._seed("turn", ordinal) % len(reached)]

    def _demonstrated(self, state: Json, seed: int, turn: int, noise: float) -> str:
        try:
            return self._environment.demonstrate(state, np.random.default_rng([seed, 2, turn]), noise)
        except NotImplementedError as error:
            raise ConfigurationError(str(error)) from error

    def _action_tokens(self, action: str) -> tuple[int, ...]:
        return (*self._tokenizer.encode(action), END_TOKEN_ID)

    def _seed(self, stream: str, ordinal: int) -> int:
        """63 bits, which every reader of tables can hold."""
        digest = hashlib.sha256(f"environment/{stream}/{self._data.seed}/{ordinal}".encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1


def _fields(task: str, query: str) -> Json:
    """`turns=6&mode=easy` as {"turns": 6, "mode": "easy"}."""
    try:
        pairs = parse_qsl(query, strict_parsing=True, keep_blank_values=True) if query else []
    except ValueError as error:
        raise ConfigurationError(f"data.task is {task!r}: {error}; write name?field=value&field=value") from error
    if len({name for name, _ in pairs}) != len(pairs):
        raise ConfigurationError(f"data.task is {task!r}, which gives a field twice; give each once")
    return {name: _value(text) for name, text in pairs}


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
