"""Converts sentencepiece's `tokenizer.model` (BPE) to a `tokenizer.json` with the same ids.

Formats: `sentencepiece_model.proto` (google/sentencepiece), read on the wire level; tokenizer.json of
huggingface/tokenizers, with the pipeline that transformers' SpmConverter builds for Llama.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llmconv.errors import MalformedInput

BPE = 2
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
SPACE = "\u2581"
PIECE = {1: bytes, 2: bytes, 3: int}
"""Field number to its type on the wire: text, score, type."""
TRAINER = {3: int, 35: int, 40: int, 41: int, 42: int}
NORMALIZER = {2: bytes, 3: int, 4: int}

SPLIT_LIMIT = 200_000_000
"""Maximum sum of the squared lengths of all tokens: 1 million for 32,000 tokens, 10 million for Llama 3's."""


@dataclass(frozen=True)
class SentencePieceModel:
    """The content of a `tokenizer.model`.

    Attributes:
        pieces: (text, score, type) by id.
        is_bpe: pieces are joined by merges (otherwise it is a unigram model).
        byte_fallback: unknown characters become bytes.
        bos, eos, unk: ids; -1 if there is none.
        charsmap: precompiled normalization; empty for `identity`.
    """

    pieces: tuple[tuple[str, float, int], ...]
    is_bpe: bool
    byte_fallback: bool
    bos: int
    eos: int
    unk: int
    charsmap: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool


def parse_sentencepiece(data: bytes) -> SentencePieceModel:
    """Reads the ModelProto in `data`; MalformedInput if it is not a sentencepiece model."""
    try:
        fields = list(_fields(data))
        trainer = _typed(next((value for number, value in fields if number == 2), b""), TRAINER)
        normalizer = _typed(next((value for number, value in fields if number == 3), b""), NORMALIZER)
        pieces = tuple(_piece(value) for number, value in fields if number == 1)
    except (IndexError, struct.error, AttributeError, KeyError, TypeError, ValueError) as error:
        raise MalformedInput("`tokenizer.model` is not a sentencepiece model", hint="copy it again") from error
    if max(_signed(trainer.get(field, default)) for field, default in ((40, 0), (41, 1), (42, 2))) >= len(pieces):
        raise MalformedInput(
            f"`tokenizer.model` has {len(pieces)} pieces, but special tokens with larger ids", hint="copy it again"
        )
    return SentencePieceModel(
        pieces=pieces,
        is_bpe=trainer.get(3, 1) == BPE,
        byte_fallback=bool(trainer.get(35, 0)),
        bos=_signed(trainer.get(41, 1)),
        eos=_signed(trainer.get(42, 2)),
        unk=_signed(trainer.get(40, 0)),
        charsmap=normalizer.get(2, b""),
        add_dummy_prefix=bool(normalizer.get(3, 1)),
        remove_extra_whitespaces=bool(normalizer.get(4, 1)),
    )


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Field number and value (int, 4 or 8 raw bytes, or bytes) of each field of a protobuf message."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        match tag & 7:
            case 0:
                value, position = _varint(data, position)
                yield tag >> 3, value
                continue
            case 1:
                size = 8
            case 2:
                size, position = _varint(data, position)
            case 5:
                size = 4
            case _:
                raise ValueError("unsupported wire type")
        if position + size > len(data):
            raise IndexError
        yield tag >> 3, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError("number too long")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _piece(data: bytes) -> tuple[str, float, int]:
    fields = _typed(data, PIECE)
    (score,) = struct.unpack("<f", fields.get(2, bytes(4)))
    return fields.get(1, b"").decode("utf-8"), score, fields.get(3, 1)


def _typed(data: Any, kinds: Mapping[int, type]) -> dict[int, Any]:
    """The fields of a message with a known number; TypeError for a type that sentencepiece does not write."""
    if not isinstance(data, bytes):
        raise TypeError("not a message")
    fields = {number: value for number, value in _fields(data) if number in kinds}
    if any(not isinstance(value, kinds[number]) for number, value in fields.items()):
        raise TypeError("field of the wrong type")
    return fields


def require_short(tokens: Iterable[str | bytes]) -> None:
    """Refuses (MalformedInput) tokens whose splits would take too long to try: cost is the square of each length."""
    if sum(len(token) ** 2 for token in tokens) > SPLIT_LIMIT:
        raise MalformedInput("the tokens in `tokenizer.model` are far too long", hint="copy it again")


def merges_of(model: SentencePieceModel) -> list[tuple[str, str]]:
    """The merges of a BPE model, best first: all splits of a piece into two, in the order of the pieces' scores.

    sentencepiece joins the pair whose result has the best score, so every split of a piece shares its rank.
    """
    require_short(text for text, _, _ in model.pieces)
    ids = {text: index for index, (text, _, _) in enumerate(model.pieces)}
    ranked: list[tuple[float, int, int, str, str]] = []
    for text, score, kind in model.pieces:
        if kind not in (UNKNOWN, CONTROL, USER_DEFINED):
            splits = ((text[:at], text[at:]) for at in range(1, len(text)))
            ranked += [
                (-score, ids[left], ids[right], left, right) for left, right in splits if left in ids and right in ids
            ]
    return [(left, right) for *_, left, right in sorted(ranked)]


def tokenizer_json(model: SentencePieceModel) -> dict[str, Any]:
    """The content of `tokenizer.json`; encoding begins with bos."""
    bos = model.pieces[model.bos][0]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            added_token(index, text, special=kind != USER_DEFINED)
            for index, (text, _, kind) in enumerate(model.pieces)
            if kind in (UNKNOWN, CONTROL, USER_DEFINED)
        ],
        "normalizer": {"type": "Sequence", "normalizers": _normalizers(model)},
        "pre_tokenizer": None,
        "post_processor": bos_template(bos, model.bos),
        "decoder": _decoder(model),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": model.pieces[model.unk][0],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": model.byte_fallback,
            "ignore_merges": False,
            "vocab": {text: index for index, (text, _, _) in enumerate(model.pieces)},
            "merges": [list(pair) for pair in merges_of(model)],
        },
    }


def _normalizers(model: SentencePieceModel) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    if model.charsmap:
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(model.charsmap).decode()})
    if model.remove_extra_whitespaces:
        steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if model.add_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": SPACE})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    return steps


def _decoder(model: SentencePieceModel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}]
    steps += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if model.add_dummy_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def added_token(index: int, text: str, *, special: bool) -> dict[str, Any]:
    """One entry of `added_tokens`; decoding may skip a `special` token."""
    return {
        "id": index,
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def bos_template(bos: str, index: int) -> dict[str, Any]:
    """The post-processor that begins each sequence with `bos`."""
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            {"SpecialToken": {"id": bos, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": bos, "type_id": 1}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {bos: {"id": bos, "ids": [index], "tokens": [bos]}},
    }
