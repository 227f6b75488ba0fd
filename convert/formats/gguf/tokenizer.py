"""The tokenizer of a GGUF file as `tokenizer.json`, with the same ids.

Keys: ggml `docs/gguf.md`. `llama` is sentencepiece's BPE with scores, `gpt2` byte-level BPE with merges, whose
`tokenizer.ggml.pre` names how text is divided into words (llama.cpp `src/llama-vocab.cpp`). Types of tokens are
those of sentencepiece: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from llmconv.convert.tokenizers import (
    MODEL,
    PATTERN,
    SPACE,
    TOKENIZER,
    SentencePieceModel,
    added_token,
    bos_template,
    byte_alphabet,
    tokenizer_bytes,
    tokenizer_json,
)
from llmconv.errors import MalformedInput, UnsupportedInput

CONTROL, USER_DEFINED, UNUSED, BYTE = 3, 4, 5, 6
PADDING = re.compile(r"\[PAD\d+\]")
"""Tokens that llama.cpp's converter adds where the embedding has more rows than the vocabulary."""

GIVE = "give the model's own tokenizer with `--tokenizer FOLDER`"
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

QWEN2 = PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDING}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDING}"
    rf"|\p{{N}}{{1,3}}{SIGNS}"
)
TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}{SIGNS}"


@dataclass(frozen=True)
class Words:
    """How a byte-level tokenizer divides text into words."""

    pattern: str = ""  # of a word; empty: that of GPT-2
    digits: bool = False  # each digit is a word
    whole: bool = False  # a word that is a token is not split, whatever the merges say
    normalizes: bool = False  # text is in the normal form C
    bos: bool = False  # begins with bos unless the file says otherwise


WORDS: Mapping[str, Words] = {
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "jais", "phi-2"), Words()),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), Words(digits=True)),
    **dict.fromkeys(("llama-bpe", "llama-v3", "llama3"), Words(PATTERN, whole=True, bos=True)),
    **dict.fromkeys(("falcon3", "falcon-h1", "pixtral", "dbrx", "smaug-bpe", "lfm2"), Words(PATTERN, whole=True)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), Words(QWEN2, normalizes=True)),
    **dict.fromkeys(("gpt-4o", "llama4"), Words(GPT4O)),
    "tekken": Words(TEKKEN, whole=True, bos=True),
}
"""By the value of `tokenizer.ggml.pre`."""


def special_ids(metadata: Mapping[str, Any], source: str) -> dict[str, int | None]:
    """Fields of `config.json`: ids of the tokens that begin, end and pad a text; None for those that a file lacks.

    Raises MalformedInput for an id beyond the vocabulary.
    """
    return {
        f"{key}_token_id": _id(metadata, name, source)
        for key, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }


def _id(metadata: Mapping[str, Any], key: str, source: str) -> int | None:
    number, tokens = metadata.get(f"tokenizer.ggml.{key}_token_id"), metadata.get("tokenizer.ggml.tokens")
    if number is None or not isinstance(tokens, list):
        return None
    if type(number) is not int or not 0 <= number < len(tokens):
        raise MalformedInput(f"`{source}` has no token {str(number)[:20]} (`{key}_token_id`)", hint=GIVE)
    return number


def tokenizer_files(metadata: Mapping[str, Any], source: str, warnings: list[str]) -> dict[str, bytes]:
    """The tokenizer, its chat template and the tokens that end a text, as files of a Hugging Face folder.

    Raises UnsupportedInput for a tokenizer that is not known exactly, MalformedInput for one that contradicts itself.
    """
    tokens, kind = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.model")
    if not tokens or kind == "no_vocab":
        warnings.append(f"`{source}` contains no tokenizer; give one with `--tokenizer`")
        return {}
    if not isinstance(tokens, list) or not all(isinstance(text, str) for text in tokens):
        raise MalformedInput(f"`{source}` has tokens that are not texts", hint=GIVE)
    types = _numbers(metadata, "token_type", len(tokens), source)
    if kind == "llama":
        content, begins = _sentencepiece(metadata, tokens, types, source), True
    elif kind == "gpt2":
        words = WORDS.get(str(metadata.get("tokenizer.ggml.pre")))
        if words is None:
            pre = str(metadata.get("tokenizer.ggml.pre", "default"))[:40]
            raise UnsupportedInput(f"`{source}` divides text into words in an unknown way (`{pre}`)", hint=GIVE)
        content, begins = _byte_level(metadata, tokens, types, words, source), words.bos
    else:
        raise UnsupportedInput(f"`{source}` has a tokenizer of the unsupported kind `{str(kind)[:40]}`", hint=GIVE)
    ids = {name: _id(metadata, key, source) for name, key in SPECIAL.items()}
    bos = ids["bos_token"]
    begins = _flag(metadata, "add_bos_token", default=begins) and bos is not None
    content["post_processor"] = bos_template(tokens[bos], bos) if begins and bos is not None else None
    if _flag(metadata, "add_eos_token", default=False):
        raise UnsupportedInput(f"`{source}` ends each text with eos (`add_eos_token`)", hint=GIVE)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": begins,
        **{name: tokens[number] for name, number in ids.items() if number is not None},
    }
    files = {"tokenizer.json": tokenizer_bytes(content)}
    if isinstance(template := metadata.get("tokenizer.chat_template"), str):
        files["chat_template.jinja"] = template.encode()
    files["tokenizer_config.json"] = tokenizer_bytes(settings)
    ends = [number for key in ("eos", "eot") if (number := _id(metadata, key, source)) is not None]
    if ends:
        generation = {"bos_token_id": bos, "eos_token_id": list(dict.fromkeys(ends)), "pad_token_id": ids["pad_token"]}
        files["generation_config.json"] = tokenizer_bytes({k: v for k, v in generation.items() if v is not None})
    return files


def _flag(metadata: Mapping[str, Any], key: str, *, default: bool) -> bool:
    return metadata.get(f"tokenizer.ggml.{key}", default) not in (False, [])


def _numbers(metadata: Mapping[str, Any], key: str, count: int, source: str) -> Sequence[float]:
    """One number per token; MalformedInput for another count, zeros where the file has none."""
    found = metadata.get(f"tokenizer.ggml.{key}")
    if found is None:
        return [0] * count
    kinds = float if key == "scores" else int
    if not isinstance(found, list) or not all(type(one) is kinds and isfinite(one) for one in found):
        raise MalformedInput(f"`{source}` has an invalid `{key}`", hint=GIVE)
    if len(found) != count:
        raise MalformedInput(f"`{source}` does not have one `{key}` per token", hint=GIVE)
    return found


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: list[str], types: Sequence[float], source: str
) -> dict[str, Any]:
    scores = _numbers(metadata, "scores", len(tokens), source)
    unknown = _id(metadata, "unknown", source)
    if "tokenizer.ggml.scores" not in metadata or unknown is None:
        raise MalformedInput(f"`{source}` has no scores or unknown token, by which text is divided", hint=GIVE)
    pieces = [
        (SPACE * len(text) if kind == USER_DEFINED and not text.strip(" ") else text, score, int(kind))
        for text, score, kind in zip(tokens, scores, types, strict=True)
    ]
    if len({text for text, _, _ in pieces}) < len(pieces):
        raise MalformedInput(f"`{source}` has a token twice", hint=GIVE)
    model = SentencePieceModel(
        pieces=tuple(pieces),
        is_bpe=True,
        byte_fallback=BYTE in types,
        bos=_id(metadata, "bos", source) or 0,
        eos=_id(metadata, "eos", source) or 0,
        unk=unknown,
        charsmap=b"",
        add_dummy_prefix=_flag(metadata, "add_space_prefix", default=True),
        remove_extra_whitespaces=_flag(metadata, "remove_extra_whitespaces", default=False),
    )
    return tokenizer_json(model)


def _byte_level(
    metadata: Mapping[str, Any], tokens: list[str], types: Sequence[float], words: Words, source: str
) -> dict[str, Any]:
    merges = metadata.get("tokenizer.ggml.merges")
    pairs = [str(merge).split(" ") for merge in merges] if isinstance(merges, list) else []
    vocabulary = {
        text: number
        for number, (text, kind) in enumerate(zip(tokens, types, strict=True))
        if not (kind == UNUSED and PADDING.fullmatch(text))
    }
    known = all(len(pair) == 2 and {*pair, "".join(pair)} <= vocabulary.keys() for pair in pairs)
    if not pairs or not known:
        raise MalformedInput(f"`{source}` has merges of tokens that it does not have, or none", hint=GIVE)
    if len({*tokens}) < len(tokens):
        raise MalformedInput(f"`{source}` has a token twice", hint=GIVE)
    alphabet = {*byte_alphabet()}
    added = [
        added_token(number, text, special=kind == CONTROL)
        for number, (text, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, USER_DEFINED) or (text in vocabulary and not alphabet.issuperset(text))
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": not words.pattern}
    steps: list[dict[str, Any]] = [level]
    if words.pattern:
        split = {"type": "Split", "pattern": {"Regex": words.pattern}, "behavior": "Isolated", "invert": False}
        steps = [split, level]
    elif words.digits:
        steps = [{"type": "Digits", "individual_digits": True}, level]
    return {
        **TOKENIZER,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if words.normalizes else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps} if len(steps) > 1 else level,
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {**MODEL, "ignore_merges": words.whole, "vocab": vocabulary, "merges": pairs},
    }
