"""Reading the files of an exact delta: the index is fully checked, frames are unpacked when their rows are read."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import zstandard

from llmconv.convert.deltas.exact_format import END, INDEX_LIMIT, MAGIC, NEW_ROW_LIMIT, TAIL
from llmconv.convert.deltas.ulp_difference import can_predict, from_planes, known_rows, predicted_rows, with_differences
from llmconv.errors import InputRefused, MalformedInput
from llmconv.files.checksums import ChecksummedRange, combine, crc32
from llmconv.files.safetensors_file import NAME_LIMIT, RANK_LIMIT, FileTensor
from llmconv.files.source_file import open_source, read_into
from llmconv.tensors import BLOCK_BYTES, BY_NAME, Array, DType, LazyTensor, as_bytes

BLOCK_LIMIT, BLOCK_LEAST = 16 * BLOCK_BYTES, BLOCK_BYTES // 4
"""Sizes of a block, which is held in memory; only blocks of one row may be larger, and of all rows smaller."""

SKIPPED = struct.Struct("<II")


OtherBase = Callable[[str], InputRefused]


def _other_base(problem: str) -> InputRefused:
    return InputRefused(
        f"the base is not the one that the delta was made from: {problem}",
        hint="give the model that it was extracted from",
    )


def _has_other_values(name: str) -> str:
    return f"`{name}` has other values"


@dataclass(frozen=True)
class BaseTensor:
    """The base's tensor that a difference is taken from: its name, and its expected dtype, shape and sha256."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Some rows of a tensor: position and size of their frame in bytes, CRC-32 of the tuned rows and of the base's."""

    position: int
    size: int
    crc: int
    base_crc: int


@dataclass(frozen=True)
class DeltaTensor:
    """One tensor in a delta file.

    Attributes:
        path: the file.
        dtype, shape: of the tuned tensor.
        rows: height of a block.
        blocks: its blocks, from the first row to the last.
        base: the tensor that the difference is taken from, None for zeros.
    """

    path: Path
    dtype: DType
    shape: tuple[int, ...]
    rows: int
    blocks: tuple[RowBlock, ...]
    base: BaseTensor | None

    def over(self, base: LazyTensor | None, other_base: OtherBase | None = None) -> LazyTensor:
        """The tuned tensor; if no row changed, the base's own tensor with its expected checksum.

        Args:
            base: the base's tensor named `self.base.name`.
            other_base: makes the error for a wrong base from a description of the problem.

        Raises (when rows are read):
            InputRefused: the base is not the one that the delta was made from.
            MalformedInput: a damaged frame, or a wrong checksum of the tuned rows.
        """
        refuse = other_base or _other_base
        if self.base and isinstance(base, FileTensor) and not base.record and self._keeps(base):
            refusal = partial(refuse, _has_other_values(self.base.name))
            record = ChecksummedRange(base.path, self.base.name, base.offset, base.nbytes, self._base_crc(), refusal)
            return FileTensor(base.path, base.offset, base.dtype, base.shape, record)
        return LazyTensor(self.dtype, self.shape, partial(self._load, base, refuse))

    def _keeps(self, base: LazyTensor) -> bool:
        """Whether there are rows, and all of them equal the base's."""
        with_differences = any(block.size or block.crc != block.base_crc for block in self.blocks)
        return bool(base.nbytes) and (self.dtype, self.shape) == (base.dtype, base.shape) and not with_differences

    def _base_crc(self) -> int:
        """CRC-32 of all rows of the base, which has as many."""
        row, height = prod(self.shape[1:]) * self.dtype.itemsize, self.shape[0] if self.shape else 1
        sizes = [min(self.rows, height - first) * row for first in range(0, height, self.rows)]
        blocks = zip((block.base_crc for block in self.blocks), sizes, strict=True)
        return reduce(lambda crc, block: combine(crc, *block), blocks, 0)

    def _load(self, base: LazyTensor | None, other_base: OtherBase, start: int, stop: int) -> Array:
        parts = []
        for number in range(start // self.rows, -(-stop // self.rows)):
            first = number * self.rows
            last = min(first + self.rows, self.shape[0] if self.shape else 1)
            known = known_rows(base, first, last)
            if known is not None and self.base and crc32(as_bytes(known)) != self.blocks[number].base_crc:
                raise other_base(_has_other_values(self.base.name))
            block = self._restored(self.blocks[number], known, (last - first, *self.shape[1:]))
            parts.append(block[max(0, start - first) : stop - first])
        if not parts:
            return np.empty((0, *self.shape[1:]), self.dtype.numpy)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _restored(self, block: RowBlock, known: Array | None, shape: tuple[int, ...]) -> Array:
        rows = predicted_rows(known, self.dtype, shape)
        if block.size:
            content = self._unpacked(block.position, block.size, prod(shape) * self.dtype.itemsize)
            rows = with_differences(rows, from_planes(content, self.dtype.itemsize))
        crc = block.base_crc if rows is known else crc32(as_bytes(rows))  # the base's rows are already checked
        if crc != block.crc:
            _refuse(self.path, "has a wrong checksum of the tuned rows")
        return rows

    def _unpacked(self, position: int, size: int, expected: int) -> bytes:
        frame = bytearray(size)
        read_into(self.path, memoryview(frame), position)
        try:
            if zstandard.frame_content_size(frame) != expected:
                _refuse(self.path, "has a frame of another size than its rows")
            return zstandard.ZstdDecompressor().decompress(frame)
        except zstandard.ZstdError as error:
            raise MalformedInput(
                f"`{self.path.name}` has a damaged frame: {error}", hint="copy the delta again"
            ) from error


def open_frames(path: Path) -> dict[str, DeltaTensor]:
    """The tensors of one file of an exact delta, in order; only its index is read.

    Raises:
        MalformedInput: the index is missing or inconsistent.
    """
    end, text = _index_text(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        _refuse(path, "has an index that is not valid JSON")
    entries = content.get("tensors") if isinstance(content, dict) else None
    if not isinstance(entries, dict):
        _refuse(path, "has an index without tensors")
    tensors: dict[str, DeltaTensor] = {}
    position = 0
    for name, entry in entries.items():
        if not isinstance(entry, dict) or not name or len(name) > NAME_LIMIT or not name.isprintable():
            _refuse(path, f"has an impossible entry for {name[:40]!r}")
        tensors[name] = _stored(path, name, entry, position)
        position += sum(block.size for block in tensors[name].blocks)
    if position != end:
        _refuse(path, f"describes {position} bytes of frames, it has {end}")
    return tensors


def _index_text(path: Path) -> tuple[int, bytes]:
    """The position of the index, and its JSON."""
    size = path.stat().st_size
    with open_source(path) as file:
        file.seek(max(0, size - END.size))
        last = file.read(END.size)
        length, tail = END.unpack(last) if len(last) == END.size else (0, b"")
        begin = size - END.size - length - SKIPPED.size
        if tail != TAIL or length > INDEX_LIMIT or begin < 0:
            _refuse(path, "has no index at its end")
        file.seek(begin)
        if SKIPPED.unpack(file.read(SKIPPED.size)) != (MAGIC, length + END.size):
            _refuse(path, "has no index at its end")
        return begin, file.read(length)


def _stored(path: Path, name: str, entry: Mapping[str, Any], position: int) -> DeltaTensor:
    dtype, shape = _kind(path, name, entry)
    rows, blocks, base = entry.get("rows"), entry.get("blocks"), entry.get("base")
    if not _natural(rows) or not rows or not isinstance(blocks, list):
        _refuse(path, f"has no blocks for `{name}`")
    row, height = prod(shape[1:]) * dtype.itemsize, shape[0] if shape else 1
    if (rows > 1 and rows * row > BLOCK_LIMIT) or (base is None and row > NEW_ROW_LIMIT):
        _refuse(path, f"has blocks of {rows} rows for `{name}`, which is too large")
    if rows < height and rows * max(1, row) < BLOCK_LEAST:
        _refuse(path, f"has blocks of {rows} rows for `{name}`, which is too small")
    count = -(-height // rows)
    known = all(isinstance(block, list) and len(block) == 3 and all(map(_natural, block)) for block in blocks)
    if not known or len(blocks) != count:
        _refuse(path, f"has {len(blocks)} blocks for `{name}`, its shape needs {count}")
    starts = accumulate((block[0] for block in blocks), initial=position)
    placed = tuple(RowBlock(start, *block) for start, block in zip(starts, blocks, strict=False))
    return DeltaTensor(path, dtype, shape, rows, placed, _source(path, name, base, dtype, shape))


def _source(path: Path, name: str, base: Any, dtype: DType, shape: tuple[int, ...]) -> BaseTensor | None:
    if base is None:
        return None
    if not isinstance(base, dict) or not isinstance(base.get("name"), str) or not isinstance(base.get("sha256"), str):
        _refuse(path, f"has an invalid base tensor for `{name}`")
    source = BaseTensor(base["name"], *_kind(path, base["name"], base), base["sha256"])
    if not can_predict(LazyTensor(source.dtype, source.shape, lambda start, stop: np.empty(0)), dtype, shape):
        _refuse(path, f"stores `{name}` as the difference from a tensor of another kind")
    return source


def _kind(path: Path, name: str, entry: Mapping[str, Any]) -> tuple[DType, tuple[int, ...]]:
    dtype, shape = entry.get("dtype"), entry.get("shape")
    if not isinstance(dtype, str) or dtype not in BY_NAME:
        _refuse(path, f"stores `{name[:NAME_LIMIT]}` as unknown dtype {str(dtype)[:40]!r}")
    if not isinstance(shape, list) or len(shape) > RANK_LIMIT or not all(map(_natural, shape)) or prod(shape) > 1 << 62:
        _refuse(path, f"gives `{name[:NAME_LIMIT]}` an impossible shape")
    return BY_NAME[dtype], tuple(shape)


def _natural(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _refuse(path: Path, problem: str) -> NoReturn:
    raise MalformedInput(f"`{path.name}` {problem}", hint="the delta is damaged; copy it again")
