"""Unpacks a compressed file, or a tar archive of one file, once per process, to a temporary file.

The temporary file has no name on the disk, so that it is gone however the process ends; a link to its descriptor, with
the name of the packed file, is returned. Without such links (macOS) it keeps its name and is removed when the process
ends, or by the next one if it was killed. TMPDIR chooses the disk.
"""

from __future__ import annotations

import os
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
from llmconv.files.source_file import open_source
from llmconv.files.temporary_folder import make_temporary_folder, remove_temporary_folder
from llmconv.progress import bytes_bar

DESCRIPTORS = Path("/proc/self/fd")
"""Links to all open files, `proc(5)`."""

CHECK_BYTES = 64 << 20
"""Bytes between two checks of the free space."""

RESERVE = 256 << 20
"""Bytes of the disk to leave free; at most a twentieth of the free space."""

RATIO_LIMIT = 200
RATIO_FROM = 1 << 30
"""A file that grows by more than this factor, and beyond this size, is a bomb: weights hardly compress."""


def unpacked(path: Path) -> Path:
    """The path of the unpacked content of `path`; `path` itself if it is a folder or not packed.

    Raises:
        InputRefused: no space left.
        MalformedInput: truncated, damaged, or a bomb.
        UnsupportedInput: an unsupported compression, packed twice, or an archive of several files.
    """
    if not path.is_file():
        return path
    stat = path.stat()
    return _unpacked(path.absolute(), stat.st_size, stat.st_mtime_ns) or path


@cache
def _unpacked(path: Path, size: int, _changed: int) -> Path | None:
    with open_source(path) as file:
        codec = find_codec(file, path.name)
        file.seek(0)
        if codec is None and not is_tar(file.read(RECORD)):
            return None
    with open(path, "rb") as file:
        folder = make_temporary_folder()
        try:
            return _unpack_into(folder, path.name, file, codec)
        except BaseException:
            remove_temporary_folder(folder)
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
            f"the content of `{name}` is compressed again, with {again.name}", hint="unpack it once by hand"
        )


def _unpack(name: str, file: BinaryIO, codec: Codec | None, target: BinaryIO) -> None:
    space = _FreeSpace(name, target)
    size = os.fstat(file.fileno()).st_size
    space.require(codec.declared(file) if codec else size)
    file.seek(0)
    stream: BinaryIO = open_stream(codec, file, name) if codec else file
    head = stream.read(RECORD)
    if is_tar(head):
        size, blocks = TarArchive(head, stream, name).only_file()
        space.require(size)
    else:
        blocks = chain([head], iter(lambda: stream.read(BLOCK), b""))
    _write(name, file, blocks, target, space)


def _write(name: str, file: BinaryIO, blocks: Iterator[bytes], target: BinaryIO, space: _FreeSpace) -> None:
    written = read = 0
    checked = 0
    with bytes_bar(f"unpacking {name}", os.fstat(file.fileno()).st_size) as advance:
        for block in blocks:
            if written + len(block) > max(RATIO_FROM, RATIO_LIMIT * file.tell()):
                raise MalformedInput(
                    f"`{name}` grows more than {RATIO_LIMIT} times when it is unpacked, which checkpoints do not",
                    hint="it is an attack on the disk, or full of zeros; check its origin",
                )
            if written - checked >= CHECK_BYTES:
                space.require(len(block))
                checked = written
            space.write(block)
            written += len(block)
            advance(file.tell() - read)
            read = file.tell()


class _FreeSpace:
    """The free space on the disk of the temporary file."""

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
            f"no space left to unpack `{self._name}` in `{tempfile.gettempdir()}`: {problem}",
            hint="set TMPDIR to a folder on a larger disk, or unpack it by hand",
        )
