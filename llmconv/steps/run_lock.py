"""One run of a file at a time. A step has the lock, too: it may outlive a run that was killed."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmconv.errors import OutputFailed


@contextmanager
def run_lock(file: Path) -> Iterator[int]:
    """Locks a run file with `flock(2)`; yields the descriptor that the processes of steps inherit.

    Args:
        file: the run file.

    Raises:
        OutputFailed: another run, or a step of one, has the lock.
    """
    descriptor = os.open(file, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise OutputFailed(
            f"another run of `{file.name}` is not finished",
            hint="wait until it ends; a step of a run that was killed goes on to its end",
        ) from error
    except OSError:  # a file system without locks
        pass
    try:
        yield descriptor
    finally:
        os.close(descriptor)
