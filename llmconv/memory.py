"""The memory of this process: how much is available, returning it, huge pages, and errors that mean it ran out."""

from __future__ import annotations

import ctypes
import errno
import mmap
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from llmconv.errors import LlmconvError, OutOfMemory

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
HINT = "close other programs, raise the memory limit (`ulimit -v`, the container's), or give `--low-memory`"
M_ARENA_MAX = -8
# messages of torch, onnxruntime and the C library
MESSAGES = ("allocate memory", "bad_alloc", "bad allocation", "out of memory", "failed to allocate")


def available_memory(mapped: bool = False) -> int | None:
    """Bytes that this process can allocate before it fails or is killed; None if unknown.

    The minimum of the machine's (`MemAvailable` of proc_meminfo(5)), of the control groups' (cgroups(7)) and of the
    process's own limits (getrlimit(2)); with `mapped`, only the limit of the address space, `RLIMIT_AS`, which includes
    mapped files.
    """
    own = [_own("RLIMIT_AS", "VmSize")] if mapped else [_own("RLIMIT_DATA", "VmData"), _machine(), *_groups()]
    found = [size for size in own if size is not None]
    return max(0, min(found)) if found else None


def share_one_heap() -> None:
    """Makes threads that start from now on allocate from one heap of glibc (`mallopt(3)`).

    Each would otherwise keep freed blocks of its own: a sixth of the peak of `export --quant int4` (1.1 B, measured).
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is not None and hasattr(libc, "mallopt"):  # musl has none
        libc.mallopt(M_ARENA_MAX, 1)


def _own(name: str, field: str) -> int | None:
    """The rest of a limit of this process."""
    try:
        import resource  # noqa: PLC0415 - Windows has none

        limit = resource.getrlimit(getattr(resource, name))[0]
        if limit == resource.RLIM_INFINITY:
            return None
        return limit - _kilobytes(PROC / "self" / "status", field)
    except (ImportError, AttributeError, OSError, KeyError, ValueError):
        return None


def _machine() -> int | None:
    try:
        return _kilobytes(PROC / "meminfo", "MemAvailable")
    except (OSError, KeyError, ValueError):
        return None


def _kilobytes(path: Path, field: str) -> int:
    """A field of a file of `proc`, in bytes."""
    fields = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    return int(fields[field].split()[0]) * 1024


def _groups() -> Iterator[int]:
    """The rest of the memory in each control group of this process, of either version."""
    try:
        lines = (PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = CGROUPS / "memory" if controllers else CGROUPS
        names = ("limit_in_bytes", "usage_in_bytes") if controllers else ("max", "current")
        here = root / path.lstrip("/")
        for folder in [here, *here.parents]:
            if folder != root and root not in folder.parents:
                break
            left = _left(folder, *names)
            if left is not None:
                yield left


def _left(folder: Path, most: str, used: str) -> int | None:
    """The limit of a group minus its usage; reclaimable pages of files are not counted."""
    try:
        limit, usage = ((folder / f"memory.{name}").read_text().strip() for name in (most, used))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        cached = int(stat.get("inactive_file", stat.get("total_inactive_file", 0)))
        return None if limit == "max" or int(limit) > 1 << 60 else int(limit) - int(usage) + cached
    except (OSError, ValueError):
        return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or its cause, means that memory ran out."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, (MemoryError, OutOfMemory)) or (isinstance(at, OSError) and at.errno == errno.ENOMEM):
            return True
        text = f"{type(at).__name__} {at}".lower() if not isinstance(at, LlmconvError) else ""
        if any(message in text for message in MESSAGES):
            return True
        at = at.__cause__
    return False


def raise_if_out_of_memory(error: BaseException, where: str) -> None:
    """Raises OutOfMemory if an error of another library means that, before it is taken for one of the input."""
    if is_out_of_memory(error):
        raise OutOfMemory(f"memory ran out {where}", hint=HINT) from error


@contextmanager
def reporting_out_of_memory(where: str) -> Iterator[None]:
    """Turns errors inside that mean that memory ran out into OutOfMemory."""
    try:
        yield
    except OutOfMemory:
        raise
    except Exception as error:
        raise_if_out_of_memory(error, where)
        raise


# parameters of `mallopt(3)`: free bytes kept at the end of the heap, and minimum size of blocks outside of it
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
# bytes: maximum value for `mallopt`, no trimming, and size of one allocation
LARGEST, NEVER, BLOCK = 2**31 - 1, -1, 1 << 30
USUAL_MMAP, USUAL_TRIM = 32 << 20, 64 << 20  # the values that glibc chooses after a block of 32 MiB was freed
PAGE = 2 << 20  # bytes of a huge page on x86-64 and ARM


def trim() -> None:
    """Returns freed memory to the system (glibc's `malloc_trim`; no effect elsewhere)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def huge_pages(size: int) -> Iterator[None]:
    """Context in which about `size` bytes, read from start to end at every step, are in huge pages (Linux)."""
    if platform.libc_ver()[0] != "glibc":
        yield
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(MMAP_THRESHOLD, LARGEST)
    libc.mallopt(TRIM_THRESHOLD, NEVER)
    try:
        # grows the heap by `size` untouched bytes and requests huge pages for them
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
        yield
    finally:
        libc.mallopt(MMAP_THRESHOLD, USUAL_MMAP)
        libc.mallopt(TRIM_THRESHOLD, USUAL_TRIM)
        trim()


def peak_memory() -> int:
    """Peak resident memory of the process in bytes; `getrusage(2)` counts KiB, on macOS bytes."""
    import resource  # noqa: PLC0415 - Windows, which is refused later, has none

    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
