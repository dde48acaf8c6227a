"""`gym:<file>`: rows of a NeMo Gym dataset, whose rollouts an agent of a Gym plays from beginning to end.

A row is a JSON object with the `responses_create_params` of the first model call. It names its agent in `agent_ref`, or
is a materialized task, `task_id` and `task_input`, whose `taskset` an environment server plays.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_workers.environments.character_task import CharacterTask
from gpu_workers.environments.plain_text import plain_text
from gpu_workers.models.tokenizer import END_TOKEN_ID
from storage.canonical import canonical_json
from storage.errors import ConfigurationError
from storage.run_config import DataConfig

PREFIX = "gym:"

# One message of a conversation: who speaks, and what.
ChatMessage = tuple[str, str]
_REFUSED = ("tools", "previous_response_id", "prompt")


class GymTask(CharacterTask):
    """The first `data.num_prompts` rows of a file. Text outside the tokenizer's characters is made plain."""

    def __init__(self, data: DataConfig) -> None:
        super().__init__(data)
        self._path = Path(data.task.removeprefix(PREFIX))
        self._rows = self._read()
        self._agents = tuple(self._agent_of(row, number) for number, row in enumerate(self._rows, start=1))
        for number, row in enumerate(self._rows, start=1):
            self._check(row, number)

    @property
    def agents(self) -> frozenset[str]:
        """Every agent that plays a row."""
        return frozenset(self._agents)

    def agent(self, ordinal: int) -> str:
        """The name in the row's `agent_ref`, or the taskset of a materialized task."""
        self._require(ordinal)
        return self._agents[ordinal]

    def prompt(self, ordinal: int) -> tuple[tuple[int, ...], str]:
        """The first messages as the policy reads them, and the row."""
        self._require(ordinal)
        row = self._rows[ordinal]
        return self.chat_tokens(messages_of(create_params(row))), canonical_json(row).decode()

    def chat_tokens(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """A conversation as the policy reads it: what each says, and an end token after the policy's own words."""
        tokens: tuple[int, ...] = ()
        for role, text in messages:
            tokens = (*tokens, *self._tokenizer.encode(plain_text(text)))
            tokens = (*tokens, END_TOKEN_ID) if role == "assistant" else tokens
        return tokens

    def text(self, token_ids: Sequence[int]) -> str:
        """A completion as an agent reads it: the text before the first end token."""
        said = list(token_ids)
        return self._tokenizer.decode(said[: said.index(END_TOKEN_ID)] if END_TOKEN_ID in said else said)

    def score(self, task_json: str, token_ids: Sequence[int]) -> float:
        """Never: raises ValueError."""
        raise ValueError(f"{self._data.task} is scored by its agents; a completion has no score")

    def warm_start_prompt(self, ordinal: int) -> tuple[int, ...]:
        """Never: raises ConfigurationError."""
        raise ConfigurationError(f"{self._data.task} has no demonstrations; set policy.warm_start_steps to 0")

    def demonstration(self, ordinal: int, noise: float) -> tuple[int, ...]:
        """Never: raises ConfigurationError."""
        return self.warm_start_prompt(ordinal)

    def fingerprint(self) -> str:
        """Over the rows."""
        return hashlib.sha256(canonical_json(list(self._rows))).hexdigest()

    def _read(self) -> tuple[Mapping[str, Any], ...]:
        if not self._path.is_absolute():
            raise ConfigurationError(f"data.task is {self._data.task!r}: give {PREFIX} and the absolute path of a file")
        try:
            lines = self._path.read_text(encoding="utf-8").split("\n")  # JSON texts may hold other line separators
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"data.task is {self._data.task!r}, which can't be read: {error}") from error
        rows = [self._parsed(line, number) for number, line in enumerate(lines, start=1) if line.strip()]
        if len(rows) < self._data.num_prompts:
            raise ConfigurationError(
                f"data.num_prompts is {self._data.num_prompts}, but {self._path} has {len(rows)} rows; lower it"
            )
        return tuple(rows[: self._data.num_prompts])

    def _parsed(self, line: str, number: int) -> Mapping[str, Any]:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise self._bad(number, f"is no JSON: {error}") from error
        if not isinstance(row, dict) or not isinstance(create_params(row), dict):
            raise self._bad(number, "has no object 'responses_create_params'")
        return row

    def _agent_of(self, row: Mapping[str, Any], number: int) -> str:
        where, key = ("task_id", "taskset") if is_materialized(row) else ("agent_ref", "name")
        reference = row.get(where)
        named = reference.get(key) if isinstance(reference, Mapping) else None
        if not isinstance(named, str) or not named:
            raise self._bad(number, "names no agent: give it an agent_ref with a name, or a task_id with a taskset")
        return named

    def _check(self, row: Mapping[str, Any], number: int) -> None:
        params = create_params(row)
        if found := [name for name in _REFUSED if params.get(name)]:
            raise self._bad(number, f"asks for {found[0]!r}, which this tokenizer has no words for; leave it out")
        try:
            extra_body_of(params)
            messages = messages_of(params)
        except ValueError as error:
            raise self._bad(number, str(error)) from error
        if not self.chat_tokens(messages):
            raise self._bad(number, "says nothing that the policy can read")

    def _bad(self, number: int, why: str) -> ConfigurationError:
        return ConfigurationError(f"data.task is {self._data.task!r}: row {number} {why}")


def is_materialized(row: Mapping[str, Any]) -> bool:
    """Whether an environment server plays the row, and not an agent directly."""
    return isinstance(row.get("task_id"), Mapping) and isinstance(row.get("task_input"), Mapping)


def create_params(row: Mapping[str, Any]) -> Any:
    """The row's `responses_create_params`."""
    return (row["task_input"] if is_materialized(row) else row).get("responses_create_params")


def extra_body_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """What the row adds to the body of each model call: the JSON in its `metadata.extra_body`.

    Raises ValueError for metadata that is no object of texts, or no JSON object in it.
    """
    metadata = params.get("metadata") or {}
    if not isinstance(metadata, Mapping) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"'metadata' is {str(metadata)[:80]!r}, not an object of texts")
    try:
        extra = json.loads(metadata.get("extra_body") or "{}")
    except ValueError as error:
        raise ValueError(f"'metadata.extra_body' is no JSON: {error}") from error
    if not isinstance(extra, dict):
        raise ValueError(f"'metadata.extra_body' is {str(extra)[:80]!r}, not a JSON object")
    return extra


def messages_of(params: Mapping[str, Any]) -> list[ChatMessage]:
    """The messages of a request, in the Responses form (`input`, `instructions`) or the chat form (`messages`).

    Raises ValueError for what is not text.
    """
    given = params.get("messages", params.get("input"))
    listed = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(listed, list):
        raise ValueError(f"'input' or 'messages' is {type(listed).__name__}, not a text or a list of messages")
    instructions = params.get("instructions")
    first = [("system", instructions)] if isinstance(instructions, str) and instructions else []
    return [*first, *map(_message, listed)]


def _message(given: Any) -> ChatMessage:
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise ValueError(f"{str(given)[:80]!r} is no message with a role")
    content = given.get("content")
    parts = content if isinstance(content, list) else [] if content is None else [content]
    texts = [part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"a message of '{given['role']}' holds more than text: {str(content)[:80]!r}")
    return given["role"], "".join(str(text) for text in texts)
