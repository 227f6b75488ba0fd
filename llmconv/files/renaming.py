"""Renaming files and folders in one call, and making that durable."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

RENAME_NOREPLACE, RENAME_EXCHANGE, AT_FDCWD = 1, 2, -100
MACOS_FLAGS = {RENAME_NOREPLACE: 4, RENAME_EXCHANGE: 2}


def sync_folder(path: Path) -> None:
    """Makes renames in `path` durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def rename_at(new: Path, old: Path, flag: int) -> None:
    """Renames in one call, with `renameat2(2)` of Linux or `renamex_np(2)` of macOS; elsewhere in several.

    Args:
        new: the path to rename.
        old: its new name.
        flag: RENAME_EXCHANGE swaps both, so that `old` is never absent; RENAME_NOREPLACE replaces nothing.

    Raises:
        FileExistsError: RENAME_NOREPLACE, and `old` exists.
        OSError: any other failure.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        failed = libc.renameat2(AT_FDCWD, os.fsencode(new), AT_FDCWD, os.fsencode(old), flag)
    elif hasattr(libc, "renamex_np"):
        failed = libc.renamex_np(os.fsencode(new), os.fsencode(old), MACOS_FLAGS[flag])
    else:
        _rename_in_steps(new, old, flag)
        return
    if failed:
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise OSError(code, os.strerror(code), str(old))
        _rename_in_steps(new, old, flag)  # a file system without this call


def _rename_in_steps(new: Path, old: Path, flag: int) -> None:
    if flag == RENAME_NOREPLACE:
        if os.path.lexists(old):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(old))
        new.rename(old)
        return
    aside = old.with_name(f".{old.name}.llmconv-swap")
    old.rename(aside)
    new.rename(old)
    aside.rename(new)
