"""Tokens are decoded in the fastest way, to the same text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from llmconv.runtime.tokenizer import TokenDecoder, load_tokenizer


class Shouting(PreTrainedTokenizerFast):  # type: ignore[misc]
    """Has its own way from tokens to text."""

    def _decode(self, *given: Any, **named: Any) -> str:
        return str(super()._decode(*given, **named)).upper()


@pytest.fixture(scope="module")
def ids(chatting: Path) -> list[int]:
    """Of a text, special tokens between its words."""
    tokenizer = load_tokenizer(chatting)
    found: list[int] = (
        tokenizer("the sea")["input_ids"] + tokenizer.all_special_ids + tokenizer(" is  deep .")["input_ids"]
    )
    return found


@pytest.mark.slow
def test_decoding_gives_the_text_of_transformers(chatting: Path, ids: list[int]) -> None:
    tokenizer = load_tokenizer(chatting)
    expected = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert "sea" in expected
    assert TokenDecoder(tokenizer)(ids) == expected


@pytest.mark.slow
def test_a_tokenizer_with_its_own_decoding_is_used(chatting: Path, ids: list[int]) -> None:
    assert "SEA" in TokenDecoder(Shouting.from_pretrained(chatting))(ids)
