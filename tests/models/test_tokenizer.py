"""The character tokenizer."""

import pytest

from gpu_workers.models.tokenizer import END_TOKEN_ID, PAD_TOKEN_ID, CharTokenizer


def test_text_survives_encoding_and_decoding():
    tokenizer = CharTokenizer()
    assert tokenizer.decode(tokenizer.encode("hgaecbdf>")) == "hgaecbdf>"


def test_every_character_has_an_id_of_its_own_below_the_vocabulary_size():
    tokenizer = CharTokenizer()
    texts = [tokenizer.decode([token_id]) for token_id in range(tokenizer.vocab_size)]
    assert len(set(texts)) == tokenizer.vocab_size


def test_special_tokens_are_written_by_name():
    assert CharTokenizer().decode([PAD_TOKEN_ID, END_TOKEN_ID]) == "<pad><end>"


def test_a_foreign_character_is_refused_by_name():
    with pytest.raises(ValueError, match=r"\['é'\], which this tokenizer lacks"):
        CharTokenizer().encode("café")
