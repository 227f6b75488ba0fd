"""Meta's `tokenizer.model` (sentencepiece or tiktoken, detected by its content) as Hugging Face tokenizer files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmconv.convert.tokenizers import (
    BOS,
    EOM,
    EOS,
    EOT,
    NUM_SPECIAL,
    SentencePieceModel,
    is_tiktoken,
    parse_sentencepiece,
    parse_tiktoken,
    read_tokenizer,
    tiktoken_json,
    tokenizer_json,
)
from llmconv.convert.tokenizers import reserved_tokens as special_tokens

TOKENIZER = "tokenizer.model"
RELEASED_SENTENCEPIECE = (32000, 32016)
"""Vocabulary of Llama 1 and 2, and of Code Llama."""
RELEASED_TIKTOKEN = 128256
"""Vocabulary of Llama 3."""


@dataclass(frozen=True)
class MetaTokenizer:
    """Tokenizer files, and ids for configs, or None; `stops` end a generation; `size` is the number of tokens, or 0."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    bos: int | None = None
    eos: int | None = None
    stops: tuple[int, ...] = ()
    size: int = 0
    warnings: tuple[str, ...] = ()


def find_tokenizer(folder: Path) -> Path | None:
    """`tokenizer.model` next to the shards, or one folder up, where Meta's downloads put it."""
    return next(
        (place for place in (folder / TOKENIZER, folder.absolute().parent / TOKENIZER) if place.is_file()), None
    )


def without_tokenizer(vocabulary: int) -> MetaTokenizer:
    """The ids of the released model with this vocabulary size, for checkpoints without a tokenizer."""
    if vocabulary in RELEASED_SENTENCEPIECE:
        return MetaTokenizer(bos=1, eos=2, stops=(2,))
    if vocabulary == RELEASED_TIKTOKEN:
        base = vocabulary - NUM_SPECIAL
        return MetaTokenizer(bos=base + BOS, eos=base + EOS, stops=(base + EOS, base + EOT))
    return MetaTokenizer()


def tokenizer_for(
    path: Path | None, vocabulary: int, source: str, *, since_3_1: bool
) -> tuple[MetaTokenizer, list[str]]:
    """The tokenizer at `path` with its warnings; without one, the ids of the released model of this vocabulary size."""
    if path is None:
        return without_tokenizer(vocabulary), [
            f"`{source}` has no tokenizer; give one with `--tokenizer` if you need it"
        ]
    loaded = load_tokenizer(path, since_3_1=since_3_1)
    warnings = list(loaded.warnings)
    if loaded.size > vocabulary:
        warnings.append(
            f"the tokenizer has {loaded.size} tokens, the embedding {vocabulary}: does it belong to the model?"
        )
    return loaded, warnings


def load_tokenizer(path: Path, *, since_3_1: bool) -> MetaTokenizer:
    """Converts a `tokenizer.model`, or a folder with tokenizer files; one with a `tokenizer.json` is used unchanged.

    With `since_3_1` special tokens are those of Llama 3.1 and later (tiktoken only). Raises InputRefused if there is no
    tokenizer, or it is neither sentencepiece nor tiktoken.
    """
    files = read_tokenizer(path)
    if "tokenizer.json" in files or TOKENIZER not in files:
        return MetaTokenizer(files)
    if is_tiktoken(files[TOKENIZER]):
        return _from_tiktoken(parse_tiktoken(files[TOKENIZER]), since_3_1=since_3_1)
    return _from_sentencepiece(files[TOKENIZER], parse_sentencepiece(files[TOKENIZER]))


def _from_sentencepiece(data: bytes, model: SentencePieceModel) -> MetaTokenizer:
    names = {"bos_token": model.bos, "eos_token": model.eos, "unk_token": model.unk}
    settings = _settings({name: model.pieces[index][0] for name, index in names.items() if index >= 0})
    files = {TOKENIZER: data, "tokenizer_config.json": _json(settings)}
    warnings: tuple[str, ...] = ()
    if model.is_bpe and min(names.values()) >= 0:
        files["tokenizer.json"] = _json(tokenizer_json(model), indent=None)
    else:
        warnings = ("the sentencepiece model is not a BPE with bos, eos and unk; only `tokenizer.model` is written",)
    return MetaTokenizer(files, model.bos, model.eos, (model.eos,), len(model.pieces), warnings)


def _from_tiktoken(ranks: dict[bytes, int], *, since_3_1: bool) -> MetaTokenizer:
    names, base = special_tokens(since_3_1=since_3_1), len(ranks)
    settings = _settings({"bos_token": names[BOS], "eos_token": names[EOS]})
    files = {
        "tokenizer.json": _json(tiktoken_json(ranks, since_3_1=since_3_1), indent=None),
        "tokenizer_config.json": _json(settings),
    }
    # the files do not distinguish a chat model from a base model, which never emits the other two
    stops = (EOS, EOM, EOT) if since_3_1 else (EOS, EOT)
    return MetaTokenizer(files, base + BOS, base + EOS, tuple(base + stop for stop in stops), base + len(names))


def _settings(tokens: dict[str, str]) -> dict[str, Any]:
    """`tokenizer_config.json` with the generic class: LlamaTokenizer of transformers 5 ignores `tokenizer.json`."""
    return {
        **tokens,
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _json(content: Any, indent: int | None = 2) -> bytes:
    return (json.dumps(content, ensure_ascii=False, indent=indent) + "\n").encode()
