"""SharedFolder: the partial folder of a local output while several processes, perhaps of several hosts, write shards.

    .OUT.llmconv-partial/     lock (shared), finished files, journal-<hash of a name>.jsonl for each of them

None of them publishes: a StagedFolder does, which gets the lock only when they have ended.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from llmconv.output.io_errors import failing_safely
from llmconv.output.manifest import Manifest
from llmconv.output.staging import SIGNATURE, StagedFolder


class SharedFolder(StagedFolder):
    """A StagedFolder that others write into at the same time.

    Args:
        output: the folder to make.
        key: fingerprint of sources and options.
        files: names of the shards that this process writes; one that is finished already is kept.
    """

    lock_kind = fcntl.LOCK_SH

    def __init__(self, output: Path, *, key: str, files: Collection[str]) -> None:
        super().__init__(output, key=key, overwrite=False, resume=True)
        self._files = files

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Keeps the folder, whatever happened: others work in it."""
        self._open.close()

    def _open_journal(self) -> None:
        lines = [line for name in self._files for line in self._lines(_journal(name))]
        self.finished = {str(line.pop("file")): line for line in lines if self._intact(line)}

    def record(self, name: str, entry: dict[str, Any]) -> None:
        """Puts the journal entry of a file; see `UnfinishedOutput`."""
        self.finished[name] = entry
        line = {"file": name, SIGNATURE: signature(self.path / name), **entry}
        with failing_safely():
            self._folder.write(_journal(name), f"{json.dumps({'key': self._key})}\n{json.dumps(line)}\n".encode())

    def commit(self, manifest: Manifest) -> None:
        """Not here."""
        raise NotImplementedError("a StagedFolder publishes what several processes have written")


def signature(path: Path) -> list[int]:
    """What identifies a file of this machine: device, inode, size, and times of change in ns."""
    found = path.stat()
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _journal(name: str) -> str:
    return f"journal-{hashlib.sha256(name.encode()).hexdigest()[:16]}.jsonl"
