"""System calls that not every Unix has, each with a fallback (macOS)."""

from __future__ import annotations

import os
import resource
import sys


def flush_data(fd: int) -> None:
    """Writes a file's content to the disk: `fdatasync(2)`, or `fsync(2)`, which writes its times as well."""
    getattr(os, "fdatasync", os.fsync)(fd)


def will_need(fd: int, start: int, length: int) -> None:
    """Asks the kernel to read ahead `length` bytes (`posix_fadvise(2)`)."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, start, length, os.POSIX_FADV_WILLNEED)


def copy_in_kernel(source: int, target: int, start: int, length: int) -> int:
    """Copies at most `length` bytes between two descriptors, both at byte `start` (`copy_file_range(2)`).

    Returns the bytes copied; 0 where the kernel cannot.
    """
    try:
        return os.copy_file_range(source, target, length, start, start)
    except (OSError, AttributeError):  # EXDEV, EINVAL, ENOSYS, …: a real problem shows in plain reading and writing
        return 0


def cores() -> int:
    """Number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def peak_memory() -> int:
    """Peak resident memory of the process in bytes; `getrusage(2)` counts KiB, on macOS bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
