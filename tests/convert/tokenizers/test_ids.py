"""Ids of special tokens: from a tokenizer's files, whatever their kind, and None where they do not tell."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llmconv.convert.tokenizers import beyond_rows, special_ids
from llmconv.errors import MalformedInput

NAMES = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
VOCABULARIES: dict[str, dict[str, Any]] = {
    "a dict": {"model": {"vocab": {"<s>": 3, "</s>": 4}}},
    "a list of pairs": {"model": {"vocab": [["a", 0.0], ["b", 0.0], ["c", 0.0], ["<s>", 0.0], ["</s>", 0.0]]}},
    "added tokens": {
        "model": {"vocab": {"<s>": 0}},
        "added_tokens": [{"content": "<s>", "id": 3}, {"content": "</s>", "id": 4}],
    },
}


def files(settings: Any, tokenizer: Any) -> dict[str, bytes]:
    return {"tokenizer_config.json": json.dumps(settings).encode(), "tokenizer.json": json.dumps(tokenizer).encode()}


@pytest.mark.parametrize("tokenizer", VOCABULARIES.values(), ids=VOCABULARIES.keys())
def test_ids_are_found_in_every_kind_of_vocabulary(tokenizer: dict[str, Any]) -> None:
    assert special_ids(files(NAMES, tokenizer)) == (3, 4)


@pytest.mark.parametrize("settings", [{}, [], {"bos_token": ["<s>"], "eos_token": {"content": []}}, {"bos_token": 3}])
def test_ids_that_the_files_lack_are_none(settings: Any) -> None:
    assert special_ids(files(settings, VOCABULARIES["a dict"])) == (None, None)


def test_a_file_that_is_not_json_is_refused() -> None:
    with pytest.raises(MalformedInput, match=r"`tokenizer_config\.json` is not valid JSON"):
        special_ids({"tokenizer_config.json": b"{"})


@pytest.mark.parametrize("tokenizer", VOCABULARIES.values(), ids=VOCABULARIES.keys())
def test_tokens_beyond_the_rows_of_a_model_are_named(tokenizer: dict[str, Any]) -> None:
    (warning,) = beyond_rows(files({}, tokenizer), {"vocab_size": 4})
    assert "1 token that the model has no row for (`</s>`)" in warning
    for config in ({"vocab_size": 5}, {}, {"vocab_size": 4, "vision_config": {}}, {"text_config": {"vocab_size": 4}}):
        assert not beyond_rows(files({}, tokenizer), config)
    assert not beyond_rows({"tokenizer.json": b"{"}, {"vocab_size": 4})
