"""Packed weights are in huge pages, and freed memory is returned to the system."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import numpy as np
import pytest

from llmconv import memory
from llmconv.memory import PAGE, huge_pages

SIZES = Path("/proc/self/smaps_rollup")
SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")

pytestmark = pytest.mark.skipif(
    not SIZES.exists() or not SWITCH.exists() or "[never]" in SWITCH.read_text(),
    reason="no large pages here to ask for",
)


def megabytes(field: str) -> int:
    """Of the process: `AnonHugePages` or `Rss`."""
    found = re.search(rf"^{field}:\s+(\d+) kB", SIZES.read_text(), re.MULTILINE)
    assert found
    return int(found[1]) >> 10


def blocks() -> list[np.ndarray]:
    """Forty times 1.5 MiB, none of which would fill a large page by itself."""
    return [np.full(PAGE * 3 // 16, value, dtype=np.float32) for value in range(40)]


@pytest.fixture
def available() -> None:
    """Skips where the system has too few large pages free for memory of this size that asks for them by itself."""
    before = megabytes("AnonHugePages")
    with mmap.mmap(-1, 32 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory.write(b"1" * 32 * PAGE)
        if megabytes("AnonHugePages") < before + 60:
            pytest.skip("the system has too few large pages free")


@pytest.mark.usefixtures("available")
@pytest.mark.parametrize(("size", "block"), [(60 << 20, memory.BLOCK), (60 << 20, 8 << 20), (3 << 30, memory.BLOCK)])
def test_blocks_are_contiguous_in_huge_pages(size: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "BLOCK", block)
    memory.trim()
    before = megabytes("AnonHugePages")

    with huge_pages(size):
        kept = blocks()

    assert megabytes("AnonHugePages") >= before + 40
    assert [int(block[-1]) for block in kept] == list(range(40))


def test_reserved_memory_that_is_not_used_is_returned() -> None:
    before = megabytes("Rss")

    with huge_pages(1 << 30):
        pass

    assert megabytes("Rss") < before + 10


def test_freed_blocks_are_returned_to_the_system() -> None:
    before = megabytes("Rss")

    with huge_pages(60 << 20):
        kept = blocks()
        assert megabytes("Rss") > before + 40
        kept.clear()

    assert megabytes("Rss") < before + 10
