"""Packed checkpoints: a compressed file, or a tar archive of one file, is unpacked once, to a temporary file.

The temporary file has no name on the disk, so that it is gone however the process ends; a link to its descriptor, under
the name of the packed file, stands for it. Where there are no such links (macOS) it keeps its name, and goes when the
process ends in order. TMPDIR says on which disk it lies.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput
from llmconv.files.packing.codecs import Codec
from llmconv.files.packing.compression import BLOCK, find_codec, open_stream
from llmconv.files.packing.tar_archive import RECORD, TarArchive, is_tar
from llmconv.progress import bytes_bar

DESCRIPTORS = Path("/proc/self/fd")
"""A link for every open file, `proc(5)`."""

CHECK_BYTES = 64 << 20
"""The free space is asked for after so many bytes."""

RESERVE = 256 << 20
"""Bytes of the disk that are left free, or a twentieth of what was free, if that is less."""

RATIO_LIMIT = 200
RATIO_FROM = 1 << 30
"""A file that grows more than so many times, and beyond so many bytes, is a bomb: weights hardly shrink at all."""


def unpacked(path: Path) -> Path:
    """The path of what is packed in `path`; `path` itself where it is a folder or not packed.

    Raises:
        InputRefused: there is no room for it.
        MalformedInput: truncated, damaged, or a bomb.
        UnsupportedInput: packed in a way that llmconv does not undo, or an archive of several files.
    """
    if not path.is_file():
        return path
    stat = path.stat()
    return _unpacked(path.absolute(), stat.st_size, stat.st_mtime_ns) or path


@cache
def _unpacked(path: Path, size: int, _changed: int) -> Path | None:
    with open(path, "rb") as file:
        codec = find_codec(file, path.name)
        file.seek(0)
        if codec is None and not is_tar(file.read(RECORD)):
            return None
        folder = Path(tempfile.mkdtemp(prefix="llmconv-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        try:
            return _unpack_into(folder, path.name, file, codec)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def _unpack_into(folder: Path, name: str, file: BinaryIO, codec: Codec | None) -> Path:
    with open(folder / "unpacked", "w+b", buffering=0) as target:
        link = folder / name
        if DESCRIPTORS.is_dir():
            (folder / "unpacked").unlink()
        _unpack(name, file, codec, target)
        _check_packed_once(name, target)
        if DESCRIPTORS.is_dir():
            link.symlink_to(DESCRIPTORS / str(os.dup(target.fileno())))
        else:
            (folder / "unpacked").rename(link)
    return link


def _check_packed_once(name: str, target: BinaryIO) -> None:
    if again := find_codec(target, name):
        raise UnsupportedInput(
            f"what is packed in `{name}` is compressed again, with {again.name}", hint="unpack it once by hand"
        )


def _unpack(name: str, file: BinaryIO, codec: Codec | None, target: BinaryIO) -> None:
    room = _Room(name, target)
    size = os.fstat(file.fileno()).st_size
    room.require(codec.declared(file) if codec else size)
    file.seek(0)
    stream: BinaryIO = open_stream(codec, file, name) if codec else file
    head = stream.read(RECORD)
    if is_tar(head):
        size, blocks = TarArchive(head, stream, name).only_file()
        room.require(size)
    else:
        blocks = chain([head], iter(lambda: stream.read(BLOCK), b""))
    _write(name, file, blocks, target, room)


def _write(name: str, file: BinaryIO, blocks: Iterator[bytes], target: BinaryIO, room: _Room) -> None:
    written = read = 0
    checked = 0
    with bytes_bar(f"unpacking {name}", os.fstat(file.fileno()).st_size) as advance:
        for block in blocks:
            if written + len(block) > max(RATIO_FROM, RATIO_LIMIT * file.tell()):
                raise MalformedInput(
                    f"`{name}` grows more than {RATIO_LIMIT} times when it is unpacked, which no checkpoint does",
                    hint="it is an attack on the disk, or full of zeros; look where it comes from",
                )
            if written - checked >= CHECK_BYTES:
                room.require(len(block))
                checked = written
            room.write(block)
            written += len(block)
            advance(file.tell() - read)
            read = file.tell()


class _Room:
    """The disk that the temporary file lies on."""

    def __init__(self, name: str, target: BinaryIO) -> None:
        self._name = name
        self._target = target
        self._reserve = min(RESERVE, self._free() // 20)

    def _free(self) -> int:
        disk = os.fstatvfs(self._target.fileno())
        return disk.f_bavail * disk.f_frsize

    def require(self, count: int) -> None:
        """Raises InputRefused unless `count` more bytes leave the reserve free."""
        free = self._free()
        if count > free - self._reserve:
            raise self._full(f"{count:,} more bytes are needed, {free:,} are free")

    def write(self, block: bytes) -> None:
        """Writes all of `block`."""
        view = memoryview(block)
        try:
            while view:
                view = view[self._target.write(view) :]
        except OSError as error:
            raise self._full(error.strerror or str(error)) from error

    def _full(self, problem: str) -> InputRefused:
        return InputRefused(
            f"there is no room to unpack `{self._name}` in `{tempfile.gettempdir()}`: {problem}",
            hint="set TMPDIR to a folder on a larger disk, or unpack it by hand",
        )
