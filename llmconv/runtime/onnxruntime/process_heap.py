"""Memory of the process: returns freed memory to the system, and places packed weights in huge pages."""

from __future__ import annotations

import ctypes
import mmap
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt(3)`: free bytes kept at the end of the heap, and minimum size of blocks outside of it."""

LARGEST, NEVER, BLOCK = 2**31 - 1, -1, 1 << 30
"""Bytes: maximum value for `mallopt`, no trimming, and size of one allocation."""

USUAL_MMAP, USUAL_TRIM = 32 << 20, 64 << 20
"""The values that glibc chooses after a block of 32 MiB was freed."""

PAGE = 2 << 20
"""Bytes of a huge page on x86-64 and ARM."""


def trim() -> None:
    """Returns freed memory to the system (glibc's `malloc_trim`; no effect elsewhere)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def huge_pages(size: int) -> Iterator[None]:
    """Context in which about `size` bytes are allocated contiguously in huge pages (Linux with glibc; else no effect).

    Weights are read from start to end at every step: one page lookup replaces 512.
    """
    if platform.libc_ver()[0] != "glibc":
        yield
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(MMAP_THRESHOLD, LARGEST)
    libc.mallopt(TRIM_THRESHOLD, NEVER)
    try:
        _reserve(libc, size)
        yield
    finally:
        libc.mallopt(MMAP_THRESHOLD, USUAL_MMAP)
        libc.mallopt(TRIM_THRESHOLD, USUAL_TRIM)
        trim()


def _reserve(libc: ctypes.CDLL, size: int) -> None:
    """Grows the heap by `size` untouched bytes and requests huge pages for them."""
    allocate, free, advise = libc.malloc, libc.free, libc.madvise
    allocate.argtypes, allocate.restype = [ctypes.c_size_t], ctypes.c_void_p
    free.argtypes = [ctypes.c_void_p]
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    blocks = [allocate(min(BLOCK, size - done)) for done in range(0, size, BLOCK)]
    for block in filter(None, blocks):
        start = block // PAGE * PAGE
        advise(start, min(BLOCK, size) + PAGE, mmap.MADV_HUGEPAGE)  # pages around the block may be huge, too
    for block in filter(None, blocks):
        free(block)
