"""Reads GGUF files, the container of llama.cpp: the metadata, and tensors whose blocks are dequantized when read.

Layout (ggml `docs/gguf.md`, version 2 and 3, little-endian): magic `GGUF`, version u32, number of tensors u64, number
of keys u64; then for each key its name, the type of its value u32, and the value; then for each tensor its name, number
of dimensions u32, dimensions u64 (the innermost first), type u32, and offset u64 in the data, which begins at the next
multiple of `general.alignment`. A text is its length u64 and UTF-8. An array is the type of its items u32, their number
u64, and the items.

Blocks (ggml `ggml-common.h`, `ggml-quants.c`; the numbers are those of `gguf.quants` of the package `gguf`):
consecutive elements of a row with a scale in float16, computed in float32.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from llmconv.errors import MalformedInput, UnsupportedInput, short
from llmconv.files.paths import GIT_LFS, refuse_git_lfs
from llmconv.files.safetensors_file import FileTensor
from llmconv.files.source_file import FileProblem, naming, open_source
from llmconv.tensors import BY_NAME, Array, LazyTensor

MAGIC = b"GGUF"
VERSIONS = (2, 3)
HEADER_LIMIT = 192 << 20  # bytes before the data; those of 260,000 tokens and their merges are 15 MiB
ITEM_LIMIT = 4 << 20  # items of all arrays of the metadata
KEY_LIMIT, TENSOR_LIMIT = 1 << 16, 1 << 15
TEXT_LIMIT = 16 << 20  # bytes of one text; a chat template has some thousand
NAME_LIMIT = 256
RANK_LIMIT = 4
ALIGNMENT, ALIGNMENT_LIMIT = 32, 1 << 20
DAMAGED = "the file is truncated or damaged; copy or download it again"

TEXT, ARRAY, BOOL = 8, 9, 7
NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    BOOL: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""numpy's name of the scalar types, by their number in a file."""

PLAIN = {
    0: ("F32", "float32"),
    1: ("F16", "float16"),
    24: ("I8", "int8"),
    25: ("I16", "int16"),
    26: ("I32", "int32"),
    27: ("I64", "int64"),
    28: ("F64", "float64"),
    30: ("BF16", "bfloat16"),
}
"""Types of tensors whose elements lie one after another: llama.cpp's name, and that of llmconv."""


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor of a file."""

    type: str  # llama.cpp's name, such as `F16` or `Q4_K`
    # the elements, dequantized to float32 if they are blocks; a FileTensor if they are plain
    values: LazyTensor
    blocks: FileTensor  # the bytes, uint8 [rows, bytes of a row]; a row is the innermost dimension


@dataclass(frozen=True)
class GGUFFile:
    """The header of a file: its metadata by key, and its tensors by name in the order of the file."""

    metadata: dict[str, Any]  # numbers, booleans, texts, and lists of them
    tensors: dict[str, GGUFTensor]
    # first byte of each value in the file, that of its type, and the first after it
    places: dict[str, tuple[int, int]]


def is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    with open_source(path) as file:
        return file.read(len(MAGIC)) == MAGIC


def read_gguf(path: Path) -> GGUFFile:
    """Reads the header of a GGUF file; no tensor is read.

    Raises MalformedInput if it is damaged, UnsupportedInput for another version or byte order, and for a type of
    tensors that is not in `BLOCKS` or `PLAIN`.
    """
    size = path.stat().st_size
    with naming(f"`{path.name}`", DAMAGED), open_source(path) as file:
        header = _Header(file, min(size, HEADER_LIMIT), size)
        if (magic := header.take(len(MAGIC))) != MAGIC:
            if magic == GIT_LFS[: len(MAGIC)]:
                refuse_git_lfs(magic + file.read(len(GIT_LFS)), path.name)
            raise FileProblem("does not begin with `GGUF`", "give the file that llama.cpp opens")
        version = header.number("<u4")
        if version not in VERSIONS:
            swapped = struct.unpack("<I", struct.pack(">I", version))[0] in VERSIONS
            kind = "a big-endian GGUF file" if swapped else f"a GGUF file of version {version}"
            raise UnsupportedInput(
                f"`{path.name}` is {kind}", hint="convert it with llama.cpp's `gguf` tools, or again"
            )
        tensors, keys = header.count("tensors", TENSOR_LIMIT), header.count("keys", KEY_LIMIT)
        metadata: dict[str, Any] = {}
        places: dict[str, tuple[int, int]] = {}
        for _ in range(keys):
            name, start = header.name(), header.position
            if name in metadata:
                raise FileProblem(f"has the key `{name}` twice")
            metadata[name] = header.value(header.number("<u4"))
            places[name] = start, header.position
        infos = [_info(header) for _ in range(tensors)]
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= ALIGNMENT_LIMIT or alignment & (alignment - 1):
            raise FileProblem(
                f"has the alignment {short(alignment, 20)}, expected a power of two up to {ALIGNMENT_LIMIT}"
            )
        start = -(-header.position // alignment) * alignment
        return GGUFFile(metadata, _placed(path, infos, start, alignment, size), places)


class _Header:
    """Reads values one after another, never past the end of the file or `HEADER_LIMIT`."""

    def __init__(self, file: BufferedReader, limit: int, size: int) -> None:
        self._file, self._limit, self._size = file, limit, size
        self.position = 0
        self._items = ITEM_LIMIT

    def take(self, count: int) -> bytes:
        if count > self._limit - self.position:
            where = "in a header of" if self._limit < self._size else "in a file of"
            raise FileProblem(f"needs {count:,} bytes at byte {self.position:,}, {where} at most {self._limit:,}")
        self.position += count
        data = self._file.read(count)
        if len(data) < count:
            raise FileProblem(f"ends inside its header, at byte {self.position - count + len(data):,}")
        return data

    def number(self, kind: str) -> Any:
        return np.frombuffer(self.take(np.dtype(kind).itemsize), kind)[0].item()

    def count(self, what: str, most: int) -> int:
        found: int = self.number("<u8")
        if found > most:
            raise FileProblem(f"declares {found:,} {what}")
        return found

    def text(self, limit: int = TEXT_LIMIT) -> str:
        length = int.from_bytes(self.take(8), "little")
        if length > limit:
            raise FileProblem(f"has a text of {length:,} bytes at byte {self.position:,}")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise FileProblem(f"has a text that is not UTF-8 at byte {self.position:,}") from None

    def name(self) -> str:
        found = self.text(NAME_LIMIT)
        if not found or not found.isprintable():
            raise FileProblem(f"has the name {found[:40]!r}")
        return found

    def value(self, kind: int) -> Any:
        if kind == TEXT:
            return self.text()
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind != ARRAY:
            raise FileProblem(f"has a value of the unknown type {kind}")
        items, count = self.number("<u4"), self.number("<u8")
        self._items -= count
        if self._items < 0:
            raise FileProblem(f"has arrays of more than {ITEM_LIMIT:,} items")
        if items == TEXT:
            return [self.text() for _ in range(count)]
        if items not in NUMBERS:
            raise FileProblem(f"has an array of the unsupported type {items}")
        return np.frombuffer(self.take(count * np.dtype(NUMBERS[items]).itemsize), NUMBERS[items]).tolist()


def _info(header: _Header) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape, type and offset of one tensor; its shape has the innermost dimension last."""
    name, rank = header.name(), header.number("<u4")
    if not 0 < rank <= RANK_LIMIT:
        raise FileProblem(f"has {rank} dimensions for tensor `{name}`")
    shape = tuple(header.number("<u8") for _ in range(rank))[::-1]
    if not all(shape) or prod(shape) > 1 << 48:
        raise FileProblem(f"has the shape {shape} for tensor `{name}`")
    return name, shape, header.number("<u4"), header.number("<u8")


def _placed(
    path: Path, infos: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int, size: int
) -> dict[str, GGUFTensor]:
    """The tensors by name; each lies inside the file, and none inside another."""
    tensors: dict[str, GGUFTensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name, shape, kind, offset in infos:
        if name in tensors:
            raise FileProblem(f"has the tensor `{name}` twice")
        if kind not in PLAIN and kind not in BLOCKS:
            raise UnsupportedInput(
                f"`{path.name}` has a tensor of the unsupported type {OTHERS.get(kind, kind)}: `{name}`",
                hint="give a file of another type, best the F16, BF16 or Q8_0 of the same model",
            )
        type_name, elements, width = _layout(kind)
        if shape[-1] % elements:
            raise FileProblem(f"has rows of {shape[-1]} elements for tensor `{name}`, no multiple of {elements}")
        rows, row_bytes = prod(shape[:-1]), shape[-1] // elements * width
        begin, end = start + offset, start + offset + rows * row_bytes
        if offset % alignment or end > size:
            raise FileProblem(f"has {size:,} bytes, and tensor `{name}` lies at {begin:,} to {end:,}")
        spans.append((begin, end, name))
        blocks = FileTensor(path, begin, BY_NAME["uint8"], (rows, row_bytes))
        values = FileTensor(path, begin, BY_NAME[PLAIN[kind][1]], shape) if kind in PLAIN else None
        tensors[name] = GGUFTensor(type_name, values or _dequantized(blocks, shape, BLOCKS[kind]), blocks)
    spans.sort()
    for (_, end, name), (begin, _, other) in zip(spans, spans[1:], strict=False):
        if begin < end:
            raise FileProblem(f"has overlapping tensors: `{name}` and `{other}`")
    return tensors


def _layout(kind: int) -> tuple[str, int, int]:
    """Name, and elements and bytes of a block of a type of tensors."""
    if kind in PLAIN:
        name, ours = PLAIN[kind]
        return name, 1, BY_NAME[ours].itemsize
    block = BLOCKS[kind]
    return block.name, block.elements, block.width


SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
"""Name of one part of a model in several files (llama.cpp `llama_split_path`)."""


def holds_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file, or a folder with one and without a `config.json`."""
    if not path.is_dir() or (path / "config.json").is_file():
        return path.is_file() and is_gguf(path)
    return any(file.suffix.lower() == ".gguf" and is_gguf(file) for file in path.iterdir())


def parts_of(path: Path) -> list[Path]:
    """The files of the model that a file belongs to, in order; MalformedInput if one is missing."""
    found = SPLIT.fullmatch(path.name)
    if found is None:
        return [path]
    count = int(found["count"])
    if not 0 < int(found["number"]) <= count:
        raise MalformedInput(f"`{path.name}` cannot be one of {count} parts", hint="name the file as it was named")
    parts = []
    for number in range(1, count + 1):
        parts.append(path.with_name(f"{found['stem']}-{number:05}-of-{count:05}.gguf"))
        if not parts[-1].is_file():
            raise MalformedInput(
                f"`{path.name}` is one of {count} parts, and `{parts[-1].name}` is not next to it",
                hint="download all parts into one folder",
            )
    return parts


# --- blocks -----------------------------------------------------------------------------------------------------------

# codes int8 [blocks, elements]; scales and, of some types, offsets float32 [blocks, parts], each for the same number of
# consecutive elements: value = scale * code + offset
Parts = tuple[Array, Array, Array | None]


@dataclass(frozen=True)
class Block:
    """One quantized type."""

    name: str  # llama.cpp's
    elements: int  # of a block
    width: int  # bytes of a block
    parts: Callable[[Array], Parts]  # of blocks, uint8 [blocks, width]

    def values(self, data: Array) -> Array:
        """The elements of blocks, uint8 [blocks, width] to float32 [blocks, elements]."""
        codes, scales, offsets = self.parts(data)
        values = scales[:, :, None] * codes.reshape(*scales.shape, -1).astype(np.float32)
        if offsets is not None:
            values += offsets[:, :, None]
        found: Array = values.reshape(len(data), -1)
        return found


def _dequantized(blocks: FileTensor, shape: tuple[int, ...], kind: Block) -> LazyTensor:
    rows = prod(shape[1:-1])  # of the file per row of dim 0

    def load(start: int, stop: int) -> Array:
        first, last = (0, 1) if len(shape) == 1 else (start * rows, stop * rows)
        with np.errstate(over="ignore", invalid="ignore"):  # scales that are infinite
            values = kind.values(blocks.rows(first, last).reshape(-1, kind.width))
        if len(shape) == 1:
            return values.reshape(-1)[start:stop]
        return np.ascontiguousarray(values.reshape(stop - start, *shape[1:]))

    return LazyTensor(BY_NAME["float32"], shape, load)


def _half(data: Array) -> Array:
    """A column of float16, [blocks, 2] bytes to float32 [blocks, 1]."""
    return np.ascontiguousarray(data).view("<f2").astype(np.float32)


def _nibbles(data: Array, group: int) -> Array:
    """4-bit codes [blocks, 2 x bytes]: of each `group` bytes the low halves, then the high halves."""
    parts = data.reshape(len(data), -1, 1, group) >> np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)
    parts &= np.uint8(15)
    return parts.reshape(len(data), -1)


def _pairs(data: Array, group: int) -> Array:
    """2-bit codes [blocks, 4 x bytes]: of each `group` bytes the lowest two bits, and so on."""
    parts = data.reshape(len(data), -1, 1, group) >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    return (parts & np.uint8(3)).reshape(len(data), -1)


def _bits(data: Array) -> Array:
    """Single bits [blocks, 32] of a uint32 of 4 bytes, the lowest first."""
    return np.unpackbits(np.ascontiguousarray(data), axis=1, bitorder="little")


def _planes(data: Array) -> Array:
    """Bits [blocks, 256] of 32 bytes: the lowest of each byte, then the next ones."""
    return (data[:, None] >> np.arange(8, dtype=np.uint8)[None, :, None] & np.uint8(1)).reshape(len(data), -1)


def _less(codes: Array, middle: int) -> Array:
    """int8 in the memory of new `codes` where these are uint8."""
    found = codes.astype(np.uint8, copy=False).view(np.int8)
    found -= np.int8(middle)
    return found


def _q4_0(data: Array) -> Parts:
    return _less(_nibbles(data[:, 2:], 16), 8), _half(data[:, :2]), None


def _q4_1(data: Array) -> Parts:
    return _less(_nibbles(data[:, 4:], 16), 0), _half(data[:, :2]), _half(data[:, 2:4])


def _q5_0(data: Array) -> Parts:
    return _less(_nibbles(data[:, 6:], 16) | _bits(data[:, 2:6]) << 4, 16), _half(data[:, :2]), None


def _q5_1(data: Array) -> Parts:
    return _less(_nibbles(data[:, 8:], 16) | _bits(data[:, 4:8]) << 4, 0), _half(data[:, :2]), _half(data[:, 2:4])


def _q8_0(data: Array) -> Parts:
    return data[:, 2:].view(np.int8), _half(data[:, :2]), None


def _q2_k(data: Array) -> Parts:
    scale, least = _half(data[:, 80:82]), _half(data[:, 82:84])
    offsets = -(least * (data[:, :16] >> 4).astype(np.float32))
    return _less(_pairs(data[:, 16:80], 32), 0), scale * (data[:, :16] & 15).astype(np.float32), offsets


def _q3_k(data: Array) -> Parts:
    low, high = _nibbles(data[:, 96:104], 8), _pairs(data[:, 104:108], 4)
    scales = _half(data[:, 108:110]) * _less(low | high << 4, 32).astype(np.float32)
    codes = _pairs(data[:, 32:96], 32) | _planes(data[:, :32]) << 2  # without the high bit, a code is 4 less
    return _less(codes, 4), scales, None


def _six_bits(data: Array) -> tuple[Array, Array]:
    """Eight scales and eight minima of 6 bits in 12 bytes, float32 [blocks, 8] each (`get_scale_min_k4`)."""
    low, middle, high = data[:, :4], data[:, 4:8], data[:, 8:]
    scales = np.concatenate([low & 63, high & 15 | low >> 2 & 48], axis=1)
    minima = np.concatenate([middle & 63, high >> 4 | middle >> 2 & 48], axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _q4_k(data: Array) -> Parts:
    scales, minima = _six_bits(data[:, 4:16])
    return _less(_nibbles(data[:, 16:], 32), 0), _half(data[:, :2]) * scales, -(_half(data[:, 2:4]) * minima)


def _q5_k(data: Array) -> Parts:
    scales, minima = _six_bits(data[:, 4:16])
    codes = _nibbles(data[:, 48:], 32) | _planes(data[:, 16:48]) << 4
    return _less(codes, 0), _half(data[:, :2]) * scales, -(_half(data[:, 2:4]) * minima)


def _q6_k(data: Array) -> Parts:
    low, high = _nibbles(data[:, :128], 64), _pairs(data[:, 128:192], 32)
    scales = _half(data[:, 208:210]) * data[:, 192:208].view(np.int8).astype(np.float32)
    return _less(low | high << 4, 32), scales, None


NONLINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)  # twice the values


def _iq4_nl(data: Array) -> Parts:
    return NONLINEAR[_nibbles(data[:, 2:], 16)], _half(data[:, :2]), None


def _iq4_xs(data: Array) -> Parts:
    high = np.ascontiguousarray(data[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16)[None, :] & 3
    scales = _half(data[:, :2]) * _less(_nibbles(data[:, 4:8], 1) | high.astype(np.uint8) << 4, 32).astype(np.float32)
    return NONLINEAR[_nibbles(data[:, 8:], 16)], scales, None


def _mxfp4(data: Array) -> Parts:
    exponent = data[:, :1].astype(np.uint32)
    halved = np.where(exponent < 2, np.uint32(0x200000) << exponent, exponent - 1 << 23)  # half of E8M0's power of two
    return E2M1[_nibbles(data[:, 1:], 16)], halved.astype(np.uint32).view(np.float32), None


def _tq1_0(data: Array) -> Parts:
    """Five digits of base 3 per byte: those of 32, then of 16 bytes, then four of each of the last four bytes."""
    powers = np.array([1, 3, 9, 27, 81], np.uint8)
    parts = [
        (data[:, None, first:last] * powers[None, :count, None]).reshape(len(data), -1)
        for first, last, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4))
    ]
    return _less(np.concatenate(parts, axis=1).astype(np.uint16) * 3 >> 8, 1), _half(data[:, 52:54]), None


def _tq2_0(data: Array) -> Parts:
    return _less(_pairs(data[:, :64], 32), 1), _half(data[:, 64:66]), None


BLOCKS: Mapping[int, Block] = {
    2: Block("Q4_0", 32, 18, _q4_0),
    3: Block("Q4_1", 32, 20, _q4_1),
    6: Block("Q5_0", 32, 22, _q5_0),
    7: Block("Q5_1", 32, 24, _q5_1),
    8: Block("Q8_0", 32, 34, _q8_0),
    10: Block("Q2_K", 256, 84, _q2_k),
    11: Block("Q3_K", 256, 110, _q3_k),
    12: Block("Q4_K", 256, 144, _q4_k),
    13: Block("Q5_K", 256, 176, _q5_k),
    14: Block("Q6_K", 256, 210, _q6_k),
    20: Block("IQ4_NL", 32, 18, _iq4_nl),
    23: Block("IQ4_XS", 256, 136, _iq4_xs),
    34: Block("TQ1_0", 256, 54, _tq1_0),
    35: Block("TQ2_0", 256, 66, _tq2_0),
    39: Block("MXFP4", 32, 17, _mxfp4),
}
"""Types in blocks, by their number in a file."""

OTHERS = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    29: "IQ1_M",
    40: "NVFP4",
    41: "Q1_0",
}
"""Names of types that are not read."""
