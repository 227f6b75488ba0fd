"""Temporary folders of fetched inputs: the next run removes those of a process that was killed."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from llmconv.stores import hung_calls

PREFIX = "llmconv-fetched-"

YOUNG = 60
"""Seconds after which a folder that nobody has locked is one of a process that ended."""

_locks: dict[Path, int] = {}
"""Folders of this process, and the descriptors that lock them."""


def make_temporary_folder() -> Path:
    """A new folder in the temporary directory, which is removed by `remove_temporary_folder`, or with the process."""
    _sweep(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    _locks[folder] = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with suppress(OSError):  # a file system without locks, where the folders of a killed process stay
        fcntl.flock(_locks[folder], fcntl.LOCK_EX)
    return folder


def remove_temporary_folder(folder: Path) -> None:
    """Removes a folder of this process; nothing happens if it has been removed."""
    if folder in _locks:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(_locks.pop(folder))


def _sweep(home: Path) -> None:
    """Removes the folders of this user that no process has locked."""
    for folder in home.glob(f"{PREFIX}*"):
        with suppress(OSError):
            found = folder.lstat()
            old = time.time() - found.st_mtime > YOUNG
            if old and found.st_uid == os.getuid() and stat.S_ISDIR(found.st_mode) and folder not in _locks:
                _remove_unlocked(folder)


def _remove_unlocked(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


@atexit.register
def _remove_all() -> None:
    for folder in [*_locks]:
        remove_temporary_folder(folder)


def _leave_to_parent() -> None:
    """In a fork: the folders are those of its parent, which would lose them when this process ends."""
    for descriptor in _locks.values():
        os.close(descriptor)
    _locks.clear()


hung_calls.before_exit(_remove_all)
os.register_at_fork(after_in_child=_leave_to_parent)
