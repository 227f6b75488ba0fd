"""Streaming never shows half a character and loses nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from llmconv.generation.row import INCOMPLETE, OrderedWriter, TextStream, of_earlier_tokens


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


def test_a_space_behind_the_text_that_is_continued_is_kept() -> None:
    stream = TextStream(words, [7, 8])
    assert [stream.push(token) for token in (1, 2)] == [" w1", " w2"]
    assert stream.close() == ""


def test_a_text_that_ends_within_a_character_is_not_continued() -> None:
    stream = TextStream(byte_tokens, "é".encode()[:1])
    assert [stream.push(byte) for byte in b"ab"] == ["a", "b"]


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


FALLBACK = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_fallback(tokens: Sequence[int]) -> str:
    """Decodes as Llama 2's tokenizer: 0 to 255 are bytes, others letters; one bad byte makes all around it U+FFFD."""
    steps = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return steps.decode([FALLBACK[token] if token < 256 else chr(token) for token in tokens])


@given(st.lists(st.sampled_from([*"🙂é漢".encode(), *"é".encode(), 0x61, 0xFF, 0x416, 0x417]), max_size=12))
def test_a_bad_byte_after_a_character_is_one_replacement(tokens: list[int]) -> None:
    stream = TextStream(byte_fallback)
    text = "".join(map(stream.push, tokens)) + stream.close()
    size = sum(1 if token < 256 else 2 for token in tokens)
    assert sum(1 if letter == INCOMPLETE else len(letter.encode()) for letter in text) == size


@given(st.lists(st.sampled_from([*b"ab", *"é€".encode(), 0xFF]), max_size=12))
def test_places_of_tokens_are_those_in_the_whole_text(tokens: list[int]) -> None:
    """Of tokens that end a character; one that was held back stands where it may still begin."""
    stream, length = TextStream(byte_tokens), 0
    for count, token in enumerate(tokens, start=1):
        piece = stream.push(token)
        before = byte_tokens(tokens[:count])
        if piece and piece.strip(INCOMPLETE) and token < 0x80:
            assert length + of_earlier_tokens(piece) == len(before) - 1
        length += len(piece)


SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
PIECES = ["a", "b", SPACE, f"{SPACE}a", f"{SPACE}{SPACE}", ".", "é", "\n", "<0xC3>", "<0xA9>"]
DECODERS: dict[str, tuple[decoders.Decoder, list[str]]] = {
    "BPEDecoder": (decoders.BPEDecoder(), ["a</w>", "b", "b</w>", ".</w>"]),
    "ByteFallback": (decoders.ByteFallback(), ["a", "é", "<0xC3>", "<0xA9>"]),
    "ByteLevel": (decoders.ByteLevel(), ["a", "Ġ", "Ġb", "Ċ", "Ã", "©", "âĤ", "¬"]),
    "CTC": (decoders.CTC(), ["a", "b", "<pad>", "|"]),
    "Fuse": (decoders.Fuse(), PIECES[:8]),
    "Metaspace": (decoders.Metaspace(), PIECES[:8]),
    "Replace": (decoders.Replace(SPACE, " "), PIECES[:8]),
    "Sequence": (
        decoders.Sequence(
            [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1)]
        ),
        PIECES,
    ),
    "Strip": (decoders.Sequence([decoders.Replace(SPACE, " "), decoders.Strip(" ", 1, 0)]), PIECES[:8]),
    "WordPiece": (decoders.WordPiece(), ["a", "##b", ".", "'", "s", "n't", "do", "not", "'s"]),
}


def test_the_decoders_are_all_that_tokenizers_has() -> None:
    kinds = {
        name for name, one in vars(decoders).items() if isinstance(one, type) and issubclass(one, decoders.Decoder)
    }
    assert DECODERS.keys() == kinds - {"Decoder"}


@pytest.mark.parametrize("name", DECODERS)
def test_a_text_is_the_same_in_pieces_with_every_decoder(name: str) -> None:
    decoder, tokens = DECODERS[name]
    rng = np.random.default_rng(0)
    for _ in range(300):
        ids = rng.integers(0, len(tokens), rng.integers(1, 9)).tolist()
        stream = TextStream(lambda some: str(decoder.decode([tokens[one] for one in some])))
        whole, text = decoder.decode([tokens[one] for one in ids]), "".join(map(stream.push, ids)) + stream.close()
        assert text == whole or INCOMPLETE in whole, [tokens[one] for one in ids]
