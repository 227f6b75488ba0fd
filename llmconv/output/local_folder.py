"""LocalFolder: a folder on this machine as a Destination, made as a hidden folder next to OUT.

    .OUT.llmconv-partial/     lock, journal.jsonl, finished files, one `.part` file
    └── commit: fsync, then rename to OUT (exchanged in one call where OUT exists and `--overwrite` was given)

A reader never sees a partial OUT. After kill -9 the folder is either gone, or `--resume` continues it.

While several processes, perhaps of several hosts, write shards (SharedFolder), the folder contains the lock (shared),
finished files, and a journal-<hash of a name>.jsonl for each process. None of them publishes: a StagedFolder does,
which gets the lock only when they have ended.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from llmconv.errors import InputRefused, OutputFailed
from llmconv.files import source_file
from llmconv.files.copying import can_clone, copy_file
from llmconv.files.safe_folder import FULL, NOFOLLOW, Folder, Link, NewFile, is_inner, parents_made, require_parents
from llmconv.files.sources import PARTIAL
from llmconv.output.manifest import MANIFEST, Manifest, file_entry, link_entry, read_manifest
from llmconv.output.plan import (
    Destination,
    Plan,
    Shard,
    UnfinishedOutput,
    check_copy,
    failing_safely,
    require_unchanged,
    stream_shard,
)
from llmconv.progress import say


@dataclass(frozen=True)
class LocalFolder(Destination):
    """The folder at `address`, which several processes can write; a rename leaves nothing to tidy."""

    address: Path

    def is_complete(self) -> bool:
        try:
            files = read_manifest(self.address).files
            same = all(_is_as_recorded(self.address / name, entry) for name, entry in files.items())
        except (OSError, InputRefused):
            return False
        return bool(files) and same and not partial_folder(self.address).exists()

    def require_free(self, overwrite: bool, inputs: Sequence[Path] = (), *, resume: bool = False) -> None:
        """See `Destination`; also refuses a place below a file, and a name that is too long for the file system."""
        output = self.address
        require_parents(output)
        # names that the file system cannot hold, with what the partial folder adds
        most = os.pathconf(_home(output), "PC_NAME_MAX")
        longest = max(len(os.fsencode(name)) for name in (partial_folder(output).name, *output.absolute().parent.parts))
        if 0 < most < longest:
            size = f"{longest} bytes with what is added while it is made, {most} are possible"
            raise InputRefused(f"the name of `{output}` is too long: {size}", hint="choose a shorter `-o`")
        if around := [path for path in inputs if path.resolve() in output.resolve().parents]:
            what = f"`{output}` is inside the input `{around[0]}`"
            raise InputRefused(what, hint="choose an `-o` that is not inside an input")
        if not os.path.lexists(output):
            return
        if not overwrite and self.is_complete():
            if resume:
                return
            message = f"`{output}` already exists and is complete"
            raise InputRefused(message, hint="choose another `-o`, or give `--overwrite` to make it again")
        sources = [path.resolve() for path in inputs]
        if not overwrite:
            try:
                ways = "" if _why_kept(output, sources) else ", or give `--overwrite`"
            except InputRefused:  # its manifest is invalid
                ways = ""
            raise InputRefused(f"`{output}` already exists", hint=f"choose another `-o`{ways}")
        if problem := _why_kept(output, sources):
            what = f"`{output}` {problem}, so it is not overwritten"
            is_input = problem == CONTAINS_INPUT
            raise InputRefused(what, hint="choose another `-o`" + ("" if is_input else ", or remove it yourself"))

    def require_space(self, plan: Plan) -> None:
        """See `Destination`; what an interrupted run wrote is kept or freed."""
        held = sum(map(_bytes_on_disk, partial_folder(self.address).glob("*")))
        require_space(self.address, self.space_needed(plan) - held)

    def space_needed(self, plan: Plan) -> int:
        """See `Destination`; clones need none."""
        source = next((shard.copy_of for shard in plan.shards if shard.copy_of), None)
        if source and can_clone(source, _home(self.address)):
            return sum(shard.nbytes for shard in plan.shards if not shard.copy_of)
        return plan.nbytes

    def manifest(self) -> Manifest:
        return read_manifest(self.address)

    def read(self, name: str) -> bytes | None:
        path = self.address / name
        return path.read_bytes() if path.is_file() else None

    def begin(self, key: str, files: Sequence[str], *, overwrite: bool, resume: bool) -> StagedFolder:
        return StagedFolder(self.address, key=key, overwrite=overwrite, resume=resume)

    def share(self, key: str, files: Sequence[str], mine: Collection[str]) -> SharedFolder:
        return SharedFolder(self.address, key=key, files=mine)

    def finish(self, key: str, files: Sequence[str], *, overwrite: bool, trusted: bool) -> StagedFolder:
        return StagedFolder(self.address, key=key, overwrite=overwrite, resume=True, trusted=trusted)


def _home(output: Path) -> Path:
    """The nearest existing folder above `output`."""
    return next(folder for folder in output.absolute().parents if os.path.isdir(folder))


def require_space(output: Path, needed: int, home: Path | None = None) -> None:
    """Raises InputRefused if fewer than `needed` bytes are free on the disk of `output`.

    A file system that reports no size (`/proc`, some of FUSE) is not asked. `home` is an existing folder on that disk
    (default: the nearest above `output`).
    """
    usage = shutil.disk_usage(home or _home(output))
    if needed > usage.free and usage.total:
        problem = f"no space left: `{output}` needs {needed:,} bytes, {usage.free:,} are free"
        raise InputRefused(problem, hint="free some space, or choose an output on another disk")


JOURNAL = "journal.jsonl"
JOURNALS = "journal*.jsonl"  # the journal of a run, and those of the processes that work for one
SIGNATURE = "signature"  # field of a journal entry: what identifies the file on this machine without reading it
LOCK = "lock"
LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC | NOFOLLOW
JOURNAL_BYTES = 256 << 20


class StagedFolder(UnfinishedOutput):
    """Builds a hidden folder and commits it by rename.

    `key` is the fingerprint of sources and options; `resume` keeps finished files of a journal with the same; if
    `trusted`, a file whose signature is that of its journal entry is not hashed again. Raises InputRefused or
    OutputFailed if `output` exists when the folder is committed, and may not be replaced (`require_free` checks
    before); OutputFailed if another run has locked the folder, or any I/O fails (finished files stay for `--resume`).
    """

    lock_kind = fcntl.LOCK_EX  # `flock(2)`: one run at a time

    def __init__(self, output: Path, *, key: str, overwrite: bool, resume: bool, trusted: bool = False) -> None:
        self.output, self.path = output, partial_folder(output)
        self.finished = {}
        self._key, self._overwrite, self._resume, self._trusted = key, overwrite, resume, trusted
        self._left = False

    def __enter__(self) -> Self:
        taken = OutputFailed(f"another run is writing `{self.output}`", hint="wait until it has ended")
        with ExitStack() as stack, failing_safely():
            stack.enter_context(parents_made(self.path))
            self._folder = stack.enter_context(_open_partial(self.path))
            # locks the file and, where supported, the folder: a run removes the file shortly before it ends
            if (found := self._folder.find(LOCK)) and not stat.S_ISREG(found.st_mode):
                self._folder.remove(LOCK)
            lock = os.open(LOCK, LOCK_FLAGS, 0o666, dir_fd=self._folder.descriptor)
            stack.callback(os.close, lock)
            try:
                fcntl.flock(lock, self.lock_kind | fcntl.LOCK_NB)
                _lock_folder(self._folder.descriptor, self.lock_kind)
            except BlockingIOError as error:
                raise taken from error
            if not self._folder.is_at(self.path):
                raise taken
            self._open_journal()
            self._disposable, self._open = self._folder, stack.pop_all()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Keeps the folder after an I/O error or an interrupt if a file is finished, else removes it."""
        try:
            resumable = isinstance(error, OSError | OutputFailed | KeyboardInterrupt)
            if not self._left and not (resumable and self.finished) and self._disposable.is_at(self.path):
                shutil.rmtree(self.path, ignore_errors=True)
        finally:
            self._open.__exit__(kind, error, trace)

    def leave(self) -> None:
        self._left = True

    def _open_journal(self) -> None:
        if self._resume:
            # the files whose sha256 is unchanged, of all journals with this key
            lines = [line for path in sorted(self.path.glob(JOURNALS)) for line in self._lines(path.name)]
            entries = [{n: one for n, one in line.items() if n != SIGNATURE} for line in lines if self._intact(line)]
            self.finished = {entry.pop("file"): entry for entry in entries}
            if not (self.finished or self._trusted) and (self.path / JOURNAL).is_file():
                say("nothing to resume: no finished file, or other inputs or options; starting over")
        kept = {self.path / name for name in (*self.finished, LOCK)}
        for item in sorted(self.path.rglob("*"), reverse=True):
            if item.is_dir() and not item.is_symlink():
                if not any(item in path.parents for path in kept):
                    item.rmdir()
            elif item not in kept:
                item.unlink()
        self._folder.write(JOURNAL, self._encode_journal())

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
            if self._trusted and signature(self.path / name) == line.get(SIGNATURE, ()):
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
        self.finished[name] = entry  # also keeps the folder if the journal cannot be written
        with failing_safely():
            self._folder.write(JOURNAL, self._encode_journal())

    def make_shard(self, shard: Shard, advance: Callable[[int], None]) -> dict[str, Any]:
        """Copies or streams one file and returns its manifest entry; see `UnfinishedOutput`."""
        with failing_safely(), self.new_file(shard.name) as new:
            if shard.copy_of:
                entry = copy_file(shard.copy_of, new.file, advance)
                require_unchanged(new.path, shard)
            else:
                entry = stream_shard(new.file, shard, advance)
            new.place()
        if shard.copy_of:
            check_copy(self.path / shard.name, shard)
        return entry

    def release(self, name: str, sources: Sequence[Path]) -> None:
        """Gives back the pages of the file `name` and of the sources; see `UnfinishedOutput`."""
        source_file.forget([self.path / name, *sources])

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
            problem = f"`{self.path}` was moved or replaced while `{self.output}` was being made"
            raise OutputFailed(problem, hint="write to a folder that no other process changes")
        if self._overwrite and os.path.lexists(self.output):
            LocalFolder(self.output).require_free(overwrite=True)
            replaced = self._open.enter_context(Folder.open_own(self.output))
            rename_at(self.path, self.output, RENAME_EXCHANGE)
            self._disposable = replaced
            return
        try:
            rename_at(self.path, self.output, RENAME_NOREPLACE)
        except FileExistsError as error:
            message = f"`{self.output}` appeared while it was being made"
            raise OutputFailed(message, hint="move it away and run again with `--resume`") from error


def _open_partial(path: Path) -> Folder:
    """Opens the partial folder, new or of an earlier run; OutputFailed, InputRefused for a link or another user's."""
    try:
        path.mkdir()
        return Folder.open_own(path)
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno in FULL:
            raise
        problem = f"no folder can be made in `{path.parent}`: {error.strerror or error}"
        raise OutputFailed(problem, hint="choose an `-o` in a folder of your own") from error
    with ExitStack() as stack:
        folder = stack.enter_context(Folder.open_own(path))
        with folder.begin("owner") as own:
            same = os.fstat(own.file.fileno()).st_uid == os.fstat(folder.descriptor).st_uid
        if not same:
            message = f"`{path}` belongs to another user"
            raise InputRefused(message, hint="remove it, or choose an `-o` in a folder of your own")
        stack.pop_all()
    return folder


def _lock_folder(descriptor: int, kind: int) -> None:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # some network disks lock only files
        return


def _is_as_recorded(path: Path, entry: dict[str, Any]) -> bool:
    """Whether a file has the size, or a link the target, of its entry in the manifest."""
    if "link" in entry:
        return path.is_symlink() and os.readlink(path) == entry["link"]
    return bool(entry.get("bytes") == path.stat().st_size)


def _bytes_on_disk(file: Path) -> int:
    try:
        return file.lstat().st_blocks * 512
    except FileNotFoundError:  # another process of the same run has just renamed it
        return 0


def partial_folder(output: Path) -> Path:
    return output.absolute().parent / f".{output.absolute().name}{PARTIAL}"


CONTAINS_INPUT = "contains an input"


def _why_kept(output: Path, inputs: Sequence[Path]) -> str:
    """The reason not to replace a folder, empty if there is none."""
    if output.is_symlink():
        return "is a symbolic link"
    if not output.is_dir():
        return "is not a folder"
    if any(path.is_relative_to(output.resolve()) for path in inputs):
        return CONTAINS_INPUT
    if (entries := [path for path in output.rglob("*") if not path.is_dir()]) and not (output / MANIFEST).is_file():
        return "was not made by llmconv"
    known = {MANIFEST, *read_manifest(output).files}
    foreign = sorted(str(path.relative_to(output)) for path in entries if str(path.relative_to(output)) not in known)
    return f"also contains `{foreign[0]}`, which llmconv did not make" if foreign else ""


class SharedFolder(StagedFolder):
    """A StagedFolder that others write into at the same time; of its own shards `files`, it keeps finished ones."""

    lock_kind = fcntl.LOCK_SH

    def __init__(self, output: Path, *, key: str, files: Collection[str]) -> None:
        super().__init__(output, key=key, overwrite=False, resume=True)
        self._files = files

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
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
        raise NotImplementedError("a StagedFolder publishes what several processes have written")


def signature(path: Path) -> list[int]:
    """`version_of` a file, as JSON has it."""
    return [*source_file.version_of(path.stat())]


def _journal(name: str) -> str:
    return f"journal-{hashlib.sha256(name.encode()).hexdigest()[:16]}.jsonl"


class SingleFile(UnfinishedOutput):
    """One file, which appears under its name when it is whole; what a killed run left is removed by the next.

    Raises InputRefused for something else than a file at `path`, OutputFailed for a file that appeared there since,
    unless it `replaces` one, or if writing fails.
    """

    def __init__(self, path: Path, *, replaces: bool) -> None:
        self.path, self.finished, self._replaces = path, {}, replaces

    def __enter__(self) -> Self:
        with ExitStack() as stack, failing_safely():
            stack.enter_context(parents_made(self.path))
            self._folder = stack.enter_context(Folder.open(self.path.parent))
            self._folder.sweep()
            self._new = stack.enter_context(self._folder.begin(self.path.name))
            self._open = stack.pop_all()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._open.__exit__(kind, error, trace)

    def make_shard(self, shard: Shard, advance: Callable[[int], None]) -> dict[str, Any]:
        with failing_safely():
            return stream_shard(self._new.file, shard, advance)

    def record(self, name: str, entry: dict[str, Any]) -> None:
        if not self._replaces and self._folder.find(self.path.name):
            raise OutputFailed(f"`{self.path}` appeared while it was being made", hint="choose another `-o`")
        with failing_safely():
            self._new.place()
            self._folder.sync()

    def write_file(self, name: str, content: bytes | Link) -> None:
        raise NotImplementedError("a single file has no others around it")

    def commit(self, manifest: Manifest) -> None:
        raise NotImplementedError("a single file is complete when it is recorded")


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
    """Renames `new` to `old` in one call, by `renameat2(2)` of Linux or `renamex_np(2)` of macOS; elsewhere in several.

    RENAME_EXCHANGE swaps both, so that `old` is never absent; RENAME_NOREPLACE raises FileExistsError if `old` exists.
    Raises OSError for any other failure.
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
