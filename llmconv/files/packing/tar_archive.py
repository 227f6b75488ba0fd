"""Reads the only file of a tar archive as a stream; nothing is extracted under a name from the archive.

Layout (POSIX `pax`, ustar interchange format; GNU tar `tar.h`): 512-byte headers, each before its data, padded to 512;
zeros at the end. Composer's archives contain `composer_states.pt`, after a folder whose name is empty.
`tarfile.open` does not suffice: it treats a damaged or missing header as the end of the archive, ignores trailing
bytes, reads pax headers of any size into memory, and takes an invalid pax size as 0.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import BinaryIO

from llmconv.errors import MalformedInput, UnsupportedInput

RECORD = 512
BLOCK = 1 << 20
HEADER_LIMIT = 1000
EXTENDED_LIMIT = 1 << 20
"""Bytes of the data of an extended header, such as a long name."""

EXTENDED = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
NAMES = (tarfile.GNUTYPE_LONGNAME, tarfile.XGLTYPE)
PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)


def is_tar(head: bytes) -> bool:
    """Whether `head`, the first bytes of a file, is the header of a tar archive (its checksum decides)."""
    try:
        tarfile.TarInfo.frombuf(head[:RECORD], "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError):
        return False
    return True


class TarArchive:
    """A tar archive, read once from start to end.

    Args:
        head: the first record, already read.
        stream: the rest.
        name: of the archive, for messages.
    """

    def __init__(self, head: bytes, stream: BinaryIO, name: str) -> None:
        self._record: bytes | None = head
        self._stream = stream
        self._name = name
        self._headers = 0

    def only_file(self) -> tuple[int, Iterator[bytes]]:
        """The size of the only file in the archive, and its content in blocks, to be read to the end.

        Raises:
            UnsupportedInput: several files, or none; the content raises it, too.
            MalformedInput: truncated, damaged, a link or device, or a name that leads out of the folder.
        """
        size = self._next_file()
        if size is None:
            raise UnsupportedInput(f"the archive `{self._name}` contains no file", hint="give another checkpoint")
        return size, self._content(size)

    def _content(self, size: int) -> Iterator[bytes]:
        left = size
        while left:
            block = self._stream.read(min(left, BLOCK))
            if not block:
                raise self._malformed("is truncated")
            left -= len(block)
            yield block
        self._read(-size % RECORD)
        if self._next_file() is not None:
            raise UnsupportedInput(
                f"the archive `{self._name}` contains several files",
                hint=f"unpack it with `tar -xf {self._name}` and give the checkpoint inside",
            )

    def _next_file(self) -> int | None:
        """Skips to the data of the next file and returns its size; None at the end of the archive."""
        size: int | None = None
        while (record := self._take()).strip(b"\0"):
            header = self._parse(record)
            if header.type in EXTENDED:
                size = self._extended_size(self._small(header))
            elif header.type in NAMES:
                self._small(header)
            elif header.type in PLAIN:
                return header.size if size is None else size
            elif header.type != tarfile.DIRTYPE:
                raise self._malformed(f"contains `{header.name[:80]}`, which is a link, a device or a sparse file")
            else:
                size = None
        self._read_zeros()
        return None

    def _parse(self, record: bytes) -> tarfile.TarInfo:
        self._headers += 1
        try:
            header = tarfile.TarInfo.frombuf(record, "utf-8", "surrogateescape")
        except (tarfile.HeaderError, ValueError) as error:
            raise self._malformed("has a damaged header") from error
        if header.size < 0 or self._headers > HEADER_LIMIT:
            raise self._malformed("has a damaged header, or far too many headers")
        self._check_name(header.name)
        return header

    def _check_name(self, name: str) -> None:
        if name.startswith("/") or "\\" in name or ".." in PurePosixPath(name).parts:
            raise self._malformed(f"contains {name[:80]!r}, a name that leads out of the folder")

    def _small(self, header: tarfile.TarInfo) -> bytes:
        """The data of a header that describes the next one."""
        if header.size > EXTENDED_LIMIT:
            raise self._malformed(f"has a header of {header.size} bytes")
        data = self._read(header.size)
        self._read(-header.size % RECORD)
        if header.type == tarfile.GNUTYPE_LONGNAME:
            self._check_name(data.rstrip(b"\0").decode("utf-8", "surrogateescape"))
        return data

    def _extended_size(self, data: bytes) -> int | None:
        """The `size` of a pax header, of records `LENGTH KEY=VALUE` and a newline, LENGTH counting all of it."""
        size = None
        while data:
            digits, _, rest = data.partition(b" ")
            length = int(digits) if digits.isdigit() and len(digits) < 8 else 0
            key, _, value = data[len(digits) + 1 : length - 1].partition(b"=")
            if not rest or not len(digits) + 3 < length <= len(data):
                raise self._malformed("has a damaged header")
            if key.startswith(b"GNU.sparse"):
                raise self._malformed("contains a sparse file")
            if key == b"path":
                self._check_name(value.decode("utf-8", "surrogateescape"))
            if key == b"size":
                if not value.isdigit() or len(value) > 18:
                    raise self._malformed("has a damaged header")
                size = int(value)
            data = data[length:]
        return size

    def _take(self) -> bytes:
        record, self._record = self._record, None
        return self._read(RECORD) if record is None else record

    def _read(self, count: int) -> bytes:
        data = self._stream.read(count)
        if len(data) < count:
            raise self._malformed("is truncated")
        return data

    def _read_zeros(self) -> None:
        while block := self._stream.read(BLOCK):
            if block.strip(b"\0"):
                raise self._malformed("has bytes after its end")

    def _malformed(self, problem: str) -> MalformedInput:
        return MalformedInput(
            f"the archive `{self._name}` {problem}", hint="it should contain one checkpoint file; copy or pack it again"
        )
