"""Compares CRC-32 checksums of ranges of files while they are read: in any order, by several threads, each byte once.

A sequential CRC would read everything a second time, since threads read blocks out of order; so the checksums of the
blocks are combined: crc(A + B) = crc(A) · x^(8·len(B)) + crc(B) over GF(2), modulo the polynomial of CRC-32
(zlib `crc32.c`, `crc32_combine`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from threading import Lock

from llmconv.errors import InputRefused, MalformedInput
from llmconv.files.source_file import open_source

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
                self._compare(self.pieces[0][2])

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

    def _compare(self, crc: int) -> None:
        if crc != self.record.crc:
            raise (
                self.record.refusal()
                if self.record.refusal
                else MalformedInput(
                    f"`{self.record.path.name}` is damaged: CRC-32 mismatch in `{self.record.name}`",
                    hint="copy it again from where it was saved",
                )
            )
        self.complete = True
        self.pieces.clear()

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
            raise MalformedInput(
                f"`{self.record.path.name}` ends inside `{self.record.name}`",
                hint="the file was changed while it was read; copy it again",
            )


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
