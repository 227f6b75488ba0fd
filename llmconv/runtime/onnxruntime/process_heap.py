"""The heap: what was freed goes back to the system, and what is read at every step lies in large pages."""

from __future__ import annotations

import ctypes
import mmap
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt(3)`: bytes at the heap's end that are kept, and of blocks that lie outside of the heap."""

LARGEST, NEVER, BLOCK = 2**31 - 1, -1, 1 << 30
"""Bytes: the most that `mallopt` takes, no bound of trimming, and what is asked for at once."""

USUAL_MMAP, USUAL_TRIM = 32 << 20, 64 << 20
"""Where glibc itself arrives at once a block of 32 MiB has been freed."""

PAGE = 2 << 20
"""Bytes of a large page on the usual processors."""


def trim() -> None:
    """Gives freed memory back (glibc's `malloc_trim`; elsewhere nothing)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def large_pages(size: int) -> Iterator[None]:
    """What is allocated inside, about `size` bytes, lies side by side in large pages (Linux with glibc; else as ever).

    Weights are read from one end to the other at every step: the processor looks up one page in place of 512, and the
    system hands out as many fewer.
    """
    if platform.libc_ver()[0] != "glibc":
        yield
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(MMAP_THRESHOLD, LARGEST)
    libc.mallopt(TRIM_THRESHOLD, NEVER)
    try:
        _ask(libc, size)
        yield
    finally:
        libc.mallopt(MMAP_THRESHOLD, USUAL_MMAP)
        libc.mallopt(TRIM_THRESHOLD, USUAL_TRIM)
        trim()


def _ask(libc: ctypes.CDLL, size: int) -> None:
    """Lets the heap grow by `size` bytes that are not there yet, and asks for large pages under them."""
    allocate, free, advise = libc.malloc, libc.free, libc.madvise
    allocate.argtypes, allocate.restype = [ctypes.c_size_t], ctypes.c_void_p
    free.argtypes = [ctypes.c_void_p]
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    blocks = [allocate(min(BLOCK, size - done)) for done in range(0, size, BLOCK)]
    for block in filter(None, blocks):
        start = block // PAGE * PAGE
        advise(start, min(BLOCK, size) + PAGE, mmap.MADV_HUGEPAGE)  # what lies about it may be in one, too
    for block in filter(None, blocks):
        free(block)
