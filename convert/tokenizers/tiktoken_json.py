"""Converts tiktoken's `tokenizer.model` (base64 token, space, rank per line) to a `tokenizer.json` with the same ids.

Sources: meta-llama/llama3 `llama/tokenizer.py` and llama-models `models/llama3/tokenizer.py` (pattern, special tokens);
the pipeline is that of transformers' TikTokenConverter.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

from llmconv.convert.tokenizers.sentencepiece_json import added_token, bos_template, require_short
from llmconv.errors import MalformedInput

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NUM_SPECIAL = 256
BOS, EOS, EOM, EOT = 0, 1, 8, 9
"""Special tokens, by their offset after the last rank."""

NAMED = {0: "begin_of_text", 1: "end_of_text", 6: "start_header_id", 7: "end_header_id", 9: "eot_id"}
NAMED_SINCE_3_1 = NAMED | {4: "finetune_right_pad_id", 8: "eom_id", 10: "python_tag"}


def parse_tiktoken(data: bytes) -> dict[bytes, int]:
    """Token to rank; ranks are 0 … n-1 (else MalformedInput)."""
    try:
        pairs = [line.split() for line in data.splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (ValueError, binascii.Error) as error:
        raise MalformedInput("`tokenizer.model` is not a tiktoken vocabulary", hint="copy it again") from error
    if sorted(ranks.values()) != list(range(len(pairs))) or not ranks:
        raise MalformedInput("the ranks in `tokenizer.model` are not 0, 1, 2, …", hint="copy it again")
    return ranks


def is_tiktoken(data: bytes) -> bool:
    """Whether the first line is base64, a space and a rank (sentencepiece starts with a binary tag)."""
    token, _, rank = data[: 4 << 10].partition(b"\n")[0].partition(b" ")
    try:
        return bool(token) and base64.b64decode(token, validate=True) != b"" and rank.strip().isdigit()
    except binascii.Error:
        return False


def special_tokens(*, since_3_1: bool) -> list[str]:
    """The 256 special tokens in order of their ids, in Hugging Face's names."""
    named = NAMED_SINCE_3_1 if since_3_1 else NAMED
    reserved = (f"reserved_special_token_{number}" for number in range(NUM_SPECIAL))
    return [f"<|{named[i] if i in named else next(reserved)}|>" for i in range(NUM_SPECIAL)]


def merges_of(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """All splits of a token into two tokens, best first: tiktoken joins the pair whose result has the lowest rank."""
    require_short(ranks)
    merges: list[tuple[bytes, bytes]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        splits = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [(left, right) for left, right in splits if left in ranks and right in ranks]
        merges += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return merges


def byte_alphabet() -> list[str]:
    """The visible character of each byte (GPT-2's `bytes_to_unicode`)."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = (chr(256 + number) for number in range(256))
    return [chr(byte) if byte in visible else next(spare) for byte in range(256)]


def tiktoken_json(ranks: dict[bytes, int], *, since_3_1: bool) -> dict[str, Any]:
    """The content of `tokenizer.json`; encoding begins with `<|begin_of_text|>`."""
    alphabet = byte_alphabet()
    spelled = {token: "".join(alphabet[byte] for byte in token) for token in ranks}
    specials = special_tokens(since_3_1=since_3_1)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added_token(len(ranks) + i, text, special=True) for i, text in enumerate(specials)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": bos_template(specials[BOS], len(ranks) + BOS),
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,  # tiktoken does not split a word that is a token
            "vocab": {spelled[token]: rank for token, rank in ranks.items()},
            "merges": [[spelled[left], spelled[right]] for left, right in merges_of(ranks)],
        },
    }


def tiktoken_of(content: Mapping[str, Any]) -> bytes | None:
    """The reverse of `tiktoken_json`: `tokenizer.model`, or None if `tokenizer.json` is that of another tokenizer."""
    model, split = content.get("model"), json.dumps({"Regex": PATTERN})
    if not isinstance(model, Mapping) or split not in json.dumps(content.get("pre_tokenizer")):
        return None
    vocabulary, merges = model.get("vocab"), model.get("merges")
    if not isinstance(vocabulary, Mapping) or not isinstance(merges, list):
        return None
    byte_of = {character: byte for byte, character in enumerate(byte_alphabet())}
    try:
        ranks = {bytes(byte_of[character] for character in token): rank for token, rank in vocabulary.items()}
        pairs = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in merges]
        stored = [tuple(bytes(byte_of[character] for character in part) for part in pair) for pair in pairs]
        expected = merges_of(ranks)
    except (KeyError, TypeError, MalformedInput):
        return None
    if sorted(map(repr, ranks.values())) != sorted(map(repr, range(len(ranks)))) or stored != expected:
        return None
    lines = (base64.b64encode(token) + f" {ranks[token]}\n".encode() for token in sorted(ranks, key=ranks.__getitem__))
    return b"".join(lines)
