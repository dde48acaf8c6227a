"""What tasks of the character tokenizer share: vocabulary, end token, and the bounds of their dataset."""

from gpu_workers.models.tokenizer import END_TOKEN_ID, CharTokenizer
from storage.run_config import DataConfig


class CharacterTask:
    """A base for tasks; see the Protocol `gpu_workers.environments.tasks.Task`."""

    is_multi_turn = False

    def __init__(self, data: DataConfig) -> None:
        self._data = data
        self._tokenizer = CharTokenizer()

    @property
    def vocab_size(self) -> int:
        """Size of the character vocabulary."""
        return self._tokenizer.vocab_size

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The end token."""
        return (END_TOKEN_ID,)

    def __len__(self) -> int:
        return self._data.num_prompts

    @property
    def agents(self) -> frozenset[str]:
        """None."""
        return frozenset()

    def agent(self, ordinal: int) -> str:
        """Nobody: the model just answers."""
        self._require(ordinal)
        return ""

    def _require(self, ordinal: int) -> None:
        """IndexError for an ordinal beyond the dataset."""
        if not 0 <= ordinal < len(self):
            raise IndexError(f"{self._data.task} has prompts 0 to {len(self) - 1} (data.num_prompts), not {ordinal}")
