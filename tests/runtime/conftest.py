"""A tiny Llama with graphs and a character tokenizer."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from llmconv.export.exporter import export

LETTERS = [chr(code) for code in range(0x20, 0x7F)]
"""95 printable characters; with the unknown token, the tiny models' vocabulary of 96."""


@pytest.fixture(scope="session")
def talking(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights, prefill.onnx, decode.onnx and a tokenizer of one token per character; do not write into it."""
    folder = tmp_path_factory.mktemp("talking") / "llama"
    shutil.copytree(tiny("llama"), folder)
    export(folder, prefill=True, incremental=True)
    vocabulary = {"<unk>": 0, **{letter: index + 1 for index, letter in enumerate(LETTERS)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    return folder
