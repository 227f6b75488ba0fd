"""Large pages under memory that is read often."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import pytest

from llmconv.runtime.heap import PAGE, large_pages

SMAPS = Path("/proc/self/smaps_rollup")


def in_large_pages() -> int:
    """Bytes of the process that lie in large pages."""
    if not SMAPS.exists():
        pytest.skip("no /proc/self/smaps_rollup")
    found = re.search(r"AnonHugePages:\s+(\d+) kB", SMAPS.read_text())
    assert found
    return 1024 * int(found[1])


def taken() -> mmap.mmap:
    """Memory of eight large pages, written to in small ones."""
    memory = mmap.mmap(-1, 8 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    memory.write(bytes(range(256)) * (8 * PAGE // 256))
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def test_what_is_allocated_inside_lies_in_large_pages_and_is_the_same() -> None:
    before = in_large_pages()

    with large_pages():
        memory = taken()

    if in_large_pages() == before:
        pytest.skip("this system has no large pages to give")
    assert in_large_pages() >= before + 4 * PAGE
    assert memory[:] == bytes(range(256)) * (8 * PAGE // 256)
    memory.close()


def test_memory_from_before_stays_as_it_is() -> None:
    memory = taken()
    before = in_large_pages()

    with large_pages():
        pass

    assert in_large_pages() <= before + PAGE
    memory.close()
