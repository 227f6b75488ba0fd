"""A tokenizer of one token per printable character, for the tiny models' vocabulary of 96."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

LETTERS = [chr(code) for code in range(0x20, 0x7F)]
"""95 printable characters; with the unknown token, the tiny models' vocabulary of 96."""


def save_letters(folder: Path) -> Path:
    """Puts the tokenizer into a folder."""
    vocabulary = {"<unk>": 0, **{letter: index + 1 for index, letter in enumerate(LETTERS)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    return folder
