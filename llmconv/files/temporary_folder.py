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
from threading import Lock

from llmconv.stores import hung_calls

PREFIX = "llmconv-fetched-"

YOUNG = 60
"""Seconds after which a folder that nobody has locked is one of a process that ended."""

_locks: dict[Path, int] = {}
"""The folder of this process in each temporary directory that it has used, and the descriptor that locks it."""

_changing = Lock()


def make_temporary_folder() -> Path:
    """A new folder in the temporary directory, which is removed by `remove_temporary_folder`, or with the process."""
    place = Path(tempfile.gettempdir())
    with _changing:
        home = next((home for home in _locks if home.parent == place and home.is_dir()), None)
        return Path(tempfile.mkdtemp(dir=home or _make_home(place)))


def _make_home(place: Path) -> Path:
    _sweep(place)
    home = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
    _locks[home] = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
    with suppress(OSError):  # a file system without locks, where the folders of a killed process stay
        fcntl.flock(_locks[home], fcntl.LOCK_EX)
    return home


def remove_temporary_folder(folder: Path) -> None:
    """Removes a folder of this process; nothing happens if it has been removed."""
    home = folder.parent
    if home not in _locks:
        return
    shutil.rmtree(folder, ignore_errors=True)
    with _changing, suppress(OSError):  # it has other folders
        home.rmdir()
        os.close(_locks.pop(home))


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
    for home in [*_locks]:
        shutil.rmtree(home, ignore_errors=True)
        os.close(_locks.pop(home))


def _leave_to_parent() -> None:
    """In a fork: the folders are those of its parent, which would lose them when this process ends."""
    global _changing
    for descriptor in _locks.values():
        os.close(descriptor)
    _locks.clear()
    _changing = Lock()  # another thread of the parent may have held it


hung_calls.before_exit(_remove_all)
os.register_at_fork(after_in_child=_leave_to_parent)
