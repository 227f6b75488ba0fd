"""Streaming: one file written piece by piece, while later rows are computed and earlier ones are hashed.

A bounded number of row blocks is in flight, so memory follows the block size and not the model.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any

from llmconv.background import LOOK_AHEAD, BackgroundQueue, prefetch
from llmconv.files.system_calls import flush_data
from llmconv.output.plan import Shard
from llmconv.tensors import LazyTensor, Piece, as_bytes

FLUSH_BYTES = 32 << 20
"""The disk starts on what is written after so many bytes, so that the last fsync has little left to wait for."""

WRITE_BYTES = 256 << 10
"""Bytes per system call: with 4 MB the kernel makes huge pages for the cache, which takes three times as long."""

FALLOC_FL_KEEP_SIZE = 1
"""The file is as long as what was written (`linux/falloc.h`)."""


@dataclass
class _Sums:
    """The sha256 of all bytes that passed, and the CRC-32 of each tensor's, unless `crcs` is empty."""

    crcs: list[int]
    sha256: Any = field(default_factory=hashlib.sha256)

    def add(self, number: int | None, block: memoryview) -> None:
        """Takes the next bytes, which belong to tensor `number` if to any."""
        self.sha256.update(block)
        if number is not None and self.crcs:
            self.crcs[number] = zlib.crc32(block, self.crcs[number])


def stream_shard(file: IO[bytes], shard: Shard, advance: Callable[[int], None]) -> dict[str, Any]:
    """Writes one file; it is on the disk when this returns.

    Args:
        file: new and empty, open for writing without a buffer.
        shard: its tensors, and the container that they are put in.
        advance: called with the number of bytes of each block written.

    Returns:
        The manifest entry: bytes and sha256.
    """
    pieces = list(shard.container(shard.tensors))
    sums = _Sums([0] * len(shard.tensors) if any(callable(piece) for piece in pieces) else [])
    size = flushed = 0
    with BackgroundQueue(LOOK_AHEAD) as hashing, BackgroundQueue(1) as flushing:
        _allocate(file.fileno(), sum(tensor.nbytes for tensor in shard.tensors.values()))
        for number, content in prefetch((partial(_content, *block) for block in _blocks(pieces)), LOOK_AHEAD):
            if callable(content):
                hashing.finish()
            block = memoryview(content(sums.crcs)) if callable(content) else content
            hashing.submit(sums.add, number, block)
            write_fully(file.fileno(), block)
            advance(len(block))
            size += len(block)
            if size - flushed > FLUSH_BYTES and flushing.is_idle():
                flushing.submit(flush_data, file.fileno())
                flushed = size
        hashing.finish()
        flushing.finish()
        os.ftruncate(file.fileno(), size)  # gives back what XFS reserves behind the end of a file made so
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": sums.sha256.hexdigest()}


def _allocate(fd: int, size: int) -> None:
    """Reserves the blocks at once where the filesystem can (`fallocate(2)`): ext4 then works a fifth less."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "fallocate"):
        libc.fallocate(fd, FALLOC_FL_KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(size))


Content = tuple[int | None, memoryview | Callable[[Sequence[int]], bytes]]
"""The number of the tensor that the bytes belong to, and the bytes, or what gives them."""


def _blocks(pieces: Sequence[Piece]) -> Iterator[tuple[int | None, Piece, int, int]]:
    """The tensors by blocks of rows, numbered; the other pieces as they are."""
    number = -1
    for piece in pieces:
        if not isinstance(piece, LazyTensor):
            yield None, piece, 0, 0
            continue
        number += 1
        for start, stop in piece.blocks() if piece.nbytes else ():
            yield number, piece, start, stop


def _content(number: int | None, piece: Piece, start: int, stop: int) -> Content:
    if not isinstance(piece, LazyTensor):
        return number, piece if callable(piece) else memoryview(piece)
    rows = piece.rows(start, stop)
    assert rows.dtype == piece.dtype.numpy and rows.nbytes * piece.num_rows == piece.nbytes * (stop - start)
    return number, as_bytes(rows)


def write_fully(fd: int, block: memoryview) -> None:
    """Writes all of `block`, whatever the short writes."""
    while block:
        block = block[os.write(fd, block[:WRITE_BYTES]) :]
