"""The user's cache, `~/.cache/llmconv`: where it is, and folders in it that are complete or are not there."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from llmconv.errors import InputRefused

UNFINISHED = "unfinished-"
"""Prefix of folders that are being made; each is locked by the process that makes it."""


def user_cache(name: str) -> Path:
    """The folder for one purpose in the user's cache, `$XDG_CACHE_HOME/llmconv/NAME`; it may be missing.

    Raises InputRefused if the user has no home folder, and `XDG_CACHE_HOME` is not set.
    """
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
    """Holds the lock of a folder, which ends with the process; raises BlockingIOError if another process holds it.

    Raises OSError if it is no folder of its own, or this disk does not lock folders and `needed` is set.
    """
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
