"""Foreign text made of the tokenizer's characters only."""

from gpu_workers.models.tokenizer import CharTokenizer

_TOKENIZER = CharTokenizer()


def plain_text(text: str) -> str:
    """Lower case; every character that the tokenizer lacks becomes a space, and a run of spaces becomes one."""
    return " ".join("".join(character if _TOKENIZER.knows(character) else " " for character in text.lower()).split())
