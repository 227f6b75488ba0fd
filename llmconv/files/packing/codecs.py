"""The compression formats of checkpoints: how each is detected and decoded, and the size that its headers declare.

Layouts: RFC 1952 (gzip), RFC 8878 (zstd), lz4 `doc/lz4_Frame_format.md`, xz `doc/xz-file-format.txt` and
`doc/lzma-file-format.txt`.
"""

from __future__ import annotations

import bz2
import lzma
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO, Protocol

HEAD = 32
"""Bytes that contain the part of a frame's header read here."""

DECODER_MEMORY = 512 << 20
"""Memory limit of an xz or lzma decoder; `xz -9` needs 65 MiB."""

INDEX_LIMIT = 1 << 20


class FrameDecoder(Protocol):
    """Decompresses one frame, with the interface of the standard library's `bz2` and `lzma` decompressors."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes | None: ...
    def decompress(self, data: bytes, max_length: int) -> bytes: ...


@dataclass(frozen=True)
class Codec:
    """One compression format.

    Attributes:
        name: for messages.
        magic: the first bytes of a frame.
        decoder: makes a decoder of one frame.
        frame_size: from the first `HEAD` bytes of a frame to its unpacked size; None if not declared.
        least: from a file and its size to the minimum unpacked size that it declares; 0 if none.
        fed: compressed bytes per call of the decoder.
        padded: whether zeros may follow a frame.
    """

    name: str
    magic: bytes
    decoder: Callable[[], FrameDecoder]
    frame_size: Callable[[bytes], int | None] = lambda head: None
    least: Callable[[BinaryIO, int], int] = lambda file, size: 0
    fed: int = 64 << 10
    padded: bool = False

    def begins(self, data: bytes) -> bool:
        """Whether `data` begins with a frame."""
        return data.startswith(self.magic) and (self.name != "lzma" or _is_lzma(data))

    def declared(self, file: BinaryIO) -> int:
        """The minimum unpacked size in bytes that the file declares."""
        size = os.fstat(file.fileno()).st_size
        file.seek(0)
        return max(self.frame_size(file.read(HEAD)) or 0, self.least(file, size))


class _Gzip:
    """Decodes one gzip member; zlib checks its CRC and length."""

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(31)

    @property
    def eof(self) -> bool:
        return self._inflate.eof

    @property
    def needs_input(self) -> bool:
        return not self._inflate.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._inflate.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._inflate.decompress(data or self._inflate.unconsumed_tail, max_length)


class _Zstd:
    """Decodes one zstd frame; ignores `max_length`, so input is limited: at worst 4 bytes unpack to 128 KiB."""

    needs_input = True

    def __init__(self) -> None:
        import zstandard  # noqa: PLC0415 - imported where it is needed

        self._error = zstandard.ZstdError
        self._decoder = zstandard.ZstdDecompressor().decompressobj()

    @property
    def eof(self) -> bool:
        return self._decoder.eof

    @property
    def unused_data(self) -> bytes:
        return self._decoder.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        try:
            return self._decoder.decompress(data) if data else b""
        except self._error as error:
            raise ValueError(error) from error


def _lz4() -> FrameDecoder:
    import lz4.frame  # noqa: PLC0415 - as above

    decoder: FrameDecoder = lz4.frame.LZ4FrameDecompressor()
    return decoder


def _gzip_size(file: BinaryIO, size: int) -> int:
    """The last four bytes: the length of the last member modulo 2^32."""
    file.seek(max(0, size - 4))
    return int.from_bytes(file.read(4), "little")


def _zstd_size(head: bytes) -> int | None:
    import zstandard  # noqa: PLC0415 - as above

    try:
        size = zstandard.frame_content_size(head)
    except zstandard.ZstdError:
        return None
    return None if size < 0 else size


def _lz4_size(head: bytes) -> int | None:
    """Bit 3 of the flags declares that eight bytes with the size follow."""
    return struct.unpack_from("<Q", head, 6)[0] if len(head) >= 14 and head[4] & 8 else None


def _lzma_size(head: bytes) -> int | None:
    size = int.from_bytes(head[5:13], "little")
    return None if size == (1 << 64) - 1 else size


def _is_lzma(head: bytes) -> bool:
    """The header has no magic number; its fields are checked instead, as the format description advises."""
    dictionary = int.from_bytes(head[1:5], "little")
    size = _lzma_size(head)
    return len(head) >= 13 and dictionary >= 4096 and dictionary.bit_count() <= 2 and (size is None or size < 1 << 48)


def _xz_size(file: BinaryIO, size: int) -> int:
    """The sum of sizes in the index of the last stream, as far as it is within `INDEX_LIMIT`."""
    file.seek(max(0, size - 12))
    footer = file.read(12)
    if len(footer) < 12 or footer[10:] != b"YZ":
        return 0
    length = (struct.unpack_from("<I", footer, 4)[0] + 1) * 4
    if length > size - 12:
        return 0
    file.seek(size - 12 - length)
    numbers = _multibyte(file.read(min(length, INDEX_LIMIT))[1:-4])
    count = next(numbers, 0)
    return sum(number for place, number in enumerate(numbers) if place % 2 and place < 2 * count)


def _multibyte(data: bytes) -> Iterator[int]:
    """Integers with seven bits per byte, the lowest first."""
    number = shift = 0
    for byte in data:
        number |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            yield number
            number = shift = 0


CODECS = (
    Codec("gzip", b"\x1f\x8b\x08", _Gzip, least=_gzip_size, padded=True),
    Codec("bzip2", b"BZh", bz2.BZ2Decompressor),
    Codec(
        "xz",
        b"\xfd7zXZ\x00",
        partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, DECODER_MEMORY),
        least=_xz_size,
        padded=True,
    ),
    Codec("lzma", b"\x5d\x00\x00", partial(lzma.LZMADecompressor, lzma.FORMAT_ALONE, DECODER_MEMORY), _lzma_size),
    Codec("lz4", b"\x04\x22\x4d\x18", _lz4, _lz4_size),
    Codec("zstd", b"\x28\xb5\x2f\xfd", _Zstd, _zstd_size, fed=1 << 10),
)
