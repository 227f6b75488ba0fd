"""Opens files that are read: local ones, and mirrored ones, of which only what is read is fetched.

All code of llmconv that reads weights uses these functions; what opens a mirrored file otherwise fetches all of it.
Problems found inside a file are raised without its name, which `naming` adds where the file is known.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmconv.errors import MalformedInput
from llmconv.files.mirror import MirroredFile, find


class FileProblem(Exception):
    """A problem, worded to follow the name of its file, such as "is truncated"; an empty `hint` is that of `naming`."""

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.hint = hint


@contextmanager
def naming(subject: str, hint: str) -> Iterator[None]:
    """Adds the file's name to a FileProblem raised inside: MalformedInput "`model.safetensors` is truncated"."""
    try:
        yield
        return
    except FileProblem as problem:
        named = MalformedInput(f"{subject} {problem}", hint=problem.hint or hint)
    raise named  # here, where it does not hold the frames of the problem, and what they read


def open_source(path: Path) -> io.BufferedReader:
    """Opens a file to read headers, or all of it in order; raises OSError."""
    mirrored = find(path)
    return io.BufferedReader(_MirroredReader(mirrored)) if mirrored else open(path, "rb")


def read_into(path: Path, buffer: memoryview, offset: int) -> None:
    """Fills `buffer` from byte `offset` of a file; raises MalformedInput if the file ends before, or OSError."""
    with open_data(path) as file:
        fill(file, buffer, offset, path)


def open_data(path: Path) -> io.RawIOBase:
    """Opens a file to read data at many places with `fill`; raises OSError."""
    mirrored = find(path)
    return _MirroredReader(mirrored, data=True) if mirrored else open(path, "rb", buffering=0)


def fill(file: io.RawIOBase, buffer: memoryview, offset: int, path: Path) -> None:
    """As `read_into`, for several reads of a file from `open_data`; `path` is for the message."""
    done = 0
    while done < len(buffer):
        file.seek(offset + done)
        count = file.readinto(buffer[done:])
        if not count:
            raise MalformedInput(
                f"`{path.name}` ends at byte {offset + done}, {len(buffer) - done} bytes early",
                hint="the file is truncated, or changed while it was read; copy it again",
            )
        done += count


def is_mirrored(path: Path) -> bool:
    """Whether reading the file fetches what is read."""
    return find(path) is not None


class _MirroredReader(io.RawIOBase):
    """A mirrored file, presented as a file without a descriptor, which would lead to unfetched bytes."""

    def __init__(self, mirrored: MirroredFile, *, data: bool = False) -> None:
        self._read = mirrored.read_into if data else mirrored.peek_into
        self._size, self._position = mirrored.head.size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        position = offset + (0, self._position, self._size)[whence]
        if position < 0:
            raise ValueError("a position before the start")
        self._position = position
        return position

    def readinto(self, buffer: Any) -> int:
        count = self._read(memoryview(buffer).cast("B"), self._position)
        self._position += count
        return count


MEMINFO = Path("/proc/meminfo")
"""`proc_meminfo(5)`: `MemAvailable` is the memory that programs may take without swapping, in KiB."""


def fits(nbytes: int) -> bool:
    """Whether reading and writing `nbytes` leaves at least half of the available memory free."""
    try:
        fields = dict(line.split(":") for line in MEMINFO.read_text().splitlines())
        return 4 * nbytes < int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return True


def forget(paths: Iterable[Path]) -> None:
    """Drops files that are on the disk from the page cache (`posix_fadvise(2)`)."""
    for path in paths:
        if not is_mirrored(path) and path.is_file() and hasattr(os, "posix_fadvise"):
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
