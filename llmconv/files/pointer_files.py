"""Pointer files: what Composer leaves in a bucket, where there are no symbolic links, and Git where files are large.

Layout (mosaicml/composer `utils/file_helpers.py`, `get_file`, `create_symlink_file`): a text file `NAME.symlink` holds
the name of an object, counted from the root of the bucket; where `NAME` is not there, `NAME.symlink` stands for it.
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
TEXT_LIMIT = 1024
"""Bytes of an object's name; those of S3 are the longest."""

PLAIN_NAME = re.compile(r"[\w.+@=-]{1,255}")


GIT_LFS = b"version https://git-lfs"
"""How the text begins that Git LFS leaves in the place of a file which was not fetched (git-lfs `docs/spec.md`)."""


def refuse_git_lfs(head: bytes, name: str) -> None:
    """Refuses the pointer that Git LFS leaves in the place of a large file.

    Args:
        head: the first bytes of a file.
        name: of the file, for the message.

    Raises:
        UnsupportedInput: it is such a pointer.
    """
    if head.startswith(GIT_LFS):
        raise UnsupportedInput(
            f"`{name}` is a Git LFS pointer: the file itself was not fetched",
            hint="fetch it with `git lfs pull`, or download the folder again",
        )


class Tree(Protocol):
    """The files among which a pointer is followed; paths are strings with `/`."""

    def exists(self, path: str) -> bool:
        """Whether a file or folder is there."""

    def head(self, path: str) -> bytes | None:
        """The first `TEXT_LIMIT + 1` bytes of a file, None for a folder."""

    def roots(self, path: str) -> Iterator[str]:
        """What may be the root of the bucket that `path` lies in, the likeliest first."""


def follow(path: str, tree: Tree) -> str:
    """The path that `path` stands for: itself, unless it is a pointer or only its pointer is there.

    Raises:
        InputRefused: what a pointer names is not there.
        MalformedInput: pointers in a circle, or one that names a place outside of its bucket.
    """
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
        f"`{PurePosixPath(seen[0]).name}` leads from pointer to pointer without an end",
        hint="name the checkpoint itself",
    )


def _target(path: str, tree: Tree) -> str | None:
    """What the pointer at `path` names, None where it is no pointer."""
    name = PurePosixPath(path).name
    head = tree.head(path) if name.endswith(SUFFIX) and tree.exists(path) else None
    if head is None:
        return None
    try:
        text = head.decode().strip()
    except UnicodeDecodeError:
        text = ""
    if not text or len(head) > TEXT_LIMIT or not text.isprintable():
        raise MalformedInput(f"`{name}` is no pointer: it should hold the name of one object", hint=NAME_IT)
    if text.startswith("/") or ":" in text or "\\" in text or ".." in PurePosixPath(text).parts:
        raise MalformedInput(f"`{name}` points to {text[:80]!r}, outside of its bucket", hint=NAME_IT)
    return text


NAME_IT = "name the checkpoint itself instead of the pointer"


def _find(path: str, target: str, tree: Tree) -> str:
    """`target` under a root of the bucket, or beside the pointer where only the two were copied."""
    folder, _, name = path.rpartition("/")
    places = [f"{root}/{target}" for root in tree.roots(folder)]
    places.append(f"{folder}/{PurePosixPath(target).name}" if folder else PurePosixPath(target).name)
    for place in places:
        if tree.exists(place) or tree.exists(place + SUFFIX):
            return place
    raise InputRefused(
        f"`{name}` points to `{target}`, which is not there",
        hint="fetch that too, under the same name from the root of the bucket on, or name the checkpoint itself",
    )


class LocalTree:
    """Files on the disk; the root of the bucket may be any folder above the pointer but the root of the disk."""

    def exists(self, path: str) -> bool:
        """Whether a file or folder is there."""
        return os.path.exists(path)  # False, too, for a name that is too long

    def head(self, path: str) -> bytes | None:
        """See `Tree`."""
        if not Path(path).is_file():
            return None
        with open(path, "rb") as file:
            return file.read(TEXT_LIMIT + 1)

    def roots(self, path: str) -> Iterator[str]:
        """The nearest first."""
        folder = Path(path).absolute()
        yield from (str(place) for place in (folder, *folder.parents) if place != place.parent)


def follow_local(path: Path) -> Path:
    """The path on the disk that `path` stands for; see `follow`. A path that is not there is returned as it is."""
    if path.is_file() and (beside := _written_link(path)):
        return beside
    found = follow(path.as_posix(), LocalTree())
    return path if found == path.as_posix() else Path(found)


def _written_link(path: Path) -> Path | None:
    """What a symbolic link names that was copied as a text file, as git and archives do where there are none."""
    if path.stat().st_size > TEXT_LIMIT or path.name.endswith(SUFFIX):
        return None
    text = path.read_bytes().decode("latin-1").strip()
    beside = path.parent / text if PLAIN_NAME.fullmatch(text) and text not in (".", "..", path.name) else None
    return beside if beside and beside.exists() else None
