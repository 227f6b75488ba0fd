"""Streams one file: while a block is written, later rows are computed and earlier ones hashed.

A bounded number of row blocks is in flight, so memory depends on the block size and not on the model.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from llmconv.background import LOOK_AHEAD, BackgroundQueue, prefetch
from llmconv.errors import LlmconvError, MalformedInput, OutputFailed
from llmconv.files.copying import copy_file, flush_data
from llmconv.files.safe_folder import FULL, NewFile
from llmconv.files.safetensors_file import FileTensor, holds
from llmconv.output.plan import Shard
from llmconv.tensors import LazyTensor, Piece, as_bytes

FLUSH_BYTES = 32 << 20  # written bytes are flushed in steps of this size, so that the last fsync has little left to do

WRITE_BYTES = 256 << 10
"""Bytes per system call: with 4 MB the kernel allocates huge pages in the cache, which takes three times as long."""

FALLOC_FL_KEEP_SIZE = 1  # reserves blocks without changing the length of the file (`linux/falloc.h`)


class ShardContent:
    """The bytes of one file in order; meanwhile later rows are computed, and earlier ones hashed, on other threads."""

    def __init__(self, shard: Shard) -> None:
        self.pieces = list(shard.container(shard.tensors))
        self.nbytes = shard.nbytes
        self._size = 0
        self._sha256 = hashlib.sha256()
        checked = any(callable(piece) for piece in self.pieces)
        self._crcs = [0] * len(shard.tensors) if checked else []

    def blocks(self) -> Generator[memoryview, None, None]:
        """All bytes of the file, to be taken once."""
        with BackgroundQueue(LOOK_AHEAD) as hashing:
            for number, content in prefetch((partial(_content, *block) for block in _blocks(self.pieces)), LOOK_AHEAD):
                if callable(content):
                    hashing.finish()
                block = memoryview(content(self._crcs)) if callable(content) else content
                hashing.submit(self._add, number, block)
                self._size += len(block)
                yield block
            hashing.finish()

    def _add(self, number: int | None, block: memoryview) -> None:
        """Adds the next bytes, which belong to tensor `number`, if any, to the checksums."""
        self._sha256.update(block)
        if number is not None and self._crcs:
            self._crcs[number] = zlib.crc32(block, self._crcs[number])

    @property
    def entry(self) -> dict[str, Any]:
        """The manifest entry: bytes and sha256 of the blocks that were taken."""
        return {"bytes": self._size, "sha256": self._sha256.hexdigest()}


def stream_shard(file: IO[bytes], shard: Shard, advance: Callable[[int], None]) -> dict[str, Any]:
    """Writes the new, unbuffered `file` durably, reporting bytes to `advance`; returns bytes and sha256."""
    content = ShardContent(shard)
    size = flushed = 0
    with BackgroundQueue(1) as flushing, closing(content.blocks()) as blocks:
        # reserves all blocks at once where the file system can (`fallocate(2)`): a fifth less work for ext4
        fd = file.fileno()
        libc = ctypes.CDLL(None)
        if hasattr(libc, "fallocate"):
            libc.fallocate(fd, FALLOC_FL_KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(content.nbytes))
        for block in blocks:
            write_fully(file.fileno(), block)
            advance(len(block))
            size += len(block)
            if size - flushed > FLUSH_BYTES and flushing.is_idle():
                flushing.submit(flush_data, file.fileno())
                flushed = size
        flushing.finish()
        os.ftruncate(file.fileno(), size)  # releases blocks that XFS reserves after the end
        os.fsync(file.fileno())
    return content.entry


NumberedBytes = tuple[int | None, memoryview | Callable[[Sequence[int]], bytes]]
"""The index of the tensor that the bytes belong to, and the bytes, or a function that returns them."""


def _blocks(pieces: Sequence[Piece]) -> Iterator[tuple[int | None, Piece, int, int]]:
    """The tensors in blocks of rows, numbered; other pieces unchanged."""
    number = -1
    for piece in pieces:
        if not isinstance(piece, LazyTensor):
            yield None, piece, 0, 0
            continue
        number += 1
        for start, stop in piece.blocks() if piece.nbytes else ():
            yield number, piece, start, stop


def _content(number: int | None, piece: Piece, start: int, stop: int) -> NumberedBytes:
    if not isinstance(piece, LazyTensor):
        return number, piece if callable(piece) else memoryview(piece)
    rows = piece.rows(start, stop)
    assert rows.dtype == piece.dtype.numpy and rows.nbytes * piece.num_rows == piece.nbytes * (stop - start)
    return number, as_bytes(rows)


def write_fully(fd: int, block: memoryview) -> None:
    """Writes all of `block`, in several calls if needed."""
    while block:
        block = block[os.write(fd, block[:WRITE_BYTES]) :]


def check_copy(path: Path, shard: Shard) -> None:
    """Registers the checksums of a copied or cloned file's tensors for comparison with the copy at `path`."""
    for tensor in shard.tensors.values():
        if isinstance(tensor, FileTensor) and tensor.record:
            replace(tensor.record, path=path).was_touched()


def copy_unchanged(new: NewFile, shard: Shard, advance: Callable[[int], None]) -> dict[str, Any]:
    """Copies a shard's source to `new`, reporting to `advance`; its entry; MalformedInput if the source changed."""
    assert shard.copy_of
    entry = copy_file(shard.copy_of, new.file, advance)
    require_unchanged(new.path, shard)
    return entry


def require_unchanged(path: Path, shard: Shard) -> None:
    """Raises MalformedInput if the copy, or the source, of an unchanged file no longer has the planned tensors."""
    assert shard.copy_of
    if not holds(path, shard.tensors):
        raise MalformedInput(
            f"`{shard.copy_of.name}` changed while it was copied",
            hint="make sure that nothing writes to it, and run again",
        )


@contextmanager
def failing_safely() -> Iterator[None]:
    """Turns an OSError into OutputFailed."""
    try:
        yield
    except LlmconvError:
        raise
    except OSError as error:
        full = "free some space and run again with `--resume`"
        other = "check the permissions of the file and its folder, and run again with `--resume`"
        raise OutputFailed(
            f"reading or writing failed: {error.strerror or error} ({error.filename or 'output'})",
            hint=full if error.errno in FULL else other,
        ) from error
