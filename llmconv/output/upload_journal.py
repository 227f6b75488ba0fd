"""UploadJournal: what an upload has sent so far, in `~/.cache/llmconv/uploads/`, where the shard to send is made, too.

    KEY.jsonl                 one line per file that the Hub has: name, size, sha256; locked while a run is at work
    .llmconv-….part           the shard that is being made or sent

It contains neither tensors nor credentials; the entries of an unfinished upload are worth nothing to anyone else.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from llmconv.errors import OutputFailed
from llmconv.files.named_file import is_inner
from llmconv.files.safe_folder import Folder, NewFile
from llmconv.files.user_cache import user_cache

JOURNAL_BYTES = 64 << 20
"""Largest size, in bytes, of a journal that is read."""


def uploads_folder() -> Path:
    """The folder of journals and of shards to send: `$XDG_CACHE_HOME/llmconv/uploads`.

    Raises:
        InputRefused: the user has no cache.
    """
    return user_cache("uploads")


class UploadJournal:
    """The journal of one upload, which it locks.

    Args:
        key: fingerprint of inputs, options and place.
        resume: keep the entries of an interrupted run.

    Raises:
        OutputFailed: another run has locked it.
    """

    def __init__(self, key: str, *, resume: bool) -> None:
        home = uploads_folder()
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._name = f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.jsonl"
        self._folder = Folder.open_own(home)
        self._folder.sweep()
        self._file = self._locked()
        self.entries = self._read() if resume else {}
        self._write()

    def _locked(self) -> BinaryIO:
        file = self._folder.open_to_append(self._name)
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise OutputFailed("another run uploads the same output", hint="wait until it has ended") from error
        return file

    def _read(self) -> dict[str, dict[str, Any]]:
        content = self._folder.read(self._name, JOURNAL_BYTES) or b""
        found = {}
        for line in content.splitlines():
            try:
                name, size, sha256 = json.loads(line)
            except (ValueError, TypeError, RecursionError):  # cut off by a crash
                continue
            if isinstance(name, str) and is_inner(name) and isinstance(size, int) and _is_sha256(sha256):
                found[name] = {"bytes": size, "sha256": sha256}
        return found

    def _write(self) -> None:
        os.ftruncate(self._file.fileno(), 0)
        for name, entry in self.entries.items():
            self._append(name, entry)

    def add(self, name: str, entry: dict[str, Any]) -> None:
        """Records that the Hub has a file."""
        self.entries[name] = entry
        self._append(name, entry)

    def _append(self, name: str, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps([name, entry["bytes"], entry["sha256"]]).encode() + b"\n")
        os.fsync(self._file.fileno())

    def new_file(self) -> NewFile:
        """An empty file to write; it is removed at the end of the block."""
        return self._folder.begin("shard")

    def close(self, *, keep: bool) -> None:
        """Unlocks the journal, and removes it unless an interrupted run is to `keep` it."""
        if not keep:
            self._folder.remove(self._name)
        self._file.close()
        self._folder.close()


def _is_sha256(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and not set(value) - set("0123456789abcdef")
