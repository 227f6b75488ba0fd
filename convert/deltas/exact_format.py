"""The file of an exact delta: zstd frames, one for each block of rows that changed, and last an index.

    frame, frame, …                       `zstd -d` unpacks them; the byte planes of `bits.moves`
    skippable frame (RFC 8878, 3.1.2)     0x184D2A5E, its size, the index as JSON, that one's size (8 bytes), `LLMDELTA`

The index: `{"tensors": {name: {dtype, shape, rows, blocks: [[bytes, crc32, crc32], …], base: {name, dtype, shape,
sha256}}}}`. `rows` is the height of a block; a block of 0 bytes is as in the base; the first CRC-32 is that of the
tuned rows, the second that of the rows of the base, 0 where it has none; `base` is null where a tensor is told from
zeros, and its sha256 is that of the whole tensor.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import zstandard

from llmconv.background import prefetch
from llmconv.convert.deltas.ulp_difference import guess_rows, known_rows, moves, planes
from llmconv.files.checksums import crc32
from llmconv.tensors import Array, LazyTensor, Piece, as_bytes

LEVEL = 1
"""What small moves leave to pack is noise: level 3 looks for repeats in it, takes four times as long and packs less."""

INDEX_LIMIT, TENSORS_LIMIT = 32 << 20, 40_000
"""Bytes of an index, which is read whole; tensors of a file that keep it far below them."""

NEW_ROW_LIMIT = 256 << 20
"""Bytes of a row (an expert of a fused weight) that the base does not have: a frame could unpack to anything."""

MAGIC, TAIL = 0x184D2A5E, b"LLMDELTA"
END = struct.Struct("<Q8s")


@dataclass(frozen=True)
class Told:
    """A tensor of the tuned model, and what of the base it is told from.

    Attributes:
        tensor: of the tuned model.
        name: of the base's tensor, empty where there is none.
        base: that tensor, which `tells_of` the other.
    """

    tensor: LazyTensor
    name: str = ""
    base: LazyTensor | None = None


def frame_pieces(told: Mapping[str, Told], tensors: Mapping[str, LazyTensor]) -> Iterator[Piece]:
    """A file with the `tensors`, told as `told` says: frames, computed ahead by several threads, then the index."""
    entries = {name: _Entry(told[name]) for name in tensors}
    spans = [(name, *span) for name in tensors for span in told[name].tensor.blocks()]
    blocks = prefetch(partial(_packed, told[name], start, stop) for name, start, stop in spans)
    for name, _, _ in spans:
        yield partial(_next_frame, entries[name], blocks)
    yield lambda crcs: _index(entries)


def _next_frame(entry: _Entry, blocks: Iterator[_Block], crcs: Sequence[int]) -> bytes:
    return entry.add(next(blocks))


@dataclass(frozen=True)
class _Block:
    """One block: the frame, empty where nothing changed; CRC-32 of tuned rows and base's rows; the latter, if any."""

    frame: bytes
    crcs: tuple[int, int]
    base: Array | None


class _Entry:
    """What the index will say of a tensor, while its blocks pass in order."""

    def __init__(self, told: Told) -> None:
        tensor, base = told.tensor, told.base
        height = next(tensor.blocks(), (0, 1))[1]
        known = {"name": told.name, "dtype": base.dtype.name, "shape": list(base.shape)} if base else None
        self.blocks: list[list[int]] = []
        self.digest = hashlib.sha256()
        self._base, self._rows = base, tensor.num_rows
        self._known = known
        self._content = {"dtype": tensor.dtype.name, "shape": list(tensor.shape), "rows": height, "base": None}

    def add(self, block: _Block) -> bytes:
        """Notes the next block and returns its frame."""
        self.blocks.append([len(block.frame), *block.crcs])
        if block.base is not None:
            self.digest.update(as_bytes(block.base))
        return block.frame

    def content(self) -> dict[str, Any]:
        """The entry, when all blocks have passed; the rows of the base that the tuned model lacks count, too."""
        if self._base is None:
            return {**self._content, "blocks": self.blocks}
        for start, stop in self._base.blocks():
            if stop > self._rows:
                self.digest.update(as_bytes(self._base.rows(max(start, self._rows), stop)))
        base = {**(self._known or {}), "sha256": self.digest.hexdigest()}
        return {**self._content, "base": base, "blocks": self.blocks}


def _packed(told: Told, start: int, stop: int) -> _Block:
    rows, known = told.tensor.rows(start, stop), known_rows(told.base, start, stop)
    guess = guess_rows(known, told.tensor.dtype, rows.shape)
    same = np.array_equal(rows.reshape(-1).view(np.uint8), guess.reshape(-1).view(np.uint8))
    crcs = crc32(as_bytes(rows)), crc32(as_bytes(known)) if known is not None else 0
    return _Block(b"" if same else _compress(planes(moves(rows, guess))), crcs, known)


def _compress(content: Array) -> bytes:
    return zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compress(content.data)


def _index(entries: Mapping[str, _Entry]) -> bytes:
    text = json.dumps({"tensors": {name: entry.content() for name, entry in entries.items()}}).encode()
    frame = text + END.pack(len(text), TAIL)
    return struct.pack("<II", MAGIC, len(frame)) + frame
