"""`reasoning_gym:<dataset>`: single-turn puzzles of the package reasoning-gym, scored by exact match.

Questions and answers are made of the tokenizer's characters: lower case, others become spaces.
"""

import hashlib
import json
from collections.abc import Sequence
from random import Random
from typing import Any

from gpu_workers.environments.character_task import CharacterTask
from gpu_workers.environments.plain_text import plain_text
from gpu_workers.models.tokenizer import END_TOKEN_ID, CharTokenizer
from storage.canonical import canonical_json
from storage.errors import ConfigurationError
from storage.run_config import DataConfig

PREFIX = "reasoning_gym:"

_WARM_START_SIZE = 2**20
_DIGITS, _LETTERS = "0123456789", "abcdefghijklmnopqrstuvwxyz"


class ReasoningGymTask(CharacterTask):
    """Reward 1 for an answer to which the dataset itself gives 1, else 0: its partial credit pays for rambling."""

    def __init__(self, data: DataConfig) -> None:
        self._data = data
        self._name = data.task.removeprefix(PREFIX)
        self._tokenizer = CharTokenizer()
        self._dataset = self._made("prompt", data.num_prompts)
        self._warm_start = self._made("warm start", _WARM_START_SIZE)

    def prompt(self, ordinal: int) -> tuple[tuple[int, ...], str]:
        """The question, then `>`."""
        self._require(ordinal)
        entry = self._dataset[ordinal]
        task = {"task": self._data.task, "ordinal": ordinal, "answer": str(entry["answer"])}
        return self._question(entry), canonical_json(task).decode()

    def score(self, task_json: str, token_ids: Sequence[int]) -> float:
        """1.0 when the answer is ended and the dataset gives it 1.0, else 0.0."""
        entry = self._dataset[self._ordinal(task_json)]
        said = list(token_ids)
        if END_TOKEN_ID not in said:
            return 0.0
        answer = self._tokenizer.decode(said[: said.index(END_TOKEN_ID)])
        return float(self._dataset.score_answer(answer, entry) == 1.0)

    def warm_start_prompt(self, ordinal: int) -> tuple[int, ...]:
        """A question from a dataset of its own."""
        return self._question(self._warm_start[ordinal % _WARM_START_SIZE])

    def demonstration(self, ordinal: int, noise: float) -> tuple[int, ...]:
        """The answer; each digit is another one and each letter another letter with probability `noise`."""
        random = Random(f"{self._data.task}/demonstration/{self._data.seed}/{ordinal}")
        answer = plain_text(str(self._warm_start[ordinal % _WARM_START_SIZE]["answer"]))
        return (*self._tokenizer.encode("".join(_noisy(symbol, random, noise) for symbol in answer)), END_TOKEN_ID)

    def fingerprint(self) -> str:
        """Over the dataset's name, the settings and the first prompts, by which a new reasoning-gym may show itself."""
        settings = [self._data.task, self._data.seed, len(self)]
        first = [self.prompt(ordinal) for ordinal in range(min(len(self), 64))]
        return hashlib.sha256(canonical_json([settings, first])).hexdigest()

    def _question(self, entry: Any) -> tuple[int, ...]:
        return self._tokenizer.encode(plain_text(entry["question"]) + ">")

    def _made(self, stream: str, size: int) -> Any:
        """reasoning-gym draws entry i from seed + i: seeds must lie far apart for different datasets."""
        import reasoning_gym  # takes a second, which no other task should pay

        digest = hashlib.sha256(f"{self._data.task}/{stream}/{self._data.seed}".encode()).digest()
        try:
            return reasoning_gym.create_dataset(self._name, seed=int.from_bytes(digest[:4], "big"), size=size)
        except Exception as error:
            raise ConfigurationError(
                f"data.task is {self._data.task!r}, but reasoning-gym can't make the dataset {self._name!r}: {error}; "
                "give reasoning_gym:<dataset>, e.g. reasoning_gym:chain_sum"
            ) from error

    def _ordinal(self, task_json: str) -> int:
        try:
            fields = json.loads(task_json)
        except json.JSONDecodeError as error:
            raise ValueError(f"{self._data.task} can't score the task {task_json!r}: it is not JSON") from error
        ordinal = fields.get("ordinal") if isinstance(fields, dict) and fields.get("task") == self._data.task else None
        if type(ordinal) is not int or not 0 <= ordinal < len(self):
            raise ValueError(f"{self._data.task} can't score the task {task_json!r}: it is not one of its prompts")
        return ordinal


def _noisy(symbol: str, random: Random, noise: float) -> str:
    alphabet = _DIGITS if symbol in _DIGITS else _LETTERS if symbol in _LETTERS else symbol
    drawn = random.choice(alphabet)
    return drawn if random.random() < noise else symbol
