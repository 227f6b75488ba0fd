"""The kernel's page cache: a run on more than fits gives its pages back, which is cheaper than having them taken."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
"""`proc_meminfo(5)`: `MemAvailable` is what programs may have without swapping, in KiB."""


def fits(nbytes: int) -> bool:
    """Whether so many bytes, read from one file and written to another, stay in memory without crowding it."""
    try:
        fields = dict(line.split(":") for line in MEMINFO.read_text().splitlines())
        return 4 * nbytes < int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return True


def forget(paths: Iterable[Path]) -> None:
    """Gives back the pages of files that are on the disk; what they hold is untouched (`posix_fadvise(2)`)."""
    for path in paths:
        if path.is_file() and hasattr(os, "posix_fadvise"):
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
