"""Unpacks compressed files, detected by their first bytes, as streams.

Several frames may follow each other, as command line tools allow; any other bytes after the last one are refused.
The stream classes of the libraries do not suffice: `BZ2File` and `LZMAFile` ignore trailing bytes, zstd's reader ends
silently in a truncated frame, `GzipFile` accepts reserved flags and reads padding byte by byte.
"""

from __future__ import annotations

import io
import lzma
import os
import struct
import zlib
from collections.abc import Generator, Iterator
from typing import Any, BinaryIO

from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.files.packing.codecs import CODECS, HEAD, Codec

BLOCK = 1 << 20
"""Unpacked bytes per block, which bounds memory."""

SKIPPABLE = range(0x184D2A50, 0x184D2A60)
"""Magic numbers of frames that zstd and lz4 skip (`pzstd` begins with one)."""

LZOP_MAGIC = b"\x89LZO\x00\r\n\x1a\n"
LZ4_LEGACY_MAGIC = b"\x02\x21\x4c\x18"


def find_codec(file: BinaryIO, name: str) -> Codec | None:
    """The compression format of `file`, None if it is not compressed.

    Raises:
        UnsupportedInput: a format that has to be unpacked by hand.
    """
    file.seek(0)
    head = file.read(HEAD)
    for magic, kind, command in ((LZOP_MAGIC, "lzop", "lzop -d"), (LZ4_LEGACY_MAGIC, "lz4's legacy format", "lz4 -d")):
        if head.startswith(magic):
            raise UnsupportedInput(f"`{name}` is compressed with {kind}", hint=f"unpack it first: `{command} {name}`")
    for _ in range(16):
        if (length := _skippable(head)) is None:
            break
        file.seek(length - len(head), os.SEEK_CUR)
        head = file.read(HEAD)
    return next((codec for codec in CODECS if codec.begins(head)), None)


def open_stream(codec: Codec, file: BinaryIO, name: str) -> io.BufferedReader:
    """The unpacked bytes as a stream; reading raises MalformedInput if the file is damaged.

    Args:
        codec: from `find_codec`.
        file: the compressed file.
        name: of the file, for messages.
    """
    file.seek(0)
    return io.BufferedReader(_Stream(_unpacked_blocks(codec, file, name)), BLOCK)


def _skippable(head: bytes) -> int | None:
    """Length of the skippable frame that begins here, None if there is none."""
    if len(head) < 8:
        return None
    magic, length = struct.unpack_from("<2I", head)
    return 8 + int(length) if magic in SKIPPABLE else None


class _Stream(io.RawIOBase):
    """An iterator of blocks, presented as a file."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._rest = memoryview(block)
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def _unpacked_blocks(codec: Codec, file: BinaryIO, name: str) -> Iterator[bytes]:
    """The unpacked bytes of all frames; refuses any other bytes."""
    data = file.read(codec.fed)
    while data:
        while (length := _skippable(data)) is not None:
            file.seek(length - len(data), os.SEEK_CUR)
            data = file.read(codec.fed)
        if data and not codec.begins(data):
            raise _damaged(name, codec, f"has bytes after its end that are not {codec.name}")
        data = (yield from _frame(codec, file, data, name)) if data else b""
        data = _without_padding(file, data) if codec.padded else data
        if len(data) < HEAD:
            data += file.read(codec.fed)


def _frame(codec: Codec, file: BinaryIO, data: bytes, name: str) -> Generator[bytes, None, bytes]:
    """Yields the content of one frame; returns the compressed bytes read beyond it."""
    declared = codec.frame_size(data[:HEAD])
    decoder = codec.decoder()
    done = 0
    while not decoder.eof:
        fresh = data or (file.read(codec.fed) if decoder.needs_input else b"")
        ended = decoder.needs_input and not fresh
        try:
            block = decoder.decompress(fresh, BLOCK)
        except (zlib.error, lzma.LZMAError, OSError, EOFError, ValueError, RuntimeError) as error:
            raise _damaged(name, codec, f"cannot be unpacked: {error}") from error
        data = b""
        if ended and not block and not decoder.eof:
            raise _damaged(name, codec, "is truncated")
        done += len(block)
        if declared is not None and done > declared:
            raise _damaged(name, codec, f"declares {declared} bytes and contains more")
        yield block
    return decoder.unused_data or b""


def _without_padding(file: BinaryIO, data: bytes) -> bytes:
    while True:
        rest = data.lstrip(b"\0")
        if rest:
            return rest
        data = file.read(BLOCK)
        if not data:
            return b""


def _damaged(name: str, codec: Codec, problem: str) -> MalformedInput:
    return MalformedInput(
        f"`{name}` (compressed with {codec.name}) {problem}", hint="copy it again from its source, or unpack it by hand"
    )
