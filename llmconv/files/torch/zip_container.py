"""Reads the zip that `torch.save` writes, and checks every rule of its writer: members stored, both headers equal.

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
from typing import IO, Any

from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.files.checksums import ChecksummedRange
from llmconv.files.file_problem import FileProblem, naming
from llmconv.files.source_file import is_mirrored, open_source

PICKLE_LIMIT = 256 << 20
MEMBER_LIMIT = 1_000_000
DIRECTORY_LIMIT = 256 << 20
BUFFER = 16 << 10
"""Bytes per read: enough for all of a small torch file."""

LOCAL_HEADER = struct.Struct("<4s5H3L2H")
END, END_64 = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q4sLQL")
"""The end record, and the zip64 end record with its locator, which large files have before it (APPNOTE 4.3.14-16)."""

ALIGNMENT = 64
"""Of the data of each member, in every version of torch."""

PADDING = b"FB"
"""Id of the extra field by which torch pads local headers."""

UINT32_MAX = 0xFFFFFFFF
HAS_DESCRIPTOR, UTF8_NAME = 0x08, 0x800
DAMAGE = (zipfile.BadZipFile, EOFError, NotImplementedError, struct.error, ValueError)
"""Exceptions that reading a damaged zip raises."""

NOT_BY_TORCH = "it was not written by `torch.save`, or was changed since"


class _FileSlice(io.RawIOBase):
    """Bytes `start:start + size` of an open file, presented as a file."""

    def __init__(self, file: IO[bytes], start: int, size: int) -> None:
        self.file, self.start, self.size, self.position = file, start, size, 0

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
        self.file.seek(self.start + self.position)
        found = self.file.read(min(len(buffer), left))
        buffer[: len(found)] = found
        self.position += len(found)
        return len(found)


def _slice(file: IO[bytes], start: int, size: int) -> IO[bytes]:
    if size <= BUFFER:
        file.seek(start)
        return io.BytesIO(file.read(size))
    return io.BufferedReader(_FileSlice(file, start, size), BUFFER)


def is_torch_zip(path: Path) -> bool:
    """Whether the file is a zip with a `data.pkl`; content decides."""
    found = path.stat()
    return _is_torch_zip(path, found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=32)
def _is_torch_zip(path: Path, _size: int, _changed: int) -> bool:
    """Cached, because every format asks."""
    try:
        with open_source(path) as file, _open_zip(file) as archive:
            return any(name.endswith("/data.pkl") for name in archive.namelist())
    except DAMAGE:
        return False


def read_torch_zip(path: Path, start: int, size: int) -> tuple[bytes, dict[str, ChecksummedRange]]:
    """Returns the pickle of a torch file and its storages by key, with positions in `path`.

    Args:
        path: the file.
        start: position of the zip in the file.
        size: bytes of the zip.

    Raises:
        UnsupportedInput: TorchScript, or written on a big-endian machine.
        MalformedInput: truncated, damaged, or a zip whose parts contradict each other.
    """
    with (
        naming(f"`{path.name}`", NOT_BY_TORCH),
        open_source(path) as whole,
        _slice(whole, start, size) as file,
    ):
        try:
            with _open_zip(file) as archive:
                members = _checked_members(path, archive, file, size, far=is_mirrored(path))
        except DAMAGE as error:
            raise MalformedInput(
                f"`{path.name}` is truncated or damaged: {error}", hint="copy it again from where it was saved"
            ) from error
        pickle = _read_member(file, members, "data.pkl")
        if "byteorder" in members and _read_member(file, members, "byteorder") != b"little":
            raise UnsupportedInput(f"`{path.name}` is big-endian", hint="save it again on a little-endian machine")
    moved = {name: ChecksummedRange(path, name, start + one.start, one.size, one.crc) for name, one in members.items()}
    return pickle, {name.removeprefix("data/"): one for name, one in moved.items() if name.startswith("data/")}


def _open_zip(file: IO[bytes]) -> zipfile.ZipFile:
    """Opens the zip in `file`; its directory must be at the end and within `DIRECTORY_LIMIT`.

    Raises:
        BadZipFile: it is not.
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
            raise zipfile.BadZipFile("the zip64 end record is misplaced")
    if magic != b"PK\x05\x06" or comment or disk:
        raise zipfile.BadZipFile("its end is not that of a zip file")
    if length > DIRECTORY_LIMIT or start + length != end:
        raise zipfile.BadZipFile("there are bytes before it, or its directory is misplaced")
    archive = zipfile.ZipFile(file)
    if len(archive.filelist) != count:
        raise zipfile.BadZipFile(f"its directory declares {count} members and lists {len(archive.filelist)}")
    return archive


def _read_member(file: IO[bytes], members: Mapping[str, ChecksummedRange], name: str) -> bytes:
    if name not in members:
        raise FileProblem(f"contains no `{name}`")
    record = members[name]
    if record.size > PICKLE_LIMIT:
        raise FileProblem(f"has a `{name}` of {record.size} bytes, over the limit of {PICKLE_LIMIT}")
    file.seek(record.start)
    content = file.read(record.size)
    if record.crc is not None and zlib.crc32(content) != record.crc:
        raise FileProblem(f"is damaged: CRC-32 mismatch in `{name}`")
    return content


def _checked_members(
    path: Path, archive: zipfile.ZipFile, file: IO[bytes], size: int, *, far: bool
) -> dict[str, ChecksummedRange]:
    """Members by name without the folder, with positions in `file`.

    With `far`, each local header of a storage would be a request: if the first was padded as torch does it, so are the
    others, which their CRC-32 confirms when they are read.
    """
    infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
    prefix = infos[0].filename.partition("/")[0] + "/" if infos else ""
    if len(infos) > MEMBER_LIMIT or not infos or infos[0].header_offset != 0:
        raise FileProblem("is a zip with bytes before its first member, or without members")
    has_checksums = any(info.CRC for info in infos)
    members: dict[str, ChecksummedRange] = {}
    end, usual = 0, None if far else False
    for info in infos:
        name = info.filename.removeprefix(prefix)
        if not _is_stored(info):
            raise _not_stored(info)
        if name == info.filename or name in members or not _is_plain(info):
            raise FileProblem(f"has a duplicate or misplaced member {info.filename[:80]!r}")
        if name == "constants.pkl" or name.startswith("code/"):
            raise UnsupportedInput(
                f"`{path.name}` is a TorchScript program, not a checkpoint", hint="save the `state_dict()` instead"
            )
        start, is_storage = usual_start(info), name.startswith("data/")
        if not usual or not is_storage or (info.file_size and not info.CRC):
            file.seek(info.header_offset)
            header = file.read(LOCAL_HEADER.size + 4 * 1024)
            start = info.header_offset + _check_local(info, header)
            if usual is None and is_storage:
                usual = start == usual_start(info) and PADDING in header[: start - info.header_offset]
        if info.header_offset < end or start + info.file_size > archive.start_dir or size < archive.start_dir:
            raise FileProblem(f"has a member `{name}` that overlaps another or ends outside the file")
        end = start + info.file_size
        crc = info.CRC if has_checksums and info.file_size else None
        members[name] = ChecksummedRange(path, name, start, info.file_size, crc)
    return members


def _is_stored(info: zipfile.ZipInfo) -> bool:
    same_size = info.file_size == info.compress_size
    return same_size and not info.compress_type and not info.flag_bits & ~(HAS_DESCRIPTOR | UTF8_NAME)


def _not_stored(info: zipfile.ZipInfo) -> FileProblem:
    return FileProblem(f"has a compressed or encrypted member `{info.filename[:80]}`, which torch never writes")


def _is_plain(info: zipfile.ZipInfo) -> bool:
    """Whether a member is a regular file below the folder, on the first disk, with a printable name."""
    kind = stat.S_IFMT(info.external_attr >> 16)
    parts = info.filename.split("/")
    is_file = kind in (0, stat.S_IFREG) and not info.is_dir() and info.volume == 0
    return is_file and info.filename.isprintable() and not {"", ".", ".."} & {*parts} and "\\" not in info.filename


def usual_start(info: zipfile.ZipInfo) -> int:
    """The position of a member's data as torch places it (`inline_container.cc`, `getPadding`)."""
    start = info.header_offset + LOCAL_HEADER.size + len(info.orig_filename.encode()) + 4
    large = info.file_size >= UINT32_MAX, info.header_offset >= UINT32_MAX
    start += 4 * any(large) + 16 * large[0] + 8 * large[1]
    return start + -start % ALIGNMENT


def _check_local(info: zipfile.ZipInfo, header: bytes) -> int:
    """The length of the local header, which must agree with the central directory."""
    magic, _, flags, method, _, _, crc, packed, unpacked, name_length, extra_length = LOCAL_HEADER.unpack_from(header)
    name = header[LOCAL_HEADER.size : LOCAL_HEADER.size + name_length]
    local = (packed, unpacked, crc)
    left_open = (0, 0xFFFFFFFF) if flags & HAS_DESCRIPTOR else (0xFFFFFFFF,)
    central = (info.compress_size, info.file_size, info.CRC)
    sizes_agree = all(one == other or one in left_open for one, other in zip(local, central, strict=True))
    if magic != b"PK\x03\x04" or name != info.orig_filename.encode() or flags != info.flag_bits or not sizes_agree:
        raise FileProblem(f"has contradictory headers of member `{info.filename[:80]}`")
    if method:
        raise _not_stored(info)
    return int(LOCAL_HEADER.size + name_length + extra_length)
