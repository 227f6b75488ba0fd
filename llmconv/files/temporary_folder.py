"""The user's cache, and temporary folders of fetched inputs; the next run removes those of a killed process."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Lock

from llmconv.errors import InputRefused
from llmconv.stores import hung_calls

PREFIX = "llmconv-fetched-"

YOUNG = 60  # seconds after which a folder that nobody has locked is one of a process that ended

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
    for folder in place.glob(f"{PREFIX}*"):
        with suppress(OSError):
            found = folder.lstat()
            old = time.time() - found.st_mtime > YOUNG
            if old and found.st_uid == os.getuid() and stat.S_ISDIR(found.st_mode) and folder not in _locks:
                descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(descriptor)
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


UNFINISHED = "unfinished-"  # prefix of folders that are being made; each is locked by the process that makes it


def user_cache(name: str) -> Path:
    """The folder, perhaps missing, for one purpose in the user's cache; InputRefused if there is no home folder."""
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise InputRefused(
            "there is no place for a cache: HOME is not set, and the user has no home folder",
            hint="set XDG_CACHE_HOME to a folder that you can write",
        ) from error
    return Path(cache) / "llmconv" / name


@contextmanager
def unfinished_folder(home: Path) -> Iterator[Path]:
    """A new folder to make something in, and then to rename; what is left of it at the end is removed.

    Those that killed processes left in `home`, an existing folder, are removed first: nobody holds their locks. Raises
    OSError if none can be made.
    """
    for path in home.glob(f"{UNFINISHED}*"):
        with suppress(OSError), _locked(path):
            shutil.rmtree(path, ignore_errors=True)
    with ExitStack() as stack:
        made = _made(home, stack)
        stack.callback(shutil.rmtree, made, ignore_errors=True)
        yield made


def _made(home: Path, stack: ExitStack) -> Path:
    """A new folder, locked until the stack ends."""
    while True:
        made = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=home))
        with suppress(BlockingIOError, FileNotFoundError):
            stack.enter_context(_locked(made, needed=False))
            if made.is_dir():  # else another process took it for a left one just before the lock
                return made


@contextmanager
def _locked(folder: Path, *, needed: bool = True) -> Iterator[None]:
    """Holds a folder's lock: BlockingIOError if another process has it, OSError for a link, or if `needed` and none."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:  # some network disks lock only files
            if needed:
                raise
        yield
    finally:
        os.close(descriptor)
