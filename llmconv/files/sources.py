"""Where inputs come from: local paths, URIs that fsspec knows, and hub ids."""

from __future__ import annotations

import atexit
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from llmconv.errors import InputRefused
from llmconv.files.hub import from_hub
from llmconv.files.paths import is_address, path_of
from llmconv.files.pointer_files import TEXT_LIMIT, LocalTree, follow, follow_local

P = ParamSpec("P")
R = TypeVar("R")

PARTIAL = ".llmconv-partial"
"""How the name of a folder ends in which an output is being made."""

HUB_ID = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
"""`org/name[@revision]`, or the bare name of one of the hub's oldest models, such as `gpt2`."""

FILE_NAME = re.compile(
    r".*\.(?:pth?|bin|ckpt|safetensors|pdparams|onnx|gguf|npz?|json|ya?ml|jinja|txt|tar|t?gz|zip|zst|h5|msgpack|distcp)"
)
"""Bare names that are those of files: nobody means a model of the hub."""


def local_path(name: str | Path) -> Path:
    """A local path for `name`: itself when it exists, a download when it is a URI or a hub id (`org/name[@revision]`).

    A pointer file of Composer is followed, on the disk and in a bucket. What a URI names is fetched into a temporary
    folder, which is removed when the call that needed it ends (see `fetching`), and at the latest with the process.

    Args:
        name: path, URI or hub id.

    Raises:
        InputRefused: there is no such path, and it is neither a reachable URI nor a hub id.
        UsageProblem: it is not a path, such as an open model.
    """
    given = path_of(name, "path")
    if is_address(name):
        return _download(_uri(name))
    path = follow_local(given)
    if path.exists():
        return path
    if path.is_symlink():
        raise InputRefused(
            f"`{path}` is a link to `{path.readlink()}`, which is not there", hint="fetch that too, or mend the link"
        )
    text = str(name)
    if is_hub_id(text):
        return from_hub(text)
    raise InputRefused(
        f"`{text}` does not exist", hint="give a local path, a URI, or a hub id such as `org/name` or `gpt2`"
    )


def is_hub_id(name: str | Path) -> bool:
    """Whether `name` may be a model of the hub: there is nothing of that name on the disk, nor is it a file's."""
    text = str(name)
    return bool(HUB_ID.fullmatch(text)) and not FILE_NAME.fullmatch(text) and not Path(text).exists()


def is_remote(name: str | Path) -> bool:
    """Whether `local_path` would fetch `name`, or find it in the hub's cache."""
    return is_address(name) or (not follow_local(Path(name)).exists() and is_hub_id(name))


def require_own_folder(model: str | Path) -> None:
    """Refuses to write next to weights that are fetched from elsewhere, before they are.

    Raises:
        InputRefused: `model` is a URI or a hub id.
    """
    if is_remote(model):
        raise InputRefused(
            f"`{model}` is not a local folder that graphs could be written into",
            hint=f"give a folder for weights and graphs: `llmconv export {model} -o OUT`",
        )


@contextmanager
def reading_safely(source: str | Path) -> Iterator[None]:
    """Turns an OSError about `source` (a link to nothing, a file that may not be read) into InputRefused."""
    try:
        yield
    except OSError as error:
        raise InputRefused(
            f"`{source}` cannot be read: {error.strerror or error} ({error.filename or 'source'})",
            hint="look at the file, its links and its permissions",
        ) from error


_folders: set[Path] = set()
"""Temporary folders of this process that hold downloads."""


def remove_downloads(folders: set[Path] | None = None) -> None:
    """Removes temporary folders, all of this process by default: for an end at which nothing else runs."""
    for folder in set(_folders if folders is None else folders):
        shutil.rmtree(folder, ignore_errors=True)
        _folders.discard(folder)


atexit.register(remove_downloads)


class Fetched:
    """The temporary folders of one call."""

    def __init__(self) -> None:
        self.folders: set[Path] = set()

    def keep_for(self, owner: object) -> None:
        """Keeps them for as long as `owner` is alive: it still reads them."""
        weakref.finalize(owner, remove_downloads, set(self.folders)).atexit = False
        self.folders.clear()


_fetched: ContextVar[Fetched | None] = ContextVar("_fetched", default=None)


@contextmanager
def fetching() -> Iterator[Fetched]:
    """Removes what `local_path` fetches inside, however the block ends, unless it is kept for something."""
    fetched = Fetched()
    token = _fetched.set(fetched)
    try:
        yield fetched
    finally:
        _fetched.reset(token)
        remove_downloads(fetched.folders)


def fetches(function: Callable[P, R]) -> Callable[P, R]:
    """The function; what it fetches is removed when it ends. After a dry run it stays as long as the result does."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with fetching() as fetched:
            result = function(*args, **kwargs)
            if kwargs.get("dry_run"):
                fetched.keep_for(result)
            return result

    return call


def _uri(name: str | Path) -> str:
    """The text of a URI.

    Raises:
        InputRefused: it went through pathlib, which makes one slash of two.
    """
    text = str(name).strip()
    if "://" not in text:
        raise InputRefused(
            f"`{text}` is neither a local path nor a whole address",
            hint=f"give a URI as text, with `://`; a local folder of that name is `./{text}`",
        )
    return text


def _download(uri: str) -> Path:
    import fsspec  # noqa: PLC0415 - a local path does without it

    folder = Path(tempfile.mkdtemp(prefix="llmconv-"))
    _folders.add(folder)
    if fetched := _fetched.get():
        fetched.folders.add(folder)
    try:
        filesystem, remote = fsspec.url_to_fs(uri)
        remote = follow(remote, LocalTree() if uri.startswith(("file:", "local:")) else Bucket(filesystem))
        filesystem.get(remote, str(folder) + "/", recursive=filesystem.isdir(remote))
    except BaseException as error:
        remove_downloads({folder})
        if not isinstance(error, OSError | ImportError | ValueError):
            raise
        raise InputRefused(
            f"cannot fetch `{uri.partition('?')[0]}`: {error}", hint="check the address and the credentials"
        ) from error
    return next(folder.iterdir(), folder)


class Bucket:
    """The files of a bucket, for `follow`; `filesystem` is one of fsspec."""

    def __init__(self, filesystem: Any) -> None:
        self._filesystem = filesystem

    def exists(self, path: str) -> bool:
        """Whether an object or a folder is there."""
        return bool(self._filesystem.exists(path))

    def head(self, path: str) -> bytes | None:
        """The first bytes of an object, None for a folder."""
        if not self._filesystem.isfile(path):
            return None
        with self._filesystem.open(path, "rb") as file:
            return bytes(file.read(TEXT_LIMIT + 1))

    def roots(self, path: str) -> Iterator[str]:
        """The top first: the bucket is the first part of an object's path; an address has its host in front."""
        scheme, mark, rest = path.rpartition("://")
        parts = rest.split("/")
        yield from (scheme + mark + "/".join(parts[:count]) for count in range(1, len(parts) + 1))


def files_under(path: Path, without: Path | None = None) -> list[Path]:
    """`path` itself, or every file in that folder, at any depth, in the order of their names.

    Args:
        path: a file or folder.
        without: a folder that is passed over, such as an output inside `path`; unfinished outputs are, too.
    """
    if path.is_file():
        return [path]
    left_out = {without.absolute()} if without else set()
    files = (file for file in path.absolute().rglob("*") if file.is_file())
    return sorted(
        file
        for file in files
        if not left_out.intersection(file.parents) and not any(folder.name.endswith(PARTIAL) for folder in file.parents)
    )
