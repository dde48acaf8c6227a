"""The character tokenizer of the procedural tasks: one token per character, no files, no dependencies."""

from collections.abc import Sequence

PAD_TOKEN_ID = 0
END_TOKEN_ID = 1

_SPECIAL = ("<pad>", "<end>")
_CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 >=+-*<?.,:;()[]|"


class CharTokenizer:
    """Maps the characters of `_CHARACTERS` to ids 2, 3, …; ids 0 and 1 are padding and the end of an answer."""

    def __init__(self) -> None:
        self._id_of = {character: len(_SPECIAL) + place for place, character in enumerate(_CHARACTERS)}

    @property
    def vocab_size(self) -> int:
        """Number of ids, special ones included."""
        return len(_SPECIAL) + len(_CHARACTERS)

    def knows(self, character: str) -> bool:
        """Whether the character is in the vocabulary."""
        return character in self._id_of

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of `text`, without an end token; a character outside the vocabulary is a ValueError."""
        unknown = sorted(set(text) - self._id_of.keys())
        if unknown:
            raise ValueError(f"text {text!r} holds {unknown}, which this tokenizer lacks; it knows {_CHARACTERS!r}")
        return tuple(self._id_of[character] for character in text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`; special tokens are written as `<pad>` and `<end>`, foreign ids as `<id>`."""
        return "".join(self._piece(token_id) for token_id in token_ids)

    def _piece(self, token_id: int) -> str:
        if 0 <= token_id < len(_SPECIAL):
            return _SPECIAL[token_id]
        place = token_id - len(_SPECIAL)
        return _CHARACTERS[place] if 0 <= place < len(_CHARACTERS) else f"<{token_id}>"
