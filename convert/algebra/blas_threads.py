"""Restricts OpenBLAS, which numpy brings, to the calling thread.

Its threads wait in busy loops: for small matrices half of the CPU time where nothing else runs, and several times what
they save if other processes run (measured).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

MAPS = Path("/proc/self/maps")
NAMES = ("scipy_openblas_{}_num_threads64_", "openblas_{}_num_threads64_", "openblas_{}_num_threads")
"""How builds of OpenBLAS call `openblas_get_num_threads` and `openblas_set_num_threads` (cblas.h)."""

Counter = tuple[Callable[[], int], Callable[[int], None]]


def _thread_counters() -> list[Counter]:
    """Functions that get and set the number of threads of each OpenBLAS in this process; empty where none is found."""
    if not MAPS.is_file():
        return []
    paths = {Path(line.split(maxsplit=5)[-1]) for line in MAPS.read_text().splitlines()}
    libraries = sorted(path for path in paths if "openblas" in path.name and ".so" in path.name)
    found = []
    for library in libraries:
        with suppress(OSError):  # a file that only has such a name
            found += _counters_of(ctypes.CDLL(str(library)))
    return found


def _counters_of(library: ctypes.CDLL) -> list[Counter]:
    names = [name for name in NAMES if hasattr(library, name.format("set"))]
    return [(getattr(library, name.format("get")), getattr(library, name.format("set"))) for name in names[:1]]


COUNTERS = _thread_counters()
"""Looked up once, before any input is there: while one is read nothing else is opened."""


_lock = Lock()
_before: list[list[int]] = []
"""One entry for each `single_threaded` that is open; the first has the numbers from before."""


@contextmanager
def single_threaded() -> Iterator[None]:
    """Inside, OpenBLAS makes every product with the calling thread alone; for all threads of the process."""
    with _lock:
        _before.append([get() for get, _ in COUNTERS] if not _before else _before[0])
        _set([1] * len(COUNTERS))
    try:
        yield
    finally:
        with _lock:
            counts = _before.pop()
            if not _before:
                _set(counts)


def _set(counts: list[int]) -> None:
    for (_, put), count in zip(COUNTERS, counts, strict=True):
        put(count)
