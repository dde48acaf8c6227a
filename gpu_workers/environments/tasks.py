"""Tasks: prompts that are pure functions of (seed, ordinal), and how the answers of single-turn ones are scored.

No torch, vLLM or Ray: the controller reads prompts from here and generators score with it.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

from gpu_workers.environments.character_task import CharacterTask
from gpu_workers.environments.environment_task import EnvironmentTask
from gpu_workers.environments.gym_task import PREFIX as GYM
from gpu_workers.environments.gym_task import GymTask
from gpu_workers.environments.reasoning_gym_task import PREFIX as REASONING
from gpu_workers.environments.reasoning_gym_task import ReasoningGymTask
from gpu_workers.environments.registry import environment_names
from gpu_workers.models.tokenizer import END_TOKEN_ID
from storage.errors import ConfigurationError
from storage.run_config import DataConfig


class Task(Protocol):
    """A dataset of `len(task)` prompts together with its score."""

    @property
    def is_multi_turn(self) -> bool:
        """Whether prompts are games of an environment, which rewards turns; there `score` raises."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids that prompts and demonstrations use lie below this."""
        ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Sampling ends after any of these tokens; the token is part of the completion."""
        ...

    def __len__(self) -> int: ...

    def prompt(self, ordinal: int) -> tuple[tuple[int, ...], str]:
        """Token ids of prompt `ordinal` and the JSON that `score` needs. IndexError beyond the dataset."""
        ...

    @property
    def agents(self) -> frozenset[str]:
        """Everybody whom `agent` names."""
        ...

    def agent(self, ordinal: int) -> str:
        """Who plays prompt `ordinal`: the environment's name, a Gym agent's, or "" where the model just answers."""
        ...

    def score(self, task_json: str, token_ids: Sequence[int]) -> float:
        """Reward in [0, 1] of a completion given as its sampled tokens, a final stop token included.

        Raises ValueError when `task_json` is not one of this task's own.
        """
        ...

    def demonstration(self, ordinal: int, noise: float) -> tuple[int, ...]:
        """A completion (with its stop token) in which each symbol is wrong with probability `noise`.

        It is a pure function of (seed, ordinal, noise); ordinals beyond the dataset are allowed.
        """
        ...

    def warm_start_prompt(self, ordinal: int) -> tuple[int, ...]:
        """The prompt that `demonstration(ordinal, …)` answers, from a stream of its own."""
        ...

    def fingerprint(self) -> str:
        """sha256 (hex) that changes when any prompt of the dataset may have changed."""
        ...


class Sort8(CharacterTask):
    """Eight letters, to be answered in alphabetical order: `hgaecbdf>` -> `abcdefgh`.

    Reward: 0.5 for the exact answer plus 0.5 times the share of positions that are right.
    """

    _LENGTH = 8
    _LETTERS = "abcdefghijklmnopqrstuvwxyz"
    _VERSION = 1

    def prompt(self, ordinal: int) -> tuple[tuple[int, ...], str]:
        """The letters in their given order, then `>`."""
        self._require(ordinal)
        letters = self._letters("prompt", ordinal)
        return self._tokenizer.encode(letters + ">"), json.dumps({"letters": letters, "task": "sort8"})

    def score(self, task_json: str, token_ids: Sequence[int]) -> float:
        """Positions right and the exact answer, half each; an answer that is not ended is never exact."""
        answer = "".join(sorted(_own_letters(task_json)))
        ended = END_TOKEN_ID in token_ids
        said = token_ids[: list(token_ids).index(END_TOKEN_ID)] if ended else token_ids
        right = sum(a == b for a, b in zip(self._tokenizer.encode(answer), said, strict=False))
        exact = ended and right == len(said) == len(answer)
        return 0.5 * exact + 0.5 * right / max(len(answer), len(said))

    def warm_start_prompt(self, ordinal: int) -> tuple[int, ...]:
        """Letters drawn from a stream of their own."""
        return self._tokenizer.encode(self._letters("warm start", ordinal) + ">")

    def demonstration(self, ordinal: int, noise: float) -> tuple[int, ...]:
        """The sorted letters, each replaced by a random letter with probability `noise`."""
        random = Random(f"sort8/demonstration/{self._data.seed}/{ordinal}")
        letters = sorted(self._letters("warm start", ordinal))
        said = (random.choice(self._LETTERS) if random.random() < noise else letter for letter in letters)
        return (*self._tokenizer.encode("".join(said)), END_TOKEN_ID)

    def fingerprint(self) -> str:
        """Over the task's version, its settings and its first prompts."""
        settings = ("sort8", self._VERSION, self._data.seed, len(self))
        first = [self.prompt(ordinal) for ordinal in range(min(len(self), 64))]
        return hashlib.sha256(json.dumps([settings, first]).encode()).hexdigest()

    def _letters(self, stream: str, ordinal: int) -> str:
        random = Random(f"sort8/{stream}/{self._data.seed}/{ordinal}")
        return "".join(random.choice(self._LETTERS) for _ in range(self._LENGTH))


def _own_letters(task_json: str) -> str:
    """The letters of a sort8 prompt's JSON."""
    try:
        fields = json.loads(task_json)
    except json.JSONDecodeError as error:
        raise ValueError(f"sort8 can't score the task {task_json!r}: it is not JSON") from error
    letters = fields.get("letters") if isinstance(fields, dict) else None
    if not isinstance(letters, str):
        raise ValueError(f"sort8 can't score the task {task_json!r}: it has no 'letters'")
    return letters


TASKS: dict[str, Callable[[DataConfig], Task]] = {"sort8": Sort8}
_BY_PREFIX: dict[str, Callable[[DataConfig], Task]] = {REASONING: ReasoningGymTask, GYM: GymTask}


def build_task(data: DataConfig) -> Task:
    """The task named by `data.task`: a single-turn task, an environment by its name or import path, or a Gym's rows.

    ConfigurationError lists the known names.
    """
    if data.task in TASKS:
        return TASKS[data.task](data)
    for prefix, kind in _BY_PREFIX.items():
        if data.task.startswith(prefix):
            return kind(data)
    if not is_task_name(data.task.partition("?")[0]):
        raise ConfigurationError(
            f"data.task is {data.task!r}, which is not registered; use one of {sorted(TASKS)}, '{REASONING}<dataset>', "
            f"'{GYM}<file>', one of the environments {environment_names()}, or an environment's 'package.module:Class'"
        )
    return EnvironmentTask(data)


def named_import(task: str) -> str | None:
    """The `package.module:Class` that `data.task` names; None for a registered task."""
    name = task.partition("?")[0]
    registered = name in TASKS or name.startswith(tuple(_BY_PREFIX)) or name in environment_names()
    return name if ":" in name and not registered else None


def is_task_name(name: str) -> bool:
    """Whether a task may be called so: what `data.task` says before a '?'."""
    return name in TASKS or ":" in name or name in environment_names()
