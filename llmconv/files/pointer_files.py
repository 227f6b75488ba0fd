"""Pointer files: Composer's replacement of symbolic links in buckets, and Git LFS pointers.

Layout (mosaicml/composer `utils/file_helpers.py`, `get_file`, `create_symlink_file`): a text file `NAME.symlink`
contains the name of an object, relative to the root of the bucket; if `NAME` is missing, `NAME.symlink` replaces it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Protocol

from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput

SUFFIX = ".symlink"
HOPS = 8
TEXT_LIMIT = 1024  # maximum bytes of an object's name, that of S3

PLAIN_NAME = re.compile(r"[\w.+@=-]{1,255}")


GIT_LFS = b"version https://git-lfs"
"""The first bytes of a Git LFS pointer, which replaces a file that was not fetched (git-lfs `docs/spec.md`)."""


def refuse_git_lfs(head: bytes, name: str) -> None:
    """Raises UnsupportedInput if `head`, the first bytes of a file, is a Git LFS pointer."""
    if head.startswith(GIT_LFS):
        raise UnsupportedInput(
            f"`{name}` is a Git LFS pointer: the file itself was not fetched",
            hint="fetch it with `git lfs pull`, or download the folder again",
        )


class PointerTree(Protocol):
    """The files in which a pointer is followed; paths are strings with `/`."""

    def exists(self, path: str) -> bool:
        """Whether a file or folder exists."""

    def head(self, path: str) -> bytes | None:
        """The first `TEXT_LIMIT + 1` bytes of a file, None for a folder."""

    def roots(self, path: str) -> Iterator[str]:
        """Possible roots of the bucket that contains `path`, the most likely first."""


def follow(path: str, tree: PointerTree) -> str:
    """Resolves a pointer, or a file that has only one; InputRefused without target, MalformedInput for a circle."""
    seen: list[str] = []
    while len(seen) < HOPS:
        if not tree.exists(path) and tree.exists(path + SUFFIX):
            path += SUFFIX
        target = _target(path, tree)
        if target is None:
            return path
        if path in seen:
            break
        seen.append(path)
        path = _find(path, target, tree)
    raise MalformedInput(
        f"`{PurePosixPath(seen[0]).name}` is a circle of pointers, or a chain of more than {HOPS}",
        hint="name the checkpoint itself",
    )


def _target(path: str, tree: PointerTree) -> str | None:
    """The target of the pointer at `path`, None if it is not a pointer."""
    name = PurePosixPath(path).name
    head = tree.head(path) if name.endswith(SUFFIX) and tree.exists(path) else None
    if head is None:
        return None
    try:
        text = head.decode().strip()
    except UnicodeDecodeError:
        text = ""
    if not text or len(head) > TEXT_LIMIT or not text.isprintable():
        raise MalformedInput(f"`{name}` is not a pointer: it should contain the name of one object", hint=NAME_IT)
    if text.startswith("/") or ":" in text or "\\" in text or ".." in PurePosixPath(text).parts:
        raise MalformedInput(f"`{name}` points to {text[:80]!r}, outside of its bucket", hint=NAME_IT)
    return text


NAME_IT = "name the checkpoint itself instead of the pointer"


def _find(path: str, target: str, tree: PointerTree) -> str:
    """`target` under a root of the bucket, or next to the pointer where only the two were copied."""
    folder, _, name = path.rpartition("/")
    places = [f"{root}/{target}" for root in tree.roots(folder)]
    places.append(f"{folder}/{PurePosixPath(target).name}" if folder else PurePosixPath(target).name)
    for place in places:
        if tree.exists(place) or tree.exists(place + SUFFIX):
            return place
    raise InputRefused(
        f"`{name}` points to `{target}`, which does not exist",
        hint="fetch it, too, under the same path from the root of the bucket, or name the checkpoint itself",
    )


class LocalTree:
    """Files on the disk; any folder above the pointer may be the bucket's root, except the root of the disk."""

    def exists(self, path: str) -> bool:
        return os.path.exists(path)  # False, too, for a name that is too long

    def head(self, path: str) -> bytes | None:
        if not Path(path).is_file():
            return None
        with open(path, "rb") as file:
            return file.read(TEXT_LIMIT + 1)

    def roots(self, path: str) -> Iterator[str]:
        """The nearest first."""
        folder = Path(path).absolute()
        yield from (str(place) for place in (folder, *folder.parents) if place != place.parent)


def follow_local(path: Path) -> Path:
    """Resolves a path on the disk, see `follow`; a path that does not exist is returned unchanged."""
    if path.is_file() and (target := _copied_link(path)):
        return target
    found = follow(path.as_posix(), LocalTree())
    return path if found == path.as_posix() else Path(found)


def _copied_link(path: Path) -> Path | None:
    """The target of a symbolic link that git or an archive copied as a text file, None if it is not one."""
    if path.stat().st_size > TEXT_LIMIT or path.name.endswith(SUFFIX):
        return None
    text = path.read_bytes().decode("latin-1").strip()
    target = path.parent / text if PLAIN_NAME.fullmatch(text) and text not in (".", "..", path.name) else None
    return target if target and target.exists() else None
