"""Opens files that are read: local ones, and mirrored ones, of which only what is read is fetched.

All code of llmconv that reads weights uses these functions; what opens a mirrored file otherwise fetches all of it.
Problems found inside a file are raised without its name, which `naming` adds where the file is known.

CRC-32 checksums of ranges are compared while these are read: in any order, by several threads, each byte once. Those of
blocks are combined: crc(A + B) = crc(A) · x^(8·len(B)) + crc(B) over GF(2), modulo the polynomial of CRC-32 (zlib
`crc32.c`, `crc32_combine`).
"""

from __future__ import annotations

import io
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from llmconv.errors import InputRefused, MalformedInput

if TYPE_CHECKING:
    from llmconv.files.mirror import MirroredFile


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
    mirrored = _mirrored(path)
    return io.BufferedReader(BytesReader(mirrored.peek_into, mirrored.head.size)) if mirrored else open(path, "rb")


def read_into(path: Path, buffer: memoryview, offset: int) -> None:
    """Fills `buffer` from byte `offset` of a file; raises MalformedInput if the file ends before, or OSError."""
    with open_data(path) as file:
        fill(file, buffer, offset, path)


def open_data(path: Path) -> io.RawIOBase:
    """Opens a file to read data at many places with `fill`; raises OSError."""
    mirrored = _mirrored(path)
    return BytesReader(mirrored.read_into, mirrored.head.size) if mirrored else open(path, "rb", buffering=0)


def fill(file: io.RawIOBase, buffer: memoryview, offset: int, path: Path) -> None:
    """As `read_into`, for several reads of a file from `open_data`; `path` is for the message."""
    done = 0
    while done < len(buffer):
        file.seek(offset + done)
        if not (count := file.readinto(buffer[done:])):
            problem = f"`{path.name}` ends at byte {offset + done}, {len(buffer) - done} bytes early"
            raise MalformedInput(problem, hint="the file is truncated, or changed while it was read; copy it again")
        done += count


def is_mirrored(path: Path) -> bool:
    """Whether reading the file fetches what is read."""
    return _mirrored(path) is not None


def _mirrored(path: Path) -> MirroredFile | None:
    from llmconv.files.mirror import find  # noqa: PLC0415 - a folder of graphs needs none

    return find(path)


class BytesReader(io.RawIOBase):
    """`size` bytes, presented as a file without a descriptor; `read` fills a buffer from a position, and counts."""

    def __init__(self, read: Callable[[memoryview, int], int], size: int) -> None:
        self._read, self._size, self._position = read, size, 0

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


# `proc_meminfo(5)`: `MemAvailable` is the memory that programs may take without swapping, in KiB
MEMINFO = Path("/proc/meminfo")


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


try:
    from isal.isal_zlib import crc32 as crc32  # five times faster than zlib, so that checking costs little
except ImportError:  # no wheel for this platform
    from zlib import crc32 as crc32

POLYNOMIAL = 0xEDB88320  # of CRC-32, with reflected bits, as in zlib
READ_BYTES = 4 << 20


@dataclass(frozen=True)
class ChecksummedRange:
    """A range of a file with its stored checksum."""

    path: Path
    name: str
    start: int  # position of the first byte
    size: int  # bytes
    crc: int | None  # CRC-32 of the range; None if the writer left it out
    # makes the error for a mismatch; None: the file is damaged
    refusal: Callable[[], InputRefused] | None = field(default=None, compare=False, repr=False)

    def was_read(self, begin: int, data: memoryview) -> None:
        """Adds `data` from position `begin`, inside `checked_reading`; raises `refusal` if a complete range differs."""
        checks = _current.get()
        if checks and self.crc is None:
            checks.unchecked.add(self.path.name)
        elif checks:
            checks.of(self).add(begin, data)

    def was_touched(self) -> None:
        """Notes a read that bypassed `was_read`: `PendingChecksums.finish` then reads the whole range."""
        self.was_read(0, memoryview(b""))


@dataclass(eq=False)
class _Coverage:
    """The part of a range that was read: disjoint `(start, stop, crc)` in order, adjacent ones joined."""

    record: ChecksummedRange
    pieces: list[tuple[int, int, int]] = field(default_factory=list)
    complete: bool = False
    lock: Lock = field(default_factory=Lock)

    def add(self, begin: int, data: memoryview) -> None:
        """Adds the bytes of `data` that were not read before."""
        if self.complete:
            return
        with self.lock:
            for start, stop in self.gaps(begin, begin + len(data)):
                self._insert(start, stop, crc32(data[start - begin : stop - begin]))
            if self.pieces and self.pieces[0][1] - self.pieces[0][0] == self.record.size:
                if self.pieces[0][2] != self.record.crc:
                    raise self.record.refusal() if self.record.refusal else self._damaged()
                self.complete = True
                self.pieces.clear()

    def gaps(self, begin: int, end: int) -> list[tuple[int, int]]:
        """The parts of `begin:end` that no piece covers."""
        found = []
        for start, stop, _ in self.pieces[max(0, bisect_left(self.pieces, (begin,)) - 1) :]:
            if begin >= end:
                break
            if begin < start:
                found.append((begin, min(start, end)))
            begin = max(begin, stop)
        return [*found, (begin, end)] if begin < end else found

    def _insert(self, start: int, stop: int, crc: int) -> None:
        place = bisect_left(self.pieces, (start, stop, crc))
        if place < len(self.pieces) and self.pieces[place][0] == stop:
            _, end, after = self.pieces.pop(place)
            crc, stop = combine(crc, after, end - stop), end
        if place and self.pieces[place - 1][1] == start:
            begin, _, before = self.pieces.pop(place := place - 1)
            crc, start = combine(before, crc, stop - start), begin
        self.pieces.insert(place, (start, stop, crc))

    def _damaged(self) -> MalformedInput:
        problem = f"`{self.record.path.name}` is damaged: CRC-32 mismatch in `{self.record.name}`"
        return MalformedInput(problem, hint="copy it again from where it was saved")

    def finish(self) -> None:
        if self.complete:
            return
        with open_source(self.record.path) as file:
            for start, stop in self.gaps(0, self.record.size):
                file.seek(self.record.start + start)
                while start < stop and (data := file.read(min(READ_BYTES, stop - start))):
                    self.add(start, memoryview(data))
                    start += len(data)
        if not self.complete:
            problem = f"`{self.record.path.name}` ends inside `{self.record.name}`"
            raise MalformedInput(problem, hint="the file was changed while it was read; copy it again")


class PendingChecksums:
    """The ranges read since `checked_reading` began; `unchecked` are the names of the files without checksums."""

    def __init__(self) -> None:
        self.unchecked: set[str] = set()
        self._coverages: dict[ChecksummedRange, _Coverage] = {}

    def of(self, record: ChecksummedRange) -> _Coverage:
        """The part of `record` that was read."""
        return self._coverages.setdefault(record, _Coverage(record))

    def finish(self) -> None:
        """Reads the rest of all partly read ranges and compares their checksums; raises InputRefused for a mismatch."""
        for coverage in self._coverages.values():
            coverage.finish()


_current: ContextVar[PendingChecksums | None] = ContextVar("checks", default=None)


@contextmanager
def checked_reading() -> Iterator[PendingChecksums]:
    """Inside, reads are compared with checksums; threads take part if they run in a copy of the context."""
    checks = PendingChecksums()
    token = _current.set(checks)
    try:
        yield checks
    finally:
        _current.reset(token)


Version = tuple[int, ...]


def version_of(found: os.stat_result) -> Version:
    """What identifies the content of a file of this machine: device, inode, size, and times of change in ns."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def combine(first: int, second: int, second_size: int) -> int:
    """The CRC-32 of the concatenation of two byte strings, from their CRC-32 and the bytes of the second."""
    return _multiply(first, _shift(second_size)) ^ second


@lru_cache(maxsize=256)
def _shift(size: int) -> int:
    """x^(8·size), by squaring."""
    power, result = _multiply(1 << 27, 1 << 27), 1 << 31  # x^8 and 1
    while size:
        if size & 1:
            result = _multiply(result, power)
        size >>= 1
        power = _multiply(power, power)
    return result


def _multiply(one: int, other: int) -> int:
    """The product of two polynomials (bit 31 is the constant term) modulo that of CRC-32."""
    product = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            product ^= other
        other = other >> 1 ^ POLYNOMIAL if other & 1 else other >> 1
    return product
