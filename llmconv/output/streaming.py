"""Streaming: one file written piece by piece, while later rows are computed and earlier ones are hashed.

A bounded number of row blocks is in flight, so memory follows the block size and not the model.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import IO, Any

from llmconv.files.system_calls import flush_data
from llmconv.output.background import Behind
from llmconv.output.plan import Shard
from llmconv.tensors import Array, LazyTensor, Piece, as_bytes

LOOK_AHEAD = 8
"""Row blocks in flight: enough for the cores, few enough to stay small."""

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
    with Behind(LOOK_AHEAD) as hashing, Behind(1) as flushing:
        _allocate(file.fileno(), sum(tensor.nbytes for tensor in shard.tensors.values()))
        for number, content in _contents(pieces):
            if callable(content):
                hashing.finish()
            block = memoryview(content(sums.crcs)) if callable(content) else content
            hashing.start(sums.add, number, block)
            write_fully(file.fileno(), block)
            advance(len(block))
            size += len(block)
            if size - flushed > FLUSH_BYTES and flushing.is_idle():
                flushing.start(flush_data, file.fileno())
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


def _contents(pieces: Sequence[Piece]) -> Iterator[Content]:
    """The bytes of a file in order; those of tensors computed ahead of the writer."""
    with ThreadPoolExecutor(os.cpu_count()) as readers:
        pending: deque[tuple[int | None, Future[Array] | Piece]] = deque()
        try:
            for number, piece, start, stop in _blocks(pieces):
                if isinstance(piece, LazyTensor):
                    read = readers.submit(copy_context().run, _checked_rows, piece, start, stop)
                    pending.append((number, read))
                else:
                    pending.append((number, piece))
                if len(pending) > LOOK_AHEAD:
                    yield _arrived(*pending.popleft())
            while pending:
                yield _arrived(*pending.popleft())
        finally:
            for _, waiting in pending:
                if isinstance(waiting, Future):
                    waiting.cancel()


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


def _arrived(number: int | None, later: Future[Array] | Piece) -> Content:
    if isinstance(later, Future):
        return number, as_bytes(later.result())
    assert not isinstance(later, LazyTensor)
    return number, later if callable(later) else memoryview(later)


def _checked_rows(tensor: LazyTensor, start: int, stop: int) -> Array:
    rows = tensor.rows(start, stop)
    assert rows.dtype == tensor.dtype.numpy and rows.nbytes * tensor.num_rows == tensor.nbytes * (stop - start)
    return rows


def write_fully(fd: int, block: memoryview) -> None:
    """Writes all of `block`, whatever the short writes."""
    while block:
        block = block[os.write(fd, block[:WRITE_BYTES]) :]
