"""HubState: what a branch of a repository contained when it was looked at, and the hashes that identify files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

SMALL_FILE = 20 << 20
"""Size in bytes up to which git's own hash is computed, too: the Hub keeps larger files as LFS objects only."""

READ_BYTES = 8 << 20


@dataclass(frozen=True)
class FileDigest:
    """A file as the Hub identifies it.

    Attributes:
        size: in bytes.
        sha256: of its content, by which LFS objects are named.
        blob: git's sha1 of it, by which small files are named; empty for large ones.
    """

    size: int
    sha256: str
    blob: str = ""


def digest_of(content: bytes) -> FileDigest:
    """The digest of a small file."""
    return _digest(len(content), [content])


def file_digest(path: Path) -> FileDigest:
    """The digest of a file on the disk."""
    with open(path, "rb", buffering=0) as file:
        return _digest(path.stat().st_size, iter(lambda: file.read(READ_BYTES), b""))


def _digest(size: int, blocks: Iterable[bytes]) -> FileDigest:
    """See git-scm.com/book, Git Objects: a blob is the sha1 of a header and the content."""
    sha256, blob = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    found, small = 0, size <= SMALL_FILE
    for block in blocks:
        found += len(block)
        sha256.update(block)
        if small:
            blob.update(block)
    return FileDigest(found, sha256.hexdigest(), blob.hexdigest() if small else "")


@dataclass(frozen=True)
class HubFile:
    """A file on the Hub.

    Attributes:
        size: in bytes.
        blob: git's sha1 of it, or of its LFS pointer.
        sha256: of its content if it is an LFS object, else empty.
    """

    size: int
    blob: str
    sha256: str = ""

    def is_same(self, file: FileDigest) -> bool:
        """Whether it has the same content."""
        return self.size == file.size and (self.sha256 == file.sha256 if self.sha256 else self.blob == file.blob)


@dataclass(frozen=True)
class HubState:
    """What a branch contained when it was looked at.

    Attributes:
        exists: the repository exists.
        head: its commit, which the next one must follow; of `main` if there is no such branch; empty if unknown.
        has_branch: the branch exists.
        private: who has no access does not see the repository.
        changed: when its last commit was made, in ns since 1970.
        files: by path.
    """

    exists: bool = False
    head: str = ""
    has_branch: bool = False
    private: bool = False
    changed: int = 0
    files: Mapping[str, HubFile] = field(default_factory=dict)

    def differing(self, files: Mapping[str, FileDigest]) -> list[str]:
        """The names among `files` that the branch does not have, or with other content."""
        return [name for name, file in files.items() if name not in self.files or not self.files[name].is_same(file)]


@dataclass(frozen=True)
class Commit:
    """A commit that was made: its hash, its page, and the page of the pull request, empty without one."""

    commit: str
    url: str
    pull_request: str = ""
