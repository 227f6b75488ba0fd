"""The mirrored files of this process, and the guard that completes one before other code opens it."""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from llmconv.files.mirror.mirrored_file import MirroredFile
from llmconv.stores.address import StoreAddress

_files: dict[str, MirroredFile] = {}
"""By real path."""

_addresses: dict[str, StoreAddress] = {}
"""What each mirror shows, by the real path of its file or folder."""


def add(file: MirroredFile) -> None:
    """From now on, readers of the file fetch what they read, and other code finds it complete."""
    _install_guard()
    _files[os.path.realpath(file.path)] = file


def set_address(path: Path, address: StoreAddress) -> None:
    """From now on, `address_of` knows that the file or folder at `path` shows what is at `address`."""
    _addresses[os.path.realpath(path)] = address


def address_of(path: Path) -> StoreAddress | None:
    """The address of a mirrored file or folder, None for any other path."""
    name = os.path.realpath(path)
    for root, address in [*_addresses.items()]:
        if name == root or name.startswith(root + os.sep):
            return address / name[len(root) :].strip(os.sep)
    return None


def remove(folder: Path) -> None:
    """Forgets all files in `folder`, which is removed."""
    start = os.path.realpath(folder) + os.sep
    for name in [name for name in [*_addresses] if name.startswith(start)]:
        _addresses.pop(name, None)
    for name in [name for name in _files if name.startswith(start)]:
        _files.pop(name).close()


def complete(folder: Path) -> None:
    """Fetches all of every file in `folder`, for readers other than llmconv's own.

    Raises:
        InputRefused: an object changed.
        OutputFailed: the store failed.
    """
    start = os.path.realpath(folder) + os.sep
    for file in [file for name, file in _files.items() if name.startswith(start)]:
        file.fetch_whole()


def find(path: Path) -> MirroredFile | None:
    """The mirrored file at `path`; None for any other file, and for one that is complete."""
    file = _files.get(os.path.realpath(path)) if _files else None
    return file if file and not file.is_whole else None


def e_tag(path: Path) -> str | None:
    """The ETag of the object at `path`, None for any other file."""
    file = _files.get(os.path.realpath(path)) if _files else None
    return file.head.e_tag if file else None


@cache
def _install_guard() -> None:
    """Once, since such a hook cannot be removed; a file may be open for each rank of a checkpoint."""
    sys.addaudithook(_complete_before_open)
    with suppress(ValueError, OSError):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _complete_before_open(event: str, arguments: tuple[Any, ...]) -> None:
    """Whatever opens a mirrored file by its path would read zeros: all of it is fetched first."""
    if event != "open" or not _files or not isinstance(arguments[0], str | bytes | os.PathLike):
        return
    if file := find(Path(os.fsdecode(arguments[0]))):
        file.fetch_whole()
