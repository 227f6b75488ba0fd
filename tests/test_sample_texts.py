"""The texts that ship with llmconv: long enough, and without a common passage."""

from __future__ import annotations

from llmconv.sample_texts import calibration_text, evaluation_text

CHARACTERS_PER_TOKEN = 4.2
"""Of a tokenizer with a large vocabulary, on such a mixture; SmolLM2's has 3.3."""


def test_they_have_as_many_tokens_as_are_used() -> None:
    assert len(calibration_text()) > 4096 * CHARACTERS_PER_TOKEN
    assert len(evaluation_text()) > 2048 * CHARACTERS_PER_TOKEN


def test_no_sentence_is_in_both() -> None:
    first, second = (
        {line.strip() for line in text.replace(". ", ".\n").splitlines() if len(line.strip()) > 24}
        for text in (calibration_text(), evaluation_text())
    )
    assert len(second) > 80 and not first & second


def test_most_is_english_and_some_is_not() -> None:
    for text in (calibration_text(), evaluation_text()):
        assert 0.02 < sum(ord(character) > 0x2FF for character in text) / len(text) < 0.2
