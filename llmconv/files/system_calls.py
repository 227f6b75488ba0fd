"""What not every Unix has: each function does the same in the next best way where a system call is missing (macOS)."""

from __future__ import annotations

import os
import resource
import sys


def flush_data(fd: int) -> None:
    """Brings a file's content to the disk: `fdatasync(2)`, or `fsync(2)`, which brings its times as well."""
    getattr(os, "fdatasync", os.fsync)(fd)


def will_need(fd: int, start: int, length: int) -> None:
    """Lets the kernel read ahead (`posix_fadvise(2)`); a hint only."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, start, length, os.POSIX_FADV_WILLNEED)


def copy_in_kernel(source: int, target: int, start: int, length: int) -> int:
    """Copies bytes from and to the same place (`copy_file_range(2)`); 0 where the kernel cannot."""
    try:
        return os.copy_file_range(source, target, length, start, start)
    except (OSError, AttributeError):  # EXDEV, EINVAL, ENOSYS, …: what is really wrong, plain reading and writing tells
        return 0


def cores() -> int:
    """Cores that this process may use, or that there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def peak_memory() -> int:
    """Bytes of the process's largest resident set; `getrusage(2)` counts KiB, on macOS bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
