"""How much memory this process may still have, and whether an error says that there was none."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmconv.errors import LlmconvError, OutOfMemory

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
HINT = "close other programs, raise the limit of memory (`ulimit -v`, the container's), or give `--low-memory`"
SAID = ("allocate memory", "bad_alloc", "bad allocation", "out of memory", "failed to allocate")
"""What torch, onnxruntime and the C library say."""


def available_memory(mapped: bool = False) -> int | None:
    """Bytes that this process can take on before it fails or is killed; None where nothing tells.

    The least of the machine's (`MemAvailable` of proc_meminfo(5)), of the control groups' (cgroups(7)) and of the
    process's own limits (getrlimit(2)).

    Args:
        mapped: pages of files count, as they do for the limit of addresses, `RLIMIT_AS`, alone.
    """
    own = [_own("RLIMIT_AS", "VmSize")] if mapped else [_own("RLIMIT_DATA", "VmData"), _machine(), *_groups()]
    found = [size for size in own if size is not None]
    return max(0, min(found)) if found else None


def _own(name: str, field: str) -> int | None:
    """What is left of a limit of this process."""
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
    """What is left in every control group that this process is in, of either version."""
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
    """The limit of a group less what it has; pages of files that can be given back are not counted."""
    try:
        limit, usage = ((folder / f"memory.{name}").read_text().strip() for name in (most, used))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        cached = int(stat.get("inactive_file", stat.get("total_inactive_file", 0)))
        return None if limit == "max" or int(limit) > 1 << 60 else int(limit) - int(usage) + cached
    except (OSError, ValueError):
        return None


def says_no_memory(error: BaseException) -> bool:
    """Whether an error, or the one behind it, says that memory ran out."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, (MemoryError, OutOfMemory)) or (isinstance(at, OSError) and at.errno == errno.ENOMEM):
            return True
        text = f"{type(at).__name__} {at}".lower() if not isinstance(at, LlmconvError) else ""
        if any(words in text for words in SAID):
            return True
        at = at.__cause__
    return False


def require_memory(error: BaseException, where: str) -> None:
    """For errors of other libraries, before they are told as faults of the input.

    Raises:
        OutOfMemory: the error says that memory ran out.
    """
    if says_no_memory(error):
        raise OutOfMemory(f"memory ran out {where}", hint=HINT) from error


@contextmanager
def telling_memory(where: str) -> Iterator[None]:
    """Inside, every error that says that memory ran out becomes one that says so clearly.

    Raises:
        OutOfMemory: for such an error.
    """
    try:
        yield
    except OutOfMemory:
        raise
    except Exception as error:
        require_memory(error, where)
        raise
