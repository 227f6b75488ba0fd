"""Texts that are far too long, and templates that add too much, are refused before they cost anything."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from llmconv.errors import InputRefused, MalformedInput
from llmconv.runtime.tokenizer import CalibrationText, TooManyTokens, first_ids, load_tokenizer, token_ids

MOST = 50
LETTERS = {chr(code): code - 0x20 for code in range(0x20, 0x7F)}


def characters() -> Tokenizer:
    """A token per character."""
    made = Tokenizer(models.WordLevel({"?": 95, **LETTERS}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return made


def shrinking() -> Tokenizer:
    """Drops accents, and spaces but one."""
    made = characters()
    drops = [normalizers.NFD(), normalizers.StripAccents(), normalizers.Replace(Regex(" +"), " "), normalizers.Strip()]
    made.normalizer = normalizers.Sequence(drops)
    return made


def merging() -> Tokenizer:
    """One word of merges, as of sentencepiece."""
    vocabulary = {"a": 0, "b": 1, "aa": 2, "aaaa": 3, "aaaaaaaa": 4, "?": 5}
    merges = [("a", "a"), ("aa", "aa"), ("aaaa", "aaaa")]
    return Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="?", fuse_unk=True))


def words() -> Tokenizer:
    """A word of more than 100 characters is one unknown token."""
    made = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##a": 2, "b": 3}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


TEXTS = {
    "short": "ab" * 10,
    "fits": "a b " * 12,
    "a little too long": "ab" * 40,
    "far too long": "ab " * 60_000,
    "one letter": "a" * 180_000,
    "spaces": "a" + " " * 120_000 + "b",
    "accents": "a" + "\u0301" * 120_000,
    "unknown": "\u4e2d" * 120_000,
}


@pytest.mark.quick_rows(
    "short-characters",
    "short-shrinking",
    "short-merging",
    "short-words",
    "fits-characters",
    "fits-shrinking",
    "fits-merging",
    "fits-words",
    "a little too long-characters",
    "a little too long-shrinking",
    "a little too long-merging",
    "a little too long-words",
    "spaces-shrinking",
    "spaces-merging",
    "spaces-words",
)
@pytest.mark.parametrize("make", [characters, shrinking, merging, words])
@pytest.mark.parametrize("name", TEXTS)
def test_only_a_text_that_is_far_too_long_is_refused(make: Callable[[], Tokenizer], name: str) -> None:
    tokenizer, text = PreTrainedTokenizerFast(tokenizer_object=make()), TEXTS[name]
    whole = tokenizer(text)["input_ids"]
    assert first_ids(tokenizer, text, MOST) == whole[:MOST]
    if len(whole) <= 2 * MOST:
        assert token_ids(tokenizer, text, MOST) == whole
        return
    with pytest.raises(TooManyTokens, match="more than 100 tokens, twice the 50 that are accepted") as caught:
        token_ids(tokenizer, text, MOST)
    assert len(caught.value.beginning) < 40_000


def test_a_small_template_is_accepted_and_a_large_one_is_not_even_opened(tmp_path: Path) -> None:
    raw = characters()
    raw.post_processor = processors.TemplateProcessing(single="! $A", pair="! $A ! $B", special_tokens=[("!", 1)])
    PreTrainedTokenizerFast(tokenizer_object=raw).save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path)("a")["input_ids"] == [1, LETTERS["a"]]
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    for change in (_many_pieces, _many_ids, _many_texts, _many_processors):
        for name in ("post_processor", "post\\u005fprocessor"):
            large = json.loads(json.dumps(content))
            change(large)
            text = json.dumps(large).replace('"post_processor"', f'"{name}"')
            (tmp_path / "tokenizer.json").write_text(text)
            with pytest.raises(MalformedInput, match="to every text"):
                load_tokenizer(tmp_path)


def _many_pieces(content: dict[str, Any]) -> None:
    content["post_processor"]["single"] = [{"SpecialToken": {"id": "!", "type_id": 0}}] * 2000


def _many_ids(content: dict[str, Any]) -> None:
    content["post_processor"]["special_tokens"]["!"].update(ids=[1] * 2000, tokens=["!"] * 2000)


def _many_texts(content: dict[str, Any]) -> None:
    content["post_processor"]["pair"] = [{"Sequence": {"id": "A", "type_id": 0}}] * 9


def _many_processors(content: dict[str, Any]) -> None:
    one = content["post_processor"]
    one["single"] = [{"SpecialToken": {"id": "!", "type_id": 0}}] * 600
    content["post_processor"] = {"type": "Sequence", "processors": [one, one]}


UNKNOWN = {"without an unknown token": None, "whose unknown token is missing": "?"}


@pytest.mark.parametrize("case", UNKNOWN)
def test_a_tokenizer_that_fails_on_a_text_is_refused(case: str) -> None:
    backend = Tokenizer(models.WordLevel({"a": 0}, **({"unk_token": UNKNOWN[case]} if UNKNOWN[case] else {})))
    with pytest.raises(InputRefused, match="the tokenizer fails on this text"):
        token_ids(PreTrainedTokenizerFast(tokenizer_object=backend), "b")


@pytest.mark.parametrize("nested", [False, True])
def test_a_text_with_a_token_that_the_model_lacks_is_refused(nested: bool, tmp_path: Path) -> None:
    PreTrainedTokenizerFast(tokenizer_object=characters(), unk_token="?").save_pretrained(tmp_path)
    text = CalibrationText("prose", "abc z" * 60)
    for size in (91, 90):  # of `z`, the last of these letters, the id is 90
        config = {"model_type": "llama", **({"text_config": {"vocab_size": size}} if nested else {"vocab_size": size})}
        (tmp_path / "config.json").write_text(json.dumps(config))
        if size == 91:
            assert text.tokens(tmp_path, None)[0].max() == 90
    with pytest.raises(InputRefused, match="takes one token"):
        CalibrationText("prose", "abc" * 100).tokens(tmp_path, 1)
    with pytest.raises(InputRefused, match="`prose` has the token 90, and the model has 90 tokens"):
        text.tokens(tmp_path, None)
