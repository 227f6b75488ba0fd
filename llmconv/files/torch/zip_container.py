"""The zip that `torch.save` writes, with every rule that its writer keeps: stored members, said twice, with CRC-32.

Layout (pytorch `caffe2/serialize/inline_container.cc`): STORED members under one folder: `data.pkl`, `data/KEY` (one
per storage), `byteorder`, `version`. It may lie inside a larger file, as in a distributed checkpoint.
"""

from __future__ import annotations

import io
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NoReturn

from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.files.checksums import Record

PICKLE_LIMIT = 256 << 20
MEMBER_LIMIT = 1_000_000
DIRECTORY_LIMIT = 256 << 20
BUFFER = 16 << 10
"""Bytes read at once: all of a small torch file; of a large one its directory and its pickle."""

LOCAL_HEADER = struct.Struct("<4s5H3L2H")
END, END_64 = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q4sLQL")
"""End of the zip; before it, in large files, the same in 64 bits and where that lies (APPNOTE.TXT, 4.3.14 to 16)."""

HAS_DESCRIPTOR, UTF8_NAME = 0x08, 0x800
DAMAGE = (zipfile.BadZipFile, EOFError, NotImplementedError, struct.error, ValueError)
"""What reading a damaged zip raises."""


class _Range(io.RawIOBase):
    """Bytes `start:start + size` of an open file, as a file of its own."""

    def __init__(self, fd: int, start: int, size: int) -> None:
        self.fd, self.start, self.size, self.position = fd, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        position = offset + (0, self.position, self.size)[whence]
        if position < 0:
            raise ValueError("a position before the start")
        self.position = position
        return position

    def readinto(self, buffer: Any) -> int:
        left = max(0, self.size - self.position)
        count = os.preadv(self.fd, [memoryview(buffer)[:left]], self.start + self.position) if left else 0
        self.position += count
        return count


def _part(fd: int, start: int, size: int) -> IO[bytes]:
    if size <= BUFFER:
        return io.BytesIO(os.pread(fd, size, start))
    return io.BufferedReader(_Range(fd, start, size), BUFFER)


def is_torch_zip(path: Path) -> bool:
    """Whether the file is a zip with a `data.pkl`; content decides."""
    found = path.stat()
    return _is_torch_zip(path, found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=32)
def _is_torch_zip(path: Path, _size: int, _changed: int) -> bool:
    """Kept, because every format asks."""
    try:
        with open(path, "rb") as file, _open_zip(file) as archive:
            return any(name.endswith("/data.pkl") for name in archive.namelist())
    except DAMAGE:
        return False


def read_torch_zip(path: Path, start: int, size: int) -> tuple[bytes, dict[str, Record]]:
    """The pickle of a torch file, and its storages by key, their positions those in `path`.

    Args:
        path: the file.
        start: where the zip begins in it.
        size: its bytes.

    Raises:
        UnsupportedInput: TorchScript, or written on a big-endian machine.
        MalformedInput: truncated, damaged, or a zip whose parts contradict each other.
    """
    with open(path, "rb", buffering=0) as whole, _part(whole.fileno(), start, size) as file:
        try:
            with _open_zip(file) as archive:
                members = _checked_members(path, archive, file, size)
        except DAMAGE as error:
            raise MalformedInput(
                f"`{path.name}` is truncated or damaged: {error}", hint="copy it again from where it was saved"
            ) from error
        pickle = _read_member(path, file, members, "data.pkl")
        if "byteorder" in members and _read_member(path, file, members, "byteorder") != b"little":
            raise UnsupportedInput(f"`{path.name}` is big-endian", hint="save it again on a little-endian machine")
    moved = {name: Record(path, name, start + one.start, one.size, one.crc) for name, one in members.items()}
    return pickle, {name.removeprefix("data/"): one for name, one in moved.items() if name.startswith("data/")}


def _open_zip(file: IO[bytes]) -> zipfile.ZipFile:
    """The zip in `file`, once its directory is known to lie at the end and to be of sane size.

    Raises:
        BadZipFile: it is not so.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - END_64.size - END.size))
    tail = file.read()
    magic, disk, _, _, count, length, start, comment = END.unpack(tail[-END.size :])
    large, end = tail[: -END.size], size - END.size
    if large.endswith(b"\x01\0\0\0") and large[-20:-16] == b"PK\x06\x07":
        found = END_64.unpack(large)
        count, length, start, end = found[7], found[8], found[9], end - END_64.size
        if found[0] != b"PK\x06\x06" or found[12] != end:
            raise zipfile.BadZipFile("the end of its directory is not where it should be")
    if magic != b"PK\x05\x06" or comment or disk:
        raise zipfile.BadZipFile("it does not end as a zip of torch ends")
    if length > DIRECTORY_LIMIT or start + length != end:
        raise zipfile.BadZipFile("bytes in front of it, or its directory is not where it should be")
    archive = zipfile.ZipFile(file)
    if len(archive.filelist) != count:
        raise zipfile.BadZipFile(f"its directory should have {count} members, and has {len(archive.filelist)}")
    return archive


def _read_member(path: Path, file: IO[bytes], members: Mapping[str, Record], name: str) -> bytes:
    if name not in members:
        _refuse(path, f"holds no `{name}`")
    record = members[name]
    if record.size > PICKLE_LIMIT:
        _refuse(path, f"has a `{name}` of {record.size} bytes, over the limit of {PICKLE_LIMIT}")
    file.seek(record.start)
    content = file.read(record.size)
    if record.crc is not None and zlib.crc32(content) != record.crc:
        _refuse(path, f"is damaged: `{name}` does not have the CRC-32 that it says")
    return content


def _checked_members(path: Path, archive: zipfile.ZipFile, file: IO[bytes], size: int) -> dict[str, Record]:
    """Members by name without the folder, their positions those in `file`."""
    infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
    prefix = infos[0].filename.partition("/")[0] + "/" if infos else ""
    if len(infos) > MEMBER_LIMIT or not infos or infos[0].header_offset != 0:
        _refuse(path, "is a zip with bytes in front, or without members")
    has_checksums = any(info.CRC for info in infos)
    members: dict[str, Record] = {}
    end = 0
    for info in infos:
        name = info.filename.removeprefix(prefix)
        if name == info.filename or name in members or not _is_plain(info):
            _refuse(path, f"has a doubled or misplaced member {info.filename[:80]!r}")
        if name == "constants.pkl" or name.startswith("code/"):
            raise UnsupportedInput(
                f"`{path.name}` is a TorchScript program, no checkpoint", hint="save the `state_dict()` instead"
            )
        file.seek(info.header_offset)
        start = info.header_offset + _check_local(path, info, file.read(LOCAL_HEADER.size + 4 * 1024))
        if info.header_offset < end or start + info.file_size > archive.start_dir or size < archive.start_dir:
            _refuse(path, f"has a member `{name}` that overlaps another or ends outside the file")
        end = start + info.file_size
        crc = info.CRC if has_checksums and info.file_size else None
        members[name] = Record(path, name, start, info.file_size, crc)
    return members


def _is_plain(info: zipfile.ZipInfo) -> bool:
    """Whether a member is a file below its folder, on the first disk, no link, and its name can be shown."""
    kind = stat.S_IFMT(info.external_attr >> 16)
    parts = info.filename.split("/")
    is_file = kind in (0, stat.S_IFREG) and not info.is_dir() and info.volume == 0
    return is_file and info.filename.isprintable() and not {"", ".", ".."} & {*parts} and "\\" not in info.filename


def _check_local(path: Path, info: zipfile.ZipInfo, header: bytes) -> int:
    """Length of the local header, which must say the same as the central directory."""
    magic, _, flags, method, _, _, crc, packed, unpacked, name_length, extra_length = LOCAL_HEADER.unpack_from(header)
    name = header[LOCAL_HEADER.size : LOCAL_HEADER.size + name_length]
    said = (packed, unpacked, crc)
    left_open = (0, 0xFFFFFFFF) if flags & HAS_DESCRIPTOR else (0xFFFFFFFF,)
    known = (info.compress_size, info.file_size, info.CRC)
    sizes_agree = all(one == other or one in left_open for one, other in zip(said, known, strict=True))
    if magic != b"PK\x03\x04" or name != info.orig_filename.encode() or flags != info.flag_bits or not sizes_agree:
        _refuse(path, f"describes member `{info.filename[:80]}` in two ways")
    if method or info.compress_type or info.file_size != info.compress_size or flags & ~(HAS_DESCRIPTOR | UTF8_NAME):
        _refuse(path, f"compresses or encrypts member `{info.filename[:80]}`, which torch never does")
    return int(LOCAL_HEADER.size + name_length + extra_length)


def _refuse(path: Path, problem: str) -> NoReturn:
    raise MalformedInput(f"`{path.name}` {problem}", hint="it was not written by `torch.save`, or was changed since")
