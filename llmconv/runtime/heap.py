"""The heap: what was freed goes back to the system, and what is read at every step lies in large pages."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MAPS = Path("/proc/self/maps")
COLLAPSE = 25
"""`MADV_COLLAPSE` of `madvise(2)`, Linux 6.1."""

PAGE = 2 << 20
"""Bytes of a large page on the usual processors; elsewhere the system refuses, and nothing changes."""


def trim() -> None:
    """Gives freed memory back (glibc's `malloc_trim`; elsewhere nothing)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def large_pages() -> Iterator[None]:
    """Puts what is allocated inside into large pages, where the system has any.

    Weights are read from one end to the other at every step: the processor looks up one page in place of 512.
    """
    before = set(_ranges())
    yield
    for start, end in _ranges():
        if (start, end) not in before:
            _collapse(-(-start // PAGE) * PAGE, end // PAGE * PAGE)


def _ranges() -> list[tuple[int, int]]:
    """Start and end of the process's own writable memory, without files."""
    try:
        lines = [line.split() for line in MAPS.read_text().splitlines()]
    except OSError:
        return []
    own = [line[0].split("-") for line in lines if line[1] == "rw-p" and line[4] == "0" and len(line) == 5]
    return [(int(start, 16), int(end, 16)) for start, end in own]


def _collapse(start: int, end: int) -> None:
    if end > start:
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), COLLAPSE)
