"""Streaming never shows half a character and loses nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from llmconv.generation.row import INCOMPLETE, OrderedWriter, TextStream


def byte_tokens(tokens: Sequence[int]) -> str:
    """A tokenizer whose tokens are bytes."""
    return bytes(tokens).decode("utf-8", errors="replace")


def words(tokens: Sequence[int]) -> str:
    """A sentencepiece-like tokenizer: the space before a word is missing at the start of a text."""
    return " ".join(f"w{token}" for token in tokens)


@pytest.mark.parametrize("text", ["plain", "naïve café", "日本語", "🙂🙃 mixed 🙂", "e\u0301\u0301"])
def test_pieces_are_complete_characters_and_add_up_to_the_text(text: str) -> None:
    stream = TextStream(byte_tokens)
    pieces = [stream.push(byte) for byte in text.encode()]
    assert "".join(pieces) + stream.close() == text
    assert not any(INCOMPLETE in piece for piece in pieces)


def test_a_space_between_words_is_kept() -> None:
    stream = TextStream(words)
    assert [stream.push(token) for token in (1, 2, 3)] == ["w1", " w2", " w3"]


def test_an_incomplete_end_comes_out_on_close() -> None:
    stream = TextStream(byte_tokens)
    assert [stream.push(byte) for byte in "é".encode()[:1]] == [""]
    assert stream.close() == INCOMPLETE


def test_a_second_close_returns_nothing() -> None:
    stream = TextStream(byte_tokens)
    stream.push(65)
    assert stream.close() == ""
    assert stream.close() == ""


def test_texts_of_a_batch_come_one_after_another() -> None:
    written: list[str] = []
    writer = OrderedWriter(written.append)
    for index, piece, done in [(0, "a", False), (1, "b", False), (2, "", True), (0, "A", True), (1, "B", True)]:
        writer.push(index, piece, done)
    assert written == ["a", "A\n", "b", "B\n", "\n"]
