"""Writing the file of an exact delta: a zstd frame for each block of rows that changed, and an index at the end.

    frame, frame, …                       `zstd -d` unpacks them; `ulp_difference.byte_planes`
    skippable frame (RFC 8878, 3.1.2)     0x184D2A5E, its size, the index as JSON, that one's size (8 bytes), `LLMDELTA`

The index: `{"tensors": {name: {dtype, shape, rows, blocks: [[bytes, crc32, crc32], …], base: {name, dtype, shape,
sha256}}}}`. `rows` is the height of a block; a block of 0 bytes equals the base; the first CRC-32 is that of the
tuned rows, the second that of the base's rows (0 if it has none); `base` is null for a difference from zeros, and its
sha256 is that of the whole tensor.
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
from llmconv.convert.deltas.ulp_difference import byte_planes, known_rows, predicted_rows, ulp_differences
from llmconv.files.checksums import crc32
from llmconv.tensors import Array, LazyTensor, Piece, as_bytes

LEVEL = 1
"""Small differences are mostly noise: level 3 searches it for repeats, takes four times as long and packs less."""

INDEX_LIMIT, TENSORS_LIMIT = 32 << 20, 40_000
"""Bytes of an index, which is read whole; tensors of a file, a number that keeps the index far smaller."""

NEW_ROW_LIMIT = 256 << 20
"""Bytes of a row (an expert of a fused weight) that the base does not have: a frame could unpack to anything."""

MAGIC, TAIL = 0x184D2A5E, b"LLMDELTA"
END = struct.Struct("<Q8s")


@dataclass(frozen=True)
class PredictedTensor:
    """A tensor of the tuned model, and the base's tensor that it is stored as a difference from.

    Attributes:
        tensor: of the tuned model.
        name: of the base's tensor, empty where there is none.
        base: that tensor, which `can_predict` the other.
    """

    tensor: LazyTensor
    name: str = ""
    base: LazyTensor | None = None


def frame_pieces(predicted: Mapping[str, PredictedTensor], tensors: Mapping[str, LazyTensor]) -> Iterator[Piece]:
    """The pieces of a file: frames, computed ahead by several threads, then the index.

    Args:
        predicted: all tensors of the delta by name.
        tensors: those of this file, in order.
    """
    entries = {name: _Entry(predicted[name]) for name in tensors}
    spans = [(name, *span) for name in tensors for span in predicted[name].tensor.blocks()]
    blocks = prefetch(partial(_packed, predicted[name], start, stop) for name, start, stop in spans)
    for name, _, _ in spans:
        yield partial(_next_frame, entries[name], blocks)
    yield lambda crcs: _index(entries)


def _next_frame(entry: _Entry, blocks: Iterator[_PackedBlock], crcs: Sequence[int]) -> bytes:
    return entry.add(next(blocks))


@dataclass(frozen=True)
class _PackedBlock:
    """One block: its frame, empty where nothing changed; CRC-32 of the tuned and the base's rows; the base's rows."""

    frame: bytes
    crcs: tuple[int, int]
    base: Array | None


class _Entry:
    """The index entry of a tensor, built while its blocks pass in order."""

    def __init__(self, predicted: PredictedTensor) -> None:
        tensor, base = predicted.tensor, predicted.base
        height = next(tensor.blocks(), (0, 1))[1]
        known = {"name": predicted.name, "dtype": base.dtype.name, "shape": list(base.shape)} if base else None
        self.blocks: list[list[int]] = []
        self.digest = hashlib.sha256()
        self._base, self._rows = base, tensor.num_rows
        self._known = known
        self._content = {"dtype": tensor.dtype.name, "shape": list(tensor.shape), "rows": height, "base": None}

    def add(self, block: _PackedBlock) -> bytes:
        """Records the next block and returns its frame."""
        self.blocks.append([len(block.frame), *block.crcs])
        if block.base is not None:
            self.digest.update(as_bytes(block.base))
        return block.frame

    def content(self) -> dict[str, Any]:
        """The entry, once all blocks have passed; its sha256 includes rows of the base that the tuned model lacks."""
        if self._base is None:
            return {**self._content, "blocks": self.blocks}
        for start, stop in self._base.blocks():
            if stop > self._rows:
                self.digest.update(as_bytes(self._base.rows(max(start, self._rows), stop)))
        base = {**(self._known or {}), "sha256": self.digest.hexdigest()}
        return {**self._content, "base": base, "blocks": self.blocks}


def _packed(predicted: PredictedTensor, start: int, stop: int) -> _PackedBlock:
    rows, known = predicted.tensor.rows(start, stop), known_rows(predicted.base, start, stop)
    guess = predicted_rows(known, predicted.tensor.dtype, rows.shape)
    same = np.array_equal(rows.reshape(-1).view(np.uint8), guess.reshape(-1).view(np.uint8))
    crcs = crc32(as_bytes(rows)), crc32(as_bytes(known)) if known is not None else 0
    return _PackedBlock(b"" if same else _compress(byte_planes(ulp_differences(rows, guess))), crcs, known)


def _compress(content: Array) -> bytes:
    return zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compress(content.data)


def _index(entries: Mapping[str, _Entry]) -> bytes:
    text = json.dumps({"tensors": {name: entry.content() for name, entry in entries.items()}}).encode()
    frame = text + END.pack(len(text), TAIL)
    return struct.pack("<II", MAGIC, len(frame)) + frame
