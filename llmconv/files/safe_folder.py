"""Folder: an open folder descriptor; writes files in it that planted links cannot redirect.

A model folder may come from a stranger. So every file that llmconv writes into a folder is created anew under a random
name (`O_CREAT | O_EXCL | O_NOFOLLOW`) relative to the folder's descriptor, and renamed to its final name within that
descriptor. An existing file or link of that name is replaced, never opened; a pipe, a device or a folder is refused.
Modes follow the umask.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from tempfile import TemporaryFile
from threading import Lock
from typing import BinaryIO, Self

from llmconv.background import before_exit
from llmconv.errors import InputRefused, MalformedInput, OutputFailed, UnsupportedInput
from llmconv.progress import say

# names of files being written; a killed run leaves them, and the next run removes them
TEMPORARY = re.compile(r"\.llmconv-[0-9a-f]{16}\.part")
NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)  # platforms without it rely on comparing the entry after it is opened
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of a full disk


@dataclass(frozen=True)
class Link:
    """A relative symbolic link, for a client that expects a file in another place."""

    target: str


def refuse_links(files: Mapping[str, bytes | Link]) -> None:
    """Raises UnsupportedInput if one of the files is a link, which a store does not have."""
    if links := [name for name, content in files.items() if isinstance(content, Link)]:
        problem = f"`{links[0]}` would be a symbolic link, which an object store does not have"
        raise UnsupportedInput(problem, hint="write to a local folder, and copy it, links followed, to the store")


# content of a file to write: bytes, a link, or a function that writes into an open file
WritableContent = bytes | Link | Callable[[BinaryIO], object]
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
READ = os.O_RDONLY | os.O_NONBLOCK | NOFOLLOW | os.O_CLOEXEC
APPEND = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | NOFOLLOW | os.O_CLOEXEC
CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | NOFOLLOW | os.O_CLOEXEC


class Folder:
    """An open folder; a context manager. All names are looked up relative to its `descriptor`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self.descriptor = path, descriptor

    @classmethod
    def open(cls, path: Path) -> Folder:
        """Opens the folder at `path`, which the user gave; links are followed. Raises OSError."""
        return cls(path, os.open(path, DIRECTORY))

    @classmethod
    def open_own(cls, path: Path) -> Folder:
        """Opens the folder at `path`, which must not be a link itself; raises InputRefused or OSError."""
        return cls(path, _open_plain_folder(path, None, path))

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the descriptor; further calls do nothing."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def is_at(self, path: Path) -> bool:
        """Whether `path` still is this folder, and not another one or a link to it."""
        try:
            return os.path.samestat(os.lstat(path), os.fstat(self.descriptor))
        except OSError:
            return False

    def inner(self, name: str, *, make: bool = False) -> Folder:
        """Opens a folder inside this one, never through a link; raises InputRefused for a link or a file."""
        if make:
            with suppress(FileExistsError):
                os.mkdir(name, dir_fd=self.descriptor)
        path = self.path / name
        return Folder(path, _open_plain_folder(name, self.descriptor, path))

    @contextmanager
    def holding(self, name: str, *, make: bool = False) -> Iterator[tuple[Folder, str]]:
        """The folder that contains `name`, and the last part of it: for `a/b` the inner folder `a`, and `b`."""
        outer, _, last = name.rpartition("/")
        if not outer:
            yield self, last
            return
        with self.inner(outer, make=make) as folder:
            yield folder, last

    def find(self, name: str) -> os.stat_result | None:
        """The status of the entry `name`, without following a link; None if there is none."""
        try:
            return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def require_replaceable(self, name: str) -> None:
        """Raises InputRefused if `name` exists and is neither a regular file nor a link."""
        if (found := self.find(name)) and not (stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode)):
            problem = f"`{self.path / name}` is {_kind(found.st_mode)}, which is not replaced by a file"
            raise InputRefused(problem, hint="move it out of the way")

    def begin(self, name: str) -> NewFile:
        """Makes a new, empty file, which `place` renames to `name`; raises OSError, and as `require_replaceable`."""
        self.require_replaceable(name)
        temporary = temporary_name()
        descriptor = os.open(temporary, CREATE, 0o666, dir_fd=self.descriptor)
        with suppress(OSError):  # shows other runs that this one is alive; some network disks have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return NewFile(self, name, temporary, os.fdopen(descriptor, "w+b", buffering=0))

    def begin_link(self, name: str, target: str) -> NewEntry:
        """Makes a new symbolic link, which `place` will rename to `name`; see `begin`."""
        self.require_replaceable(name)
        temporary = temporary_name()
        os.symlink(target, temporary, dir_fd=self.descriptor)
        return NewEntry(self, name, temporary)

    def write(self, name: str, content: bytes) -> None:
        """Replaces the file `name`, which may be `a/b`; see `write_together`."""
        self.write_together({name: content})

    def write_together(self, files: Mapping[str, WritableContent]) -> None:
        """Replaces files by name (or `a/b`), all on the disk before the first appears; InputRefused, OSError."""
        with ExitStack() as stack:
            new = [self._prepared(stack, name, content) for name, content in files.items()]
            for entry in new:
                entry.place()
            for entry in new:
                entry.folder.sync()

    def _prepared(self, stack: ExitStack, name: str, content: WritableContent) -> NewEntry:
        """Writes the content to the disk under a temporary name."""
        if (outer := name.rpartition("/")[0]) and not self.find(outer):
            stack.callback(self._remove_empty, outer)
        folder, last = stack.enter_context(self.holding(name, make=True))
        if isinstance(content, Link):
            return stack.enter_context(folder.begin_link(last, content.target))
        new = stack.enter_context(folder.begin(last))
        if callable(content):
            content(new.file)
        else:
            new.write(content)
        new.sync()
        return new

    def _remove_empty(self, name: str) -> None:
        with suppress(OSError):  # it is no longer empty
            os.rmdir(name, dir_fd=self.descriptor)

    def open_file(self, name: str) -> BufferedReader:
        """Opens a regular file for reading, never through a link and without waiting for a pipe; raises OSError."""
        descriptor = os.open(name, READ, dir_fd=self.descriptor)
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or not _same(found, self.find(name)):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "not a regular file", str(self.path / name))
        return os.fdopen(descriptor, "rb")

    def read(self, name: str, limit: int) -> bytes | None:
        """The content of a regular file of at most `limit` bytes; None for anything else, also a link."""
        try:
            with self.open_file(name) as file:
                content = file.read(limit + 1)
        except OSError:
            return None
        return content if len(content) <= limit else None

    def open_to_append(self, name: str) -> BinaryIO:
        """Opens or makes a file that grows over several runs; InputRefused for a link or no regular file; OSError."""
        require_plain(self.path / name)
        descriptor = os.open(name, APPEND, 0o666, dir_fd=self.descriptor)
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and _same(found, self.find(name)):
            return os.fdopen(descriptor, "r+b", buffering=0)
        os.close(descriptor)
        problem = f"`{self.path / name}` has a second name elsewhere (a hard link), so it is not written to"
        raise InputRefused(problem, hint="remove it, or give another name")

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def remove(self, name: str) -> None:
        """Removes a file or link, if it exists."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)

    def remove_inner(self, name: str) -> None:
        """Removes a file or link in this folder or, as `a/b`, in an inner folder, if it exists."""
        with suppress(FileNotFoundError), self.holding(name) as (folder, last):
            folder.remove(last)

    def sweep(self) -> None:
        """Removes half-written files of killed runs."""
        for name in os.listdir(self.descriptor):
            if TEMPORARY.fullmatch(name) and not self._is_being_written(name):
                with suppress(OSError):
                    self.remove(name)

    def _is_being_written(self, name: str) -> bool:
        try:
            descriptor = os.open(name, READ, dir_fd=self.descriptor)
        except OSError:  # a link
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    def sync(self) -> None:
        os.fsync(self.descriptor)


class NewEntry:
    """A file or link under a temporary name, `path`; leaving the context without `place` removes it."""

    def __init__(self, folder: Folder, name: str, temporary: str) -> None:
        self.folder = folder
        self.path = folder.path / temporary
        self._name, self._temporary = name, temporary
        self._placed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self._placed:
            self.folder.remove(self._temporary)
        if isinstance(error, OSError) and error.errno in FULL and error.filename is None:
            error.filename = str(self.folder.path / self._name)  # errors of calls on a descriptor have no name

    def place(self) -> None:
        self.folder.rename(self._temporary, self._name)
        self._placed = True


class NewFile(NewEntry):
    """A new file; `file` is open for writing and reading, unbuffered."""

    def __init__(self, folder: Folder, name: str, temporary: str, file: BinaryIO) -> None:
        super().__init__(folder, name, temporary)
        self.file = file

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.file.close()
        super().__exit__(kind, error, trace)

    def write(self, content: bytes) -> None:
        write_fully(self.file.fileno(), memoryview(content))

    def sync(self) -> None:
        """Writes the content to the disk; call it before `place`."""
        os.fsync(self.file.fileno())


def temporary_name() -> str:
    return f".llmconv-{secrets.token_hex(8)}.part"


def require_plain(path: Path) -> None:
    """Raises InputRefused if a file that the user named exists and is not regular: a link, folder, pipe or device."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return
    if not stat.S_ISREG(mode):
        hint = "give the file that it points to" if stat.S_ISLNK(mode) else "give the name of a file"
        raise InputRefused(f"`{path}` is {_kind(mode)}, so it is not written to", hint=hint)


def _open_plain_folder(name: str | Path, descriptor: int | None, path: Path) -> int:
    """A descriptor of the folder `name` (relative to `descriptor`, if given), which must not be a link."""
    try:
        opened = os.open(name, DIRECTORY | NOFOLLOW, dir_fd=descriptor)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EMLINK):  # the last one is FreeBSD's
            raise _not_a_folder(path) from error
        raise
    if not _same(os.fstat(opened), os.stat(name, dir_fd=descriptor, follow_symlinks=False)):
        os.close(opened)
        raise _not_a_folder(path)
    return opened


def _not_a_folder(path: Path) -> MalformedInput:
    problem = f"`{path}` is a link or a file where a folder should be, and nothing is written through it"
    return MalformedInput(problem, hint="remove it, and find out who put it there")


def _same(one: os.stat_result, other: os.stat_result | None) -> bool:
    return other is not None and os.path.samestat(one, other)


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a pipe"}
    return kinds.get(stat.S_IFMT(mode), "a device or socket")


NAME_MAX = 255  # maximum bytes of a file's name


def replace_file(path: Path, content: WritableContent) -> None:
    """Replaces one file that the user named, durably, or not at all (OSError); InputRefused as `require_plain`."""
    with parents_made(path), Folder.open(path.parent) as folder:
        require_plain(path)
        folder.write_together({path.name: content})


def is_inner(name: str) -> bool:
    """Whether `name` is `a` or `a/b`, without parts such as `..` that lead elsewhere."""
    parts = name.split("/")
    is_short = all(len(part.encode("utf-8", "replace")) <= NAME_MAX for part in parts)
    return len(parts) <= 2 and is_short and not {"", ".", ".."} & {*parts} and "\0" not in name


PROBE = 4 << 20  # bytes of free space that a report must have; the reports of the largest models are almost as large
HINT = "give another folder to `--report`"


def require_writable(folder: Path, names: Iterable[str]) -> None:
    """Checks before a run whether the files `names` of its report can be written in `folder`, which may be missing.

    An older report is removed: a run that fails before it writes its report would leave that of another run. Raises
    InputRefused if the folder, or one above it, is a file, or a name in it is neither a file nor a link, or the folder
    is a model's; OutputFailed if the folder is not writable, or the disk is full.
    """
    require_parents(folder)
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    if not existing.is_dir():
        raise InputRefused(f"`{folder}` is not a folder, so no report can be written there", hint=HINT)
    try:
        with TemporaryFile(dir=existing) as file:
            file.write(b"\0" * PROBE)
            file.flush()
    except OSError as error:
        raise unwritable(folder, error) from error
    if existing == folder.absolute():
        if (folder / "config.json").exists():
            raise InputRefused(
                f"`{folder}` is a model's folder: the files of a report would lie among the model's",
                hint=f"give the report a folder of its own, such as `--report {folder / 'report'}`",
            )
        with Folder.open(folder) as home:
            found = [*names]
            for name in found:
                home.require_replaceable(name)
            for name in filter(home.find, found):
                home.remove(name)


def unwritable(folder: Path, error: OSError) -> OutputFailed:
    """The error of a report that could not be written."""
    return OutputFailed(f"cannot write the report to `{folder}`: {error.strerror}", hint=HINT)


def require_parents(output: Path) -> None:
    """Requires that folders above an output exist or can be made; InputRefused for a file, a broken link or `/`."""
    above = next((path for path in output.absolute().parents if os.path.lexists(path)), None)
    if above is None:
        raise InputRefused(f"`{output}` is the root of the file system", hint="choose a path in it")
    if not above.is_dir():
        problem = f"`{above}` is not a folder, so `{output}` cannot be written"
        raise InputRefused(problem, hint="choose a path in another folder")


@contextmanager
def parents_made(output: Path) -> Iterator[None]:
    """The missing folders above an output, removed again if what follows fails; OutputFailed if one cannot be made."""
    made: list[Path] = []
    try:
        for folder in reversed([path for path in output.parents if not path.is_dir()]):
            try:
                folder.mkdir()
                made.append(folder)
            except FileExistsError:  # another process made it, or it is `a/..`
                if not folder.is_dir():
                    raise
            except OSError as error:
                hint = f"choose a path in a folder that can be written, or make `{folder}`"
                raise OutputFailed(f"the folder `{folder}` cannot be made: {error.strerror}", hint=hint) from error
        yield
    except BaseException:
        _remove_empty(made)
        raise
    if made:
        say(f"made `{made[-1]}`")


@contextmanager
def folder_made(folder: Path) -> Iterator[None]:
    """A folder for several files, and the missing ones above it, as `parents_made`; itself it is not reported."""
    with parents_made(folder):
        made = [] if folder.is_dir() else [folder]
        folder.mkdir(exist_ok=True)
        try:
            yield
        except BaseException:
            _remove_empty(made)
            raise


def _remove_empty(folders: Sequence[Path]) -> None:
    for folder in reversed(folders):
        with suppress(OSError):  # something is in it
            folder.rmdir()


PREFIX = "llmconv-fetched-"
YOUNG = 60  # seconds after which a folder that nobody has locked is one of a process that ended
# the folder of this process in each temporary directory that it has used, and the descriptor that locks it
_locks: dict[Path, int] = {}
_changing = Lock()


def make_temporary_folder() -> Path:
    """A new folder in the temporary directory, which is removed by `remove_temporary_folder`, or with the process."""
    place = Path(tempfile.gettempdir())
    with _changing:
        home = next((home for home in _locks if home.parent == place and home.is_dir()), None)
        return Path(tempfile.mkdtemp(dir=home or _make_home(place)))


def _make_home(place: Path) -> Path:
    for folder in place.glob(f"{PREFIX}*"):
        with suppress(OSError):
            found = folder.lstat()
            old = time.time() - found.st_mtime > YOUNG
            if old and found.st_uid == os.getuid() and stat.S_ISDIR(found.st_mode) and folder not in _locks:
                with _locked(folder):
                    shutil.rmtree(folder, ignore_errors=True)
    home = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
    _locks[home] = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
    with suppress(OSError):  # a file system without locks, where the folders of a killed process stay
        fcntl.flock(_locks[home], fcntl.LOCK_EX)
    return home


def remove_temporary_folder(folder: Path) -> None:
    """Removes a folder of this process; nothing happens if it has been removed."""
    home = folder.parent
    if home not in _locks:
        return
    shutil.rmtree(folder, ignore_errors=True)
    with _changing, suppress(OSError):  # it has other folders
        home.rmdir()
        os.close(_locks.pop(home))


@atexit.register
def _remove_all() -> None:
    for home in [*_locks]:
        shutil.rmtree(home, ignore_errors=True)
        os.close(_locks.pop(home))


def _leave_to_parent() -> None:
    """In a fork: the folders are those of its parent, which would lose them when this process ends."""
    global _changing
    for descriptor in _locks.values():
        os.close(descriptor)
    _locks.clear()
    _changing = Lock()  # another thread of the parent may have held it


before_exit(_remove_all)
os.register_at_fork(after_in_child=_leave_to_parent)


UNFINISHED = "unfinished-"  # prefix of folders that are being made; each is locked by the process that makes it


def user_cache(name: str) -> Path:
    """The folder, perhaps missing, for one purpose in the user's cache; InputRefused if there is no home folder."""
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        problem = "there is no place for a cache: HOME is not set, and the user has no home folder"
        raise InputRefused(problem, hint="set XDG_CACHE_HOME to a folder that you can write") from error
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
    """Holds a folder's lock: BlockingIOError if another process has it, OSError for a link, or if `needed` and none."""
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


# bytes per system call: with 4 MB the kernel allocates huge pages in the cache, which takes three times as long
WRITE_BYTES = 256 << 10


def write_fully(fd: int, block: memoryview) -> None:
    """Writes all of `block`, in several calls if needed."""
    while block:
        block = block[os.write(fd, block[:WRITE_BYTES]) :]
