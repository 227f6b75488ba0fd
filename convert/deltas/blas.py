"""Keeping OpenBLAS, which numpy brings, to the calling thread.

Its threads wait for each other in loops: for small matrices half of the CPU time where nothing else runs, and several
times what they save beside other work (measured).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

MAPS = Path("/proc/self/maps")
NAMES = ("scipy_openblas_{}_num_threads64_", "openblas_{}_num_threads64_", "openblas_{}_num_threads")
"""How builds of OpenBLAS call `openblas_get_num_threads` and `openblas_set_num_threads` (cblas.h)."""

Counter = tuple[Callable[[], int], Callable[[int], None]]


def thread_counters() -> list[Counter]:
    """What reads and what sets the number of threads of each OpenBLAS in this process; none where it cannot be told."""
    if not MAPS.is_file():
        return []
    found = []
    lines = [line for line in MAPS.read_text().splitlines() if "openblas" in line]
    for path in sorted({line.split(maxsplit=5)[-1] for line in lines}):
        library = ctypes.CDLL(path) if Path(path).is_file() else None
        for name in NAMES:
            if hasattr(library, name.format("set")):
                found.append((getattr(library, name.format("get")), getattr(library, name.format("set"))))
                break
    return found


@contextmanager
def single_threaded() -> Iterator[None]:
    """Inside, OpenBLAS makes every product with the calling thread alone; for all threads of the process."""
    before = [(put, get()) for get, put in thread_counters()]
    try:
        for put, _ in before:
            put(1)
        yield
    finally:
        for put, count in before:
            put(count)
