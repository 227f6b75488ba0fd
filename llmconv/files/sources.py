"""Resolves inputs to local paths: local paths, URIs that fsspec supports, and hub ids."""

from __future__ import annotations

import atexit
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from llmconv.addresses import HubAddress, hub_address, is_hub_address, is_store_address, parse_hub_address
from llmconv.errors import InputRefused, LlmconvError
from llmconv.files import mirror
from llmconv.files.hub import from_hub
from llmconv.files.mirror import make_mirror
from llmconv.files.paths import TEXT_LIMIT, LocalTree, follow, follow_local, is_address, path_of, without_credentials
from llmconv.files.safe_folder import make_temporary_folder, remove_temporary_folder

P = ParamSpec("P")
R = TypeVar("R")
PARTIAL = ".llmconv-partial"  # suffix of the folder in which an output is being made
# `org/name[@revision]`, or the bare name of one of the hub's oldest models, such as `gpt2`
HUB_ID = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
# `org/name[@revision]/folder`, which is `hf://…` for llmconv
HUB_FOLDER = re.compile(rf"{HUB_ID.pattern}(?:/[\w.-]+)+")

FILE_NAME = re.compile(
    r".*\.(?:pth?|bin|ckpt|safetensors|pdparams|onnx|gguf|npz?|json|ya?ml|jinja|txt|tar|t?gz|zip|zst|h5|msgpack|distcp)"
)
"""Bare names that are clearly files, not models of the hub."""


def local_path(name: str | Path, *, in_parts: bool = False, headers: bool = False) -> Path:
    """A local path for `name`: itself if it exists, a download for a URI or a model of the hub.

    A model is `org/name[@revision]` or `hf://org/name[@revision][/folder]`, and is downloaded into the hub's cache.
    Pointer files of Composer are followed, on the disk and in a bucket. A URI is fetched into a temporary folder, which
    is removed when the call that needs it ends (`fetching`), at the latest with the process. With `in_parts` (of a
    bucket) or `headers` (of the hub), only what llmconv's own readers ask for is fetched. Raises InputRefused for a
    path that does not exist and is no reachable URI or hub id, UsageProblem for something else than a path.
    """
    given = path_of(name, "path")
    if is_hub_address(name):
        return _from_hub(parse_hub_address(str(name)), headers)
    if is_address(name):
        return _download(_uri(name), in_parts=in_parts)
    path = follow_local(given)
    if path.exists():
        return path
    if path.is_symlink():
        problem = f"`{path}` is a link to `{path.readlink()}`, which does not exist"
        raise InputRefused(problem, hint="fetch it, too, or repair the link")
    text = str(name)
    if is_hub_id(text):
        return _from_hub(hub_address(text), headers)
    hint = "give a local path, a URI, or a hub id such as `org/name` or `gpt2`"
    if HUB_FOLDER.fullmatch(text) and not FILE_NAME.fullmatch(text):
        hint = f"check the spelling; a folder of a repository on the hub is `hf://{text}`"
    raise InputRefused(f"`{text}` does not exist", hint=hint)


def _from_hub(address: HubAddress, headers: bool) -> Path:
    if headers:
        with _temporary() as folder:
            path = from_hub(address, folder)
    else:
        path = from_hub(address)
    _addresses[str(path)] = str(address)
    return path


def is_hub_id(name: str | Path) -> bool:
    """Whether `name` may be a model of the hub: it does not exist on the disk and is not the name of a file."""
    text = str(name)
    return bool(HUB_ID.fullmatch(text)) and not FILE_NAME.fullmatch(text) and not Path(text).exists()


def is_remote(name: str | Path) -> bool:
    """Whether `local_path` would fetch `name`, or find it in the hub's cache."""
    return is_address(name) or (not follow_local(Path(name)).exists() and is_hub_id(name))


def require_own_folder(model: str | Path) -> None:
    """Raises InputRefused for a URI or hub id, before it is fetched, where graphs are written next to the weights."""
    if is_remote(model):
        shown = without_credentials(str(model))
        raise InputRefused(
            f"`{shown}` is not a local folder, so graphs cannot be written into it",
            hint=f"check the spelling; a model of the Hub needs a folder for weights and graphs: "
            f"`llmconv export {shown} -o OUT`",
        )


@contextmanager
def reading_safely(source: str | Path) -> Iterator[None]:
    """Turns an OSError about `source` (a broken link, no permission) into InputRefused."""
    try:
        yield
    except OSError as error:
        problem = f"`{source}` cannot be read: {error.strerror or error} ({error.filename or 'source'})"
        raise InputRefused(problem, hint="check the file, its links and its permissions") from error


_folders: set[Path] = set()  # temporary folders of this process that contain downloads
_addresses: dict[str, str] = {}  # path of what was fetched from a store or the hub to its address, for messages


def with_addresses(text: str) -> str:
    """`text` with the addresses of downloads in place of their temporary paths, which do not last."""
    for path, address in list(_addresses.items()):
        text = text.replace(path, address)
    return text


def remove_downloads(folders: set[Path] | None = None) -> None:
    """Removes temporary folders; by default all of this process, for when it ends."""
    for folder in set(_folders if folders is None else folders):
        mirror.remove(folder)
        remove_temporary_folder(folder)
        _folders.discard(folder)
        for path in [path for path in list(_addresses) if Path(path).is_relative_to(folder)]:
            _addresses.pop(path, None)


atexit.register(remove_downloads)


class Fetched:
    """The temporary folders of one call."""

    def __init__(self) -> None:
        self.folders: set[Path] = set()

    def keep_for(self, owner: object) -> None:
        """Keeps the folders as long as `owner`, which reads them, is alive."""
        weakref.finalize(owner, remove_downloads, set(self.folders)).atexit = False
        self.folders.clear()


_fetched: ContextVar[Fetched | None] = ContextVar("_fetched", default=None)


@contextmanager
def fetching() -> Iterator[Fetched]:
    """Removes downloads of `local_path` at the end of the block, unless `keep_for` was called."""
    fetched = Fetched()
    token = _fetched.set(fetched)
    try:
        yield fetched
    except LlmconvError as error:
        error.message, error.hint = with_addresses(error.message), with_addresses(error.hint)
        error.args = (error.message,)
        raise
    finally:
        _fetched.reset(token)
        remove_downloads(fetched.folders)


def fetches(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: downloads are removed when the function ends, after a dry run together with its result."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with fetching() as fetched:
            result = function(*args, **kwargs)
            if kwargs.get("dry_run"):
                fetched.keep_for(result)
            return result

    return call


def _uri(name: str | Path) -> str:
    """The text of a URI; raises InputRefused if it was made a Path, which turns two slashes into one."""
    text = str(name).strip()
    if "://" not in text:
        problem = f"`{text}` is neither a local path nor a complete URI"
        raise InputRefused(problem, hint=f"give a URI as text, with `://`; a local folder of that name is `./{text}`")
    return text


def _download(uri: str, *, in_parts: bool) -> Path:
    """Fetches a URI; object stores with obstore, which can fetch parts, and everything else with fsspec."""
    with _temporary() as folder, _fetching_from(uri):
        if not (is_store_address(uri) and find_spec("obstore")):
            import fsspec  # noqa: PLC0415 - not needed for local paths

            filesystem, remote = fsspec.url_to_fs(uri)
            remote = follow(remote, LocalTree() if uri.startswith(("file:", "local:")) else BucketTree(filesystem))
            filesystem.get(remote, str(folder) + "/", recursive=filesystem.isdir(remote))
            return _without_query(next(folder.iterdir(), folder))
        path = make_mirror(uri, folder, whole=not in_parts)
        _addresses[str(path)] = uri.rstrip("/")
        return path


@contextmanager
def _temporary() -> Iterator[Path]:
    """A folder that is removed with the call that needs it, and at once if the block fails."""
    folder = make_temporary_folder()
    _folders.add(folder)
    if fetched := _fetched.get():
        fetched.folders.add(folder)
    try:
        yield folder
    except BaseException:
        remove_downloads({folder})
        raise


@contextmanager
def _fetching_from(uri: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ImportError, ValueError) as error:
        missing = "`pip install obstore`" if is_store_address(uri) else "install that package"
        raise InputRefused(
            without_credentials(f"cannot fetch `{uri}`: {error}"),
            hint=missing if isinstance(error, ImportError) else "check the address and the credentials",
        ) from error


def _without_query(path: Path) -> Path:
    """The file under its plain name: that of a URL may end with a signature, and the manifest names the source."""
    plain = re.split("[?#]", path.name)[0]
    return path.rename(path.with_name(plain)) if path.is_file() and plain not in ("", path.name) else path


class BucketTree:
    """The files of a bucket, for `follow`; `filesystem` is one of fsspec."""

    def __init__(self, filesystem: Any) -> None:
        self._filesystem = filesystem

    def exists(self, path: str) -> bool:
        return bool(self._filesystem.exists(path))

    def head(self, path: str) -> bytes | None:
        if not self._filesystem.isfile(path):
            return None
        with self._filesystem.open(path, "rb") as file:
            return bytes(file.read(TEXT_LIMIT + 1))

    def roots(self, path: str) -> Iterator[str]:
        """The top first: the bucket is the first part of an object's path, after the host in a URI."""
        scheme, mark, rest = path.rpartition("://")
        parts = rest.split("/")
        yield from (scheme + mark + "/".join(parts[:count]) for count in range(1, len(parts) + 1))


def files_under(path: Path, without: Path | None = None) -> list[Path]:
    """`path` itself, or all files in that folder, sorted, except for unfinished outputs and the folder `without`."""
    if path.is_file():
        return [path]
    left_out = {without.absolute()} if without else set()
    files = (file for file in path.absolute().rglob("*") if file.is_file())
    return sorted(
        file
        for file in files
        if not left_out.intersection(file.parents) and not any(folder.name.endswith(PARTIAL) for folder in file.parents)
    )
