"""The kernel's page cache: large runs give their pages back, which is cheaper than having them reclaimed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from llmconv.files.source_file import is_mirrored

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
