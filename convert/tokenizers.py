"""Converts sentencepiece's `tokenizer.model` (BPE) to a `tokenizer.json` with the same ids.

Formats: `sentencepiece_model.proto` (google/sentencepiece), read on the wire level; tokenizer.json of
huggingface/tokenizers, with the pipeline that transformers' SpmConverter builds for Llama.

Converts tiktoken's `tokenizer.model` (base64 token, space, rank per line) to a `tokenizer.json` with the same ids.

Sources: meta-llama/llama3 `llama/tokenizer.py` and llama-models `models/llama3/tokenizer.py` (pattern, special tokens);
the pipeline is that of transformers' TikTokenConverter.

Protocol buffers are read on the wire level (protobuf.dev "Encoding"), without their schema. Each field is a varint key
`number << 3 | wire type`, then a varint (0), eight bytes (1), a varint length and as many bytes (2), or four bytes (5);
groups are refused.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO, RawIOBase
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self

from llmconv.checkpoint import SIDE_FILES, read_side_files, read_small
from llmconv.errors import InputRefused, MalformedInput, listing
from llmconv.files.source_file import open_data

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
VARINT_BYTES = 10
PACKED_BYTES = 64 * VARINT_BYTES
WINDOW = 1024  # bytes read at once: enough for a few fields with their names, and little of the skipped payload


class Field(NamedTuple):
    """One field of a message; the payload is at `start` to `stop` in the file."""

    number: int
    wire: int  # `VARINT`, `FIXED64`, `BYTES` or `FIXED32`
    value: int  # the number of a `VARINT`, unsigned; 0 otherwise
    start: int
    stop: int

    @property
    def signed(self) -> int:
        """The value as int32 or int64, which are both stored in 64 bits."""
        return self.value - (1 << 64) if self.value >> 63 else self.value


class Protobuf:
    """Messages of `size` bytes in a file (its name is for errors), by position; no field reaches past its message."""

    def __init__(self, file: RawIOBase | BytesIO, size: int, name: str, window: bytes = b"") -> None:
        self.size, self.name = size, name
        self._file, self._window, self._window_start = file, window, 0

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[Self]:
        with open_data(path) as file:
            yield cls(file, path.stat().st_size, path.name)

    def bytes(self, start: int, stop: int) -> bytes:
        """The bytes from `start` to `stop`; MalformedInput if the file ends before."""
        low = start - self._window_start
        if low < 0 or low + stop - start > len(self._window):
            self._file.seek(start)
            self._window = self._file.read(max(WINDOW, stop - start)) or b""
            self._window_start, low = start, 0
        if stop > self.size or low + stop - start > len(self._window):
            self.refuse(f"ends at byte {self.size}, inside a field")
        return self._window[low : low + stop - start]

    def varint(self, start: int, stop: int) -> tuple[int, int]:
        """The number at `start`, of at most 64 bits, and the position after it, at most `stop`; or MalformedInput."""
        low = start - self._window_start
        if start < stop and 0 <= low < len(self._window) and self._window[low] < 0x80:  # nearly all: one byte
            return self._window[low], start + 1
        value = 0
        for count, byte in enumerate(self.bytes(start, min(stop, start + VARINT_BYTES))):
            value |= (byte & 0x7F) << 7 * count
            if byte < 0x80 and value < 1 << 64:
                return value, start + count + 1
        return self.refuse(f"has an invalid number at byte {start}")

    def fields(self, start: int, stop: int) -> Iterator[Field]:
        """The fields of the message from `start` to `stop`, in file order; MalformedInput for an invalid one."""
        while start < stop:
            key, start = self.varint(start, stop)
            number, wire = key >> 3, key & 7
            value, end = 0, start
            if wire == VARINT:
                value, end = self.varint(start, stop)
            elif wire == BYTES:
                length, start = self.varint(start, stop)
                end = start + length
            elif wire in (FIXED64, FIXED32):
                end = start + (8 if wire == FIXED64 else 4)
            else:
                self.refuse(f"has a field of unsupported wire type {wire} at byte {start}")
            if end > stop:
                self.refuse(f"has a field of {end - start} bytes at byte {start}, where {stop - start} bytes are left")
            yield Field(number, wire, value, start, end)
            start = end

    def numbers(self, field: Field) -> list[int]:
        """The values of one `repeated int32` or `int64` field: a single one, or all of them packed."""
        if field.wire == VARINT:
            return [field.signed]
        if field.stop - field.start > PACKED_BYTES:
            self.refuse(f"has a list of {field.stop - field.start} bytes at byte {field.start}, expected sizes")
        values, start = [], field.start
        while start < field.stop:
            value, start = self.varint(start, field.stop)
            values.append(value - (1 << 64) if value >> 63 else value)
        return values

    def text(self, field: Field, limit: int) -> str:
        """The printable text of one field; MalformedInput if it is something else or longer than `limit` bytes."""
        if field.wire != BYTES or field.stop - field.start > limit:
            self.refuse(f"has no valid name at byte {field.start}")
        try:
            text = self.bytes(field.start, field.stop).decode()
        except UnicodeDecodeError:
            text = "\0"
        if not text.isprintable():
            self.refuse(f"has a name at byte {field.start} that is not text")
        return text

    def refuse(self, problem: str) -> NoReturn:
        """Raises the MalformedInput for this file."""
        raise MalformedInput(f"`{self.name}` {problem}", hint="the file is truncated or damaged; copy it again")


BPE = 2
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
SPACE = "\u2581"
PIECE = {1: BYTES, 2: FIXED32, 3: VARINT}  # field number to its wire type: text, score, type
TRAINER = dict.fromkeys((3, 24, 35, 40, 41, 42), VARINT)
NORMALIZER = {1: BYTES, 2: BYTES, 3: VARINT, 4: VARINT}
# The content of `tokenizer.json` and its BPE model, without what differs
TOKENIZER = {"version": "1.0", "truncation": None, "padding": None}
MODEL: dict[str, Any] = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None}
MODEL |= {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}

SPLIT_LIMIT = 200_000_000
"""Maximum sum of the squared lengths of all tokens: 1 million for 32,000 tokens, 10 million for Llama 3's."""


PLAIN_ASCII = ("nmt_nfkc", "nfkc")  # normalizations that keep printable ASCII
NOT_CONVERTED = "a unigram model, without bos, eos or unk, with spaces after words or with symbols that it normalizes"
"""What a sentencepiece model may be that `tokenizer.json` cannot state."""


@dataclass(frozen=True)
class SentencePieceModel:
    """The content of a `tokenizer.model`."""

    pieces: tuple[tuple[str, float, int], ...]  # (text, score, type) by id
    is_bpe: bool  # pieces are joined by merges (otherwise it is a unigram model)
    byte_fallback: bool  # unknown characters become bytes
    bos: int  # ids; -1 if there is none
    eos: int
    unk: int
    charsmap: bytes  # precompiled normalization; empty for `identity`
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    normalization: str = ""  # name of the rules in `charsmap`
    whitespace_as_suffix: bool = False  # of the word before it, which no tokenizer.json states

    @property
    def is_converted(self) -> bool:
        """Whether `tokenizer_json` gives the same ids; sentencepiece normalizes no user-defined symbol, it does."""
        symbols = "".join(text for text, _, kind in self.pieces if kind == USER_DEFINED)
        same = not (self.charsmap and symbols) or (
            self.normalization in PLAIN_ASCII and all("!" <= one <= "~" for one in symbols)
        )
        same = same and not (self.remove_extra_whitespaces and " " in symbols)
        return self.is_bpe and same and not self.whitespace_as_suffix and min(self.bos, self.eos, self.unk) >= 0


def parse_sentencepiece(data: bytes) -> SentencePieceModel:
    """Reads the ModelProto in `data`; MalformedInput if it is not a sentencepiece model."""
    source, pieces = Protobuf(BytesIO(), len(data), "tokenizer.model", data), list[tuple[str, float, int]]()
    try:
        fields = list(source.fields(0, len(data)))
        trainer = _typed(source, next((one for one in fields if one.number == 2), None), TRAINER)
        normalizer = _typed(source, next((one for one in fields if one.number == 3), None), NORMALIZER)
        for message in (one for one in fields if one.number == 1):
            piece = _typed(source, message, PIECE)
            (score,) = struct.unpack("<f", piece.get(2, bytes(4)))
            pieces.append((piece.get(1, b"").decode("utf-8"), score, piece.get(3, 1)))
    except (MalformedInput, UnicodeDecodeError) as error:
        raise MalformedInput("`tokenizer.model` is not a sentencepiece model", hint="copy it again") from error
    if max(trainer.get(field, default) for field, default in ((40, 0), (41, 1), (42, 2))) >= len(pieces):
        raise MalformedInput(
            f"`tokenizer.model` has {len(pieces)} pieces, but special tokens with larger ids", hint="copy it again"
        )
    return SentencePieceModel(
        pieces=tuple(pieces),
        is_bpe=trainer.get(3, 1) == BPE,
        byte_fallback=bool(trainer.get(35, 0)),
        bos=trainer.get(41, 1),
        eos=trainer.get(42, 2),
        unk=trainer.get(40, 0),
        charsmap=normalizer.get(2, b""),
        add_dummy_prefix=bool(normalizer.get(3, 1)),
        remove_extra_whitespaces=bool(normalizer.get(4, 1)),
        normalization=normalizer.get(1, b"").decode(errors="replace"),
        whitespace_as_suffix=bool(trainer.get(24, 0)),
    )


def _typed(source: Protobuf, message: Field | None, wires: Mapping[int, int]) -> dict[int, Any]:
    """The fields of a message with a known number; MalformedInput for a wire type that sentencepiece does not write."""
    if message is None:
        return {}
    if message.wire != BYTES:
        source.refuse("has a number in place of a message")
    fields = [one for one in source.fields(message.start, message.stop) if one.number in wires]
    if any(one.wire != wires[one.number] for one in fields):
        source.refuse("has a field of the wrong type")
    return {one.number: one.signed if one.wire == VARINT else source.bytes(one.start, one.stop) for one in fields}


def require_short(tokens: Iterable[str | bytes]) -> None:
    """Refuses (MalformedInput) tokens whose splits would take too long to try: cost is the square of each length."""
    if sum(len(token) ** 2 for token in tokens) > SPLIT_LIMIT:
        raise MalformedInput("the tokens in `tokenizer.model` are far too long", hint="copy it again")


def merges_of(model: SentencePieceModel) -> list[tuple[str, str]]:
    """All splits of BPE pieces into two, best score of the piece first, as sentencepiece joins the best pair."""
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


def tokenizer_json(model: SentencePieceModel, *, found_first: bool = False) -> dict[str, Any]:
    """The content of `tokenizer.json`; encoding begins with bos.

    sentencepiece finds user-defined symbols in the normalized text, so they are words of their own for the BPE. With
    `found_first` they divide the text before it is normalized, each part by itself, as in llama.cpp.
    """
    bos = model.pieces[model.bos][0]
    symbols = [] if found_first else [text for text, _, kind in model.pieces if kind == USER_DEFINED]
    words = "|".join(re.escape(text) for text in sorted(symbols, key=len, reverse=True))
    split = {"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": False}
    steps: list[dict[str, Any]] = []
    if model.charsmap:
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(model.charsmap).decode()})
    if model.remove_extra_whitespaces:
        steps.append(
            {"type": "Replace", "pattern": {"Regex": f"\\A +|[ {SPACE}]+\\z"}, "content": ""}
        )  # no lines or tabs
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if model.add_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": SPACE})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    decoders: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}]
    decoders += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if model.add_dummy_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        **TOKENIZER,
        "added_tokens": [
            added_token(index, text, special=kind != USER_DEFINED)
            for index, (text, _, kind) in enumerate(model.pieces)
            if kind in (UNKNOWN, CONTROL) or (kind == USER_DEFINED and found_first)
        ],
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": split if symbols else None,
        "post_processor": bos_template(bos, model.bos),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            **MODEL,
            "unk_token": model.pieces[model.unk][0],
            "fuse_unk": True,
            "byte_fallback": model.byte_fallback,
            "ignore_merges": bool(symbols),  # a symbol is a token, though no merges give it
            "vocab": {text: index for index, (text, _, _) in enumerate(model.pieces)},
            "merges": [list(pair) for pair in merges_of(model)],
        },
    }


def tokenizer_bytes(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, ensure_ascii=False) + "\n").encode()


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
    single = [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"SpecialToken": {"id": bos, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [index], "tokens": [bos]}},
    }


PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NUM_SPECIAL = 256
BOS, EOS, EOM, EOT = 0, 1, 8, 9  # special tokens, by their offset after the last rank
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


def reserved_tokens(*, since_3_1: bool) -> list[str]:
    """The 256 special tokens in order of their ids, in Hugging Face's names."""
    named = NAMED_SINCE_3_1 if since_3_1 else NAMED
    reserved = (f"reserved_special_token_{number}" for number in range(NUM_SPECIAL))
    return [f"<|{named[i] if i in named else next(reserved)}|>" for i in range(NUM_SPECIAL)]


def tiktoken_merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """All splits of a token into two tokens, best first: tiktoken joins the pair whose result has the lowest rank."""
    require_short(ranks)
    merges: list[tuple[bytes, bytes]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        splits = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [(left, right) for left, right in splits if left in ranks and right in ranks]
        merges += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return merges


def byte_alphabet() -> list[str]:
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = (chr(256 + number) for number in range(256))
    return [chr(byte) if byte in visible else next(spare) for byte in range(256)]


def tiktoken_json(ranks: dict[bytes, int], *, since_3_1: bool) -> dict[str, Any]:
    """The content of `tokenizer.json`; encoding begins with `<|begin_of_text|>`."""
    alphabet = byte_alphabet()
    spelled = {token: "".join(alphabet[byte] for byte in token) for token in ranks}
    specials = reserved_tokens(since_3_1=since_3_1)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
    return {
        **TOKENIZER,
        "added_tokens": [added_token(len(ranks) + i, text, special=True) for i, text in enumerate(specials)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": bos_template(specials[BOS], len(ranks) + BOS),
        "decoder": byte_level,
        "model": {
            **MODEL,
            "ignore_merges": True,  # tiktoken does not split a word that is a token
            "vocab": {spelled[token]: rank for token, rank in ranks.items()},
            "merges": [[spelled[left], spelled[right]] for left, right in tiktoken_merges(ranks)],
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
        expected = tiktoken_merges(ranks)
    except (KeyError, TypeError, MalformedInput):
        return None
    if sorted(map(repr, ranks.values())) != sorted(map(repr, range(len(ranks)))) or stored != expected:
        return None
    lines = (base64.b64encode(token) + f" {ranks[token]}\n".encode() for token in sorted(ranks, key=ranks.__getitem__))
    return b"".join(lines)


def special_ids(files: Mapping[str, bytes]) -> tuple[int | None, int | None]:
    """Ids of the tokens that begin and end a text; None if the files do not contain them.

    `files` is content by name; `tokenizer_config.json` (or `special_tokens_map.json`) contains the tokens,
    `tokenizer.json` their ids. Raises MalformedInput if a file is not JSON.
    """
    settings = {**read_object(files, "special_tokens_map.json"), **read_object(files, "tokenizer_config.json")}
    ids = token_ids(read_object(files, "tokenizer.json"))
    bos, eos = (ids.get(text_of(settings.get(kind)) or "") for kind in ("bos_token", "eos_token"))
    return bos, eos


def special_tokens(files: Mapping[str, bytes]) -> dict[str, tuple[str, int | None]]:
    """Text, and id if known, by `bos_token`, `eos_token`, `pad_token`; `files` and errors as in `special_ids`."""
    settings = {**read_object(files, "special_tokens_map.json"), **read_object(files, "tokenizer_config.json")}
    ids = {**token_ids(read_object(files, "tokenizer.json")), **_added(files)}
    texts = {kind: text for kind in ("bos_token", "eos_token", "pad_token") if (text := text_of(settings.get(kind)))}
    return {kind: (text, ids.get(text)) for kind, text in texts.items()}


KINDS = (*(f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")), "additional_special_tokens")


def tokens_of_other_files(files: Mapping[str, bytes]) -> list[tuple[dict[str, Any], int | None]]:
    """The tokens of the files next to `tokenizer.json`, in the order in which transformers adds those that it lacks.

    Each is an entry of `added_tokens`, and the id that a file states; MalformedInput if a file is not JSON. With an
    `added_tokens_decoder` the older files (`added_tokens.json`, `special_tokens_map.json`) do not count.
    """
    settings = read_object(files, "tokenizer_config.json")
    rows = settings.get("added_tokens_decoder")
    if not isinstance(rows, dict):
        settings = {**settings, **read_object(files, "special_tokens_map.json")}
        rows = {number: {"content": text} for text, number in read_object(files, "added_tokens.json").items()}
    values = [settings.get(name) for name in KINDS]
    named = [
        text for value in values for one in (value if isinstance(value, list) else [value]) if (text := text_of(one))
    ]
    found = list[tuple[dict[str, Any], int | None]]()
    for number, token in sorted((int(number), token) for number, token in rows.items() if str(number).isdecimal()):
        if isinstance(token, dict) and (text := text_of(token)):
            flags = {name: token[name] for name in ("single_word", "lstrip", "rstrip", "normalized") if name in token}
            special = text in named or bool(token.get("special"))
            found.append((added_token(number, text, special=special) | flags, number))
    return [*found, *((added_token(0, text, special=True), None) for text in named)]


def all_tokens(files: Mapping[str, bytes]) -> dict[str, int]:
    """Text to id, of `tokenizer.json` and of the tokens that files next to it add; errors as in `special_ids`."""
    return {**_added(files), **token_ids(read_object(files, "tokenizer.json"))}


def added_tokens(files: Mapping[str, bytes], base: Mapping[str, bytes]) -> list[str]:
    """The tokens beyond a vocabulary that another tokenizer does not have; MalformedInput if a file is not JSON."""
    known = {**_added(base), **token_ids(read_object(base, "tokenizer.json")), **read_object(base, "vocab.json")}
    return sorted(_added(files).keys() - known.keys())


def _added(files: Mapping[str, bytes]) -> dict[str, int]:
    """Token to id: `added_tokens.json`, `added_tokens_decoder` of the config, `added_tokens` of `tokenizer.json`."""
    decoder = read_object(files, "tokenizer_config.json").get("added_tokens_decoder")
    rows = decoder.items() if isinstance(decoder, dict) else ()
    pairs: list[tuple[Any, Any]] = [(text_of(token), int(number)) for number, token in rows if str(number).isdecimal()]
    listed = read_object(files, "tokenizer.json").get("added_tokens")
    tokens = [token for token in listed if isinstance(token, dict)] if isinstance(listed, list) else []
    pairs += [(text_of(token), token.get("id")) for token in tokens]
    pairs += read_object(files, "added_tokens.json").items()
    return {text: number for text, number in pairs if isinstance(text, str) and type(number) is int}


def vocabulary_size(files: Mapping[str, bytes]) -> int | None:
    """Highest id + 1 in `tokenizer.json`, `vocab.json` or `tokenizer.model`; None: no ids, MalformedInput."""
    added = _added(files)
    ids = token_ids(read_object(files, "tokenizer.json")) or read_object(files, "vocab.json")
    numbers = [number for number in {**ids, **added}.values() if type(number) is int] if ids else []
    if not numbers and "tokenizer.model" in files:
        pieces = parse_sentencepiece(files["tokenizer.model"]).pieces
        numbers = [len(pieces) - 1, *(number for number in added.values() if type(number) is int)]
    return max(numbers) + 1 if numbers else None


def beyond_rows(files: Mapping[str, bytes], config: Mapping[str, Any]) -> list[str]:
    """A warning if tokens have ids beyond `vocab_size`; none for a model with images, whose tokens may have no row."""
    rows = config.get("vocab_size")
    if type(rows) is not int or "text_config" in config or "vision_config" in config:
        return []
    try:
        more = sorted(text for text, number in all_tokens(files).items() if number >= rows)
    except MalformedInput:
        return []  # transformers refuses it, too
    few = "1 token" if len(more) == 1 else f"{len(more)} tokens"
    problem = f"the tokenizer has {few} that the model has no row for ({listing(more)}), since it knows {rows}"
    return [f"{problem}: no text with such a token can be run"] if more else []


def read_object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        content = json.loads(files.get(name, b"{}"))
    except (ValueError, RecursionError) as error:
        raise MalformedInput(f"`{name}` is not valid JSON: {error}", hint="repair or replace the tokenizer") from error
    return content if isinstance(content, dict) else {}


def text_of(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def token_ids(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Token to id: those of the model (a dict, or a list of pairs), overridden by added tokens."""
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    pairs: list[tuple[Any, Any]] = []
    if isinstance(vocabulary, dict):
        pairs = list(vocabulary.items())
    elif isinstance(vocabulary, list):
        pairs = [(row[0], index) for index, row in enumerate(vocabulary) if isinstance(row, list) and row]
    added = tokenizer.get("added_tokens")
    for token in added if isinstance(added, list) else []:
        if isinstance(token, dict):
            pairs.append((token.get("content"), token.get("id")))
    return {text: number for text, number in pairs if isinstance(text, str) and isinstance(number, int)}


def read_tokenizer(path: Path) -> dict[str, bytes]:
    """The tokenizer files at `path`, by plain name; InputRefused if there is none."""
    if path.is_dir():
        files = {name: content for name, content in read_side_files(path).items() if name != "generation_config.json"}
    else:
        files = {path.name: read_small(path)} if path.is_file() and path.name in SIDE_FILES else {}
    if not files:
        raise InputRefused(
            f"`{path}` contains no tokenizer",
            hint="give a folder with `tokenizer.json` or `tokenizer.model`, or the file",
        )
    return files
