"""Copies a file: clones it where the file system can share blocks, else copies inside the kernel or by hand (macOS)."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from llmconv.background import LOOK_AHEAD, BackgroundQueue
from llmconv.errors import MalformedInput
from llmconv.files.source_file import is_mirrored, open_source
from llmconv.files.sources import sha256_by_name


def flush_data(fd: int) -> None:
    """Writes a file's content to the disk: `fdatasync(2)`, or `fsync(2)`, which writes its times as well."""
    getattr(os, "fdatasync", os.fsync)(fd)


def copy_in_kernel(source: int, target: int, start: int, length: int) -> int:
    """Copies at most `length` bytes, both from byte `start` (`copy_file_range(2)`); the count, 0 if it cannot."""
    try:
        return os.copy_file_range(source, target, length, start, start)
    except (OSError, AttributeError):  # EXDEV, EINVAL, ENOSYS, …: a real problem shows in plain reading and writing
        return 0


def cores() -> int:
    """Number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# `ioctl_ficlone(2)`: both files share all blocks until one is written to (btrfs, XFS, bcachefs, ZFS, …)
FICLONE = 0x40049409
# bytes per `copy_file_range(2)`: the hasher finds them still in the cache; larger is slower (measured)
COPY_BYTES = 8 << 20
READ_BYTES = 256 << 10  # bytes per read and write where the kernel cannot copy


def can_clone(source: Path, folder: Path) -> bool:
    """Whether a file in `folder` can share the blocks of `source`; tried with a nameless temporary file."""
    if is_mirrored(source):
        return False
    try:
        with open(source, "rb") as given:
            trial = os.open(folder, os.O_TMPFILE | os.O_WRONLY)
            try:
                return _clone(given.fileno(), trial)
            finally:
                os.close(trial)
    except (OSError, AttributeError):  # a system without O_TMPFILE has no FICLONE either
        return False


def copy_file(source: Path, made: BinaryIO, advance: Callable[[int], None]) -> dict[str, Any]:
    """Copies a file durably into the new, empty `made`, reporting bytes to `advance`; returns its manifest entry.

    A clone changes only metadata, so it gets no sha256: reading the file would take as long as copying it. For a copy,
    it is computed in parallel, from the content of the target. Raises OSError; MalformedInput for a damaged file of the
    hub's cache.
    """
    if is_mirrored(source):
        # copies a mirrored file while it is fetched
        digest, size = hashlib.sha256(), 0
        with open_source(source) as given:
            while block := given.read(COPY_BYTES):
                made.write(block)
                digest.update(block)
                size += len(block)
                advance(len(block))
        made.flush()
        os.fsync(made.fileno())
        return {"bytes": size, "sha256": digest.hexdigest()}
    with open(source, "rb", buffering=0) as given:
        size = os.fstat(given.fileno()).st_size
        if _clone(given.fileno(), made.fileno()):
            os.fsync(made.fileno())
            advance(size)
            return {"bytes": os.fstat(made.fileno()).st_size, "clone_of": source.name}
        sha256 = _copy(given.fileno(), made.fileno(), size, advance)
        if sha256_by_name(source) not in ("", sha256):
            problem = f"`{source.name}` in the hub's cache is damaged: its sha256 is not the one it is named by"
            raise MalformedInput(problem, hint=f"delete `{source.resolve()}` and download the model again")
        os.fsync(made.fileno())
        return {"bytes": os.fstat(made.fileno()).st_size, "sha256": sha256}


def _clone(source: int, target: int) -> bool:
    try:
        fcntl.ioctl(target, FICLONE, source)
    except OSError:  # another disk, or no support: any other problem shows in the copy
        return False
    return True


def _copy(source: int, target: int, size: int, advance: Callable[[int], None]) -> str:
    """Copies and returns the sha256; hashing and flushing run in the background."""
    digest = hashlib.sha256()
    with BackgroundQueue(LOOK_AHEAD) as hashing, BackgroundQueue(1) as flushing:
        for start in range(0, size, COPY_BYTES):
            stop = min(start + COPY_BYTES, size)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(source, stop, COPY_BYTES, os.POSIX_FADV_WILLNEED)
            _copy_range(source, target, start, stop)
            hashing.submit(_hash_range, digest, target, start, stop)
            if flushing.is_idle():
                flushing.submit(flush_data, target)
            advance(stop - start)
        hashing.finish()
        flushing.finish()
    return digest.hexdigest()


def _copy_range(source: int, target: int, start: int, stop: int) -> None:
    """Copies bytes `start:stop`, or up to the end of a source that became shorter."""
    while start < stop:
        count = copy_in_kernel(source, target, start, stop - start)
        if not count:
            count = os.pwrite(target, os.pread(source, min(READ_BYTES, stop - start), start), start)
        if not count:
            return
        start += count


def _hash_range(digest: Any, file: int, start: int, stop: int) -> None:
    buffer = memoryview(bytearray(min(READ_BYTES * 4, stop - start)))
    while start < stop and (count := os.preadv(file, [buffer[: stop - start]], start)):
        digest.update(buffer[:count])
        start += count
