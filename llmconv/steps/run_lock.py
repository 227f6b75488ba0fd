"""One run of a file at a time. A step has the lock, too: it may outlive a run that was killed."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from llmconv.errors import OutputFailed

SUFFIX = ".llmconv-run.lock"
"""Suffix of the lock file. The run file cannot be locked itself: editors and git replace it by a new file."""


@contextmanager
def run_lock(file: Path) -> Iterator[int]:
    """Locks a file next to a run file with `flock(2)`; yields the descriptor that the processes of steps inherit.

    Raises OutputFailed if another run, or a step of one, has the lock; OSError if the folder is not writable.
    """
    path = file.absolute().with_name(f".{file.name}{SUFFIX}")
    descriptor = _locked(path, file.name)
    try:
        yield descriptor
    finally:
        with suppress(FileNotFoundError):
            path.unlink()
        os.close(descriptor)


def _locked(path: Path, name: str) -> int:
    """The descriptor of the locked file, which is still at its path: the run before may have removed it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise OutputFailed(
                f"another run of `{name}` is not finished",
                hint="wait until it ends; a step of a run that was killed goes on to its end",
            ) from error
        except OSError:  # a file system without locks
            return descriptor
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        os.close(descriptor)
