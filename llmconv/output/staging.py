"""StagedFolder: a hidden folder next to OUT that becomes OUT in one rename.

    .OUT.llmconv-partial/     lock, journal.jsonl, finished files, one `.part` file
    └── commit: fsync, then rename to OUT (exchanged in one call where OUT exists and `--overwrite` was given)

A reader never sees a partial OUT. After kill -9 the folder is either gone, or `--resume` continues it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from llmconv.errors import InputRefused, OutputFailed
from llmconv.files import page_cache
from llmconv.files.named_file import is_inner
from llmconv.files.output_parents import parents_made
from llmconv.files.renaming import RENAME_EXCHANGE, RENAME_NOREPLACE, rename_at, sync_folder
from llmconv.files.safe_folder import FULL, NOFOLLOW, Folder, Link, NewFile
from llmconv.output.existing_folder import partial_folder, require_free
from llmconv.output.io_errors import failing_safely
from llmconv.output.manifest import MANIFEST, Manifest, file_entry, link_entry
from llmconv.output.plan import Shard
from llmconv.output.streaming import stream_shard
from llmconv.output.unchanged_file import check_copy, copy_unchanged
from llmconv.progress import say

JOURNAL = "journal.jsonl"
JOURNALS = "journal*.jsonl"
"""The journal of a run, and those of the processes that work for one; see `shared_staging`."""

SIGNATURE = "signature"
"""Field of a journal entry: what identifies the file on this machine without reading it."""

LOCK = "lock"
LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC | NOFOLLOW
JOURNAL_BYTES = 256 << 20


class StagedFolder:
    """Builds a hidden folder and commits it by rename.

    Args:
        output: the folder to make.
        key: fingerprint of sources and options; a journal with another key is not resumed.
        overwrite: an existing `output` may be replaced.
        resume: keep finished files of an interrupted run with the same key.
        trusts: the signature of a file; one whose signature is that of its journal entry is not hashed again.

    Raises:
        InputRefused, OutputFailed: `output` exists when the folder is committed, and may not be replaced; see
            `require_free` for asking before.
        OutputFailed: another run has locked the folder, or any I/O fails (finished files stay for `--resume`).
    """

    lock_kind = fcntl.LOCK_EX
    """`flock(2)`: one run at a time."""

    def __init__(
        self, output: Path, *, key: str, overwrite: bool, resume: bool, trusts: Callable[[Path], object] | None = None
    ) -> None:
        self.output = output
        self.path = partial_folder(output)
        self.finished: dict[str, dict[str, Any]] = {}
        self._key, self._overwrite = key, overwrite
        self._resume, self._trusts = resume, trusts
        self._lock = -1
        self._left = False

    def __enter__(self) -> StagedFolder:
        with ExitStack() as stack, failing_safely():
            stack.enter_context(parents_made(self.path))
            self._folder = stack.enter_context(_open_partial(self.path))
            stack.callback(self._close_lock)
            self._take_lock()
            self._open_journal()
            self._disposable, self._open = self._folder, stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Keeps the folder after an I/O error or an interrupt, removes it after anything else."""
        try:
            resumable = isinstance(error, OSError | OutputFailed | KeyboardInterrupt)
            if not self._left and not (resumable and self.finished) and self._disposable.is_at(self.path):
                shutil.rmtree(self.path, ignore_errors=True)
        finally:
            self._open.__exit__(kind, error, trace)

    def leave(self) -> None:
        """Keeps the folder for other processes; see `UnfinishedOutput`."""
        self._left = True

    def _close_lock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _take_lock(self) -> None:
        """Locks the file and, where supported, the folder: a run removes the file shortly before it ends."""
        found = self._folder.find(LOCK)
        if found and not stat.S_ISREG(found.st_mode):
            self._folder.remove(LOCK)
        self._lock = os.open(LOCK, LOCK_FLAGS, 0o666, dir_fd=self._folder.descriptor)
        try:
            fcntl.flock(self._lock, self.lock_kind | fcntl.LOCK_NB)
            _lock_folder(self._folder.descriptor, self.lock_kind)
        except BlockingIOError as error:
            raise self._taken() from error
        if not self._folder.is_at(self.path):
            raise self._taken()

    def _taken(self) -> OutputFailed:
        return OutputFailed(f"another run is writing `{self.output}`", hint="wait until it has ended")

    def _open_journal(self) -> None:
        if self._resume:
            self.finished = self._read_journal()
            if not (self.finished or self._trusts) and (self.path / JOURNAL).is_file():
                say("nothing to resume: no finished file, or other inputs or options; starting over")
        kept = {self.path / name for name in (*self.finished, LOCK)}
        for item in sorted(self.path.rglob("*"), reverse=True):
            if item.is_dir() and not item.is_symlink():
                if not any(item in path.parents for path in kept):
                    item.rmdir()
            elif item not in kept:
                item.unlink()
        self._folder.write(JOURNAL, self._encode_journal())

    def _read_journal(self) -> dict[str, dict[str, Any]]:
        """The finished files whose sha256 is unchanged, of all journals with this key."""
        lines = [line for path in sorted(self.path.glob(JOURNALS)) for line in self._lines(path.name)]
        return {line.pop("file"): _entry(line) for line in lines if self._intact(line)}

    def _lines(self, journal: str) -> list[Any]:
        """The entries of a journal; none if the key differs."""
        try:
            text = (self._folder.read(journal, JOURNAL_BYTES) or b"").decode()
            lines = [json.loads(line) for line in text.splitlines()]
        except (ValueError, RecursionError):
            return []
        return lines[1:] if lines and lines[0] == {"key": self._key} else []

    def _intact(self, line: Any) -> bool:
        if not isinstance(line, dict) or not isinstance(name := line.get("file"), str) or not is_inner(name):
            return False
        try:
            if self._trusts and self._trusts(self.path / name) == line.get(SIGNATURE, ()):
                return True
            with self._folder.holding(name) as (folder, last), folder.open_file(last) as file:
                same = os.fstat(file.fileno()).st_size == line.get("bytes") and "sha256" in line
                return same and bool(hashlib.file_digest(file, "sha256").hexdigest() == line["sha256"])
        except (OSError, InputRefused):
            return False

    def _encode_journal(self) -> bytes:
        lines = [{"key": self._key}] + [{"file": name, **entry} for name, entry in self.finished.items()]
        return "".join(json.dumps(line) + "\n" for line in lines).encode()

    def record(self, name: str, entry: dict[str, Any]) -> None:
        """Records in the journal that the file `name` is complete on the disk."""
        self.finished[name] = entry
        with failing_safely():
            self._folder.write(JOURNAL, self._encode_journal())

    def make_shard(self, shard: Shard, advance: Callable[[int], None]) -> dict[str, Any]:
        """Copies or streams one file and returns its manifest entry; see `UnfinishedOutput`."""
        with failing_safely(), self.new_file(shard.name) as new:
            entry = copy_unchanged(new, shard, advance) if shard.copy_of else stream_shard(new.file, shard, advance)
            new.place()
        if shard.copy_of:
            check_copy(self.path / shard.name, shard)
        return entry

    def release(self, name: str, sources: Sequence[Path]) -> None:
        """Gives back the pages of the file `name` and of the sources; see `UnfinishedOutput`."""
        page_cache.forget([self.path / name, *sources])

    @contextmanager
    def new_file(self, name: str) -> Iterator[NewFile]:
        """The file `name`, such as `a` or `rank_0/a`, to write; the caller calls `place`."""
        assert is_inner(name), name
        with self._folder.holding(name, make=True) as (folder, last), folder.begin(last) as new:
            yield new

    def write_file(self, name: str, content: bytes | Link) -> None:
        """Writes one small file, or a relative symbolic link; see `new_file` for `name`."""
        assert is_inner(name), name
        with failing_safely():
            self._folder.write_together({name: content})
            self.record(name, file_entry(content) if isinstance(content, bytes) else link_entry(content.target))

    def commit(self, manifest: Manifest) -> None:
        """Adds the manifest and makes the folder visible as `output`."""
        manifest.files = dict(self.finished)
        with failing_safely():
            for folder in {(self.path / name).parent for name in self.finished} - {self.path}:
                sync_folder(folder)
            self._folder.write(MANIFEST, manifest.encode())
            self._folder.remove(JOURNAL)
            self._folder.remove(LOCK)
            self._publish()
            sync_folder(self.path.parent)

    def _publish(self) -> None:
        """Renames; OUT may have appeared since the run began, or the partial folder may have been moved."""
        if not self._folder.is_at(self.path):
            raise OutputFailed(
                f"`{self.path}` was moved or replaced while `{self.output}` was being made",
                hint="write to a folder that no other process changes",
            )
        if self._overwrite and os.path.lexists(self.output):
            require_free(self.output, overwrite=True)
            replaced = self._open.enter_context(Folder.open_own(self.output))
            rename_at(self.path, self.output, RENAME_EXCHANGE)
            self._disposable = replaced
            return
        try:
            rename_at(self.path, self.output, RENAME_NOREPLACE)
        except FileExistsError as error:
            raise OutputFailed(
                f"`{self.output}` appeared while it was being made", hint="move it away and run again with `--resume`"
            ) from error


def _entry(line: dict[str, Any]) -> dict[str, Any]:
    """The manifest entry of a line of the journal."""
    return {name: value for name, value in line.items() if name != SIGNATURE}


def _open_partial(path: Path) -> Folder:
    """Opens the partial folder: a new one, or that of an earlier run of the same user.

    Raises:
        InputRefused: it is a link, or belongs to another user, who could change its files.
        OutputFailed: none can be made there.
    """
    try:
        path.mkdir()
        return Folder.open_own(path)
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno in FULL:
            raise
        raise OutputFailed(
            f"no folder can be made in `{path.parent}`: {error.strerror or error}",
            hint="choose an `-o` in a folder of your own",
        ) from error
    with ExitStack() as stack:
        folder = stack.enter_context(Folder.open_own(path))
        with folder.begin("owner") as own:
            same = os.fstat(own.file.fileno()).st_uid == os.fstat(folder.descriptor).st_uid
        if not same:
            raise InputRefused(
                f"`{path}` belongs to another user", hint="remove it, or choose an `-o` in a folder of your own"
            )
        stack.pop_all()
    return folder


def _lock_folder(descriptor: int, kind: int) -> None:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # some network disks lock only files
        return
