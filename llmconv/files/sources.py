"""Resolves inputs to local paths: local paths, URIs that fsspec supports, and models of the Hub.

Of a model of the Hub only the files that it needs are downloaded, into the cache of the Hub.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from difflib import get_close_matches
from functools import wraps
from glob import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from llmconv.addresses import HubAddress, hub_address, is_hub_address, is_store_address, parse_hub_address
from llmconv.errors import InputRefused, LlmconvError, MalformedInput, first_line, listing, word
from llmconv.files.paths import TEXT_LIMIT, LocalTree, follow, follow_local, is_address, path_of, without_credentials
from llmconv.files.safe_folder import make_temporary_folder, remove_temporary_folder

if TYPE_CHECKING:
    from llmconv.stores.object_store import Head

TORCH_WEIGHTS = re.compile(r"pytorch_model.*\.bin(?:\.index\.json)?|(?:pytorch_)?model-\d+-of-\d+\.bin")
SAFETENSORS = re.compile(r"model(?:-\d+-of-\d+)?\.safetensors(?:\.index\.json)?")
ADAPTER = re.compile(r"adapter_(?:model\.(?:safetensors|bin)|config\.json)")
# files by which a model in the cache is found
MARKS = ("config.json", "adapter_config.json", "llmconv.json", "params.json")
# ends of files that may contain weights, and of archives of them
SUFFIXES, ARCHIVES = "safetensors|bin|pth?|ckpt|pdparams|distcp|npz|msgpack|gguf", "tar|t?gz|zip|zst"
WEIGHTS = re.compile(rf".*\.(?:{SUFFIXES}|{ARCHIVES})")
BLOB = re.compile(r"[0-9a-f]{64}")  # the name of a large file's content; small ones have Git's hash of 40
SECONDS = 10  # timeout of the hub, after which the cache is used
# configuration, tokenizer and code at the top of a repository
SMALL = re.compile(r"[^/]+\.(?:json|jinja|txt|model|tiktoken|py|yaml|yml|md)")


def from_hub(address: HubAddress, headers_in: Path | None = None) -> Path:
    """The folder of a model in the hub's cache; missing files are downloaded.

    With a folder or file in `address`, nothing else is downloaded. If not all files are in the cache, an empty folder
    `headers_in` gets a `mirror_hub`: then only small files are downloaded, and of weights what is read. Raises
    InputRefused if the hub has no such model or folder, or cannot be reached.
    """
    from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache  # noqa: PLC0415 - 0.3 s, not for paths
    from huggingface_hub.hf_api import RepoFile  # noqa: PLC0415 - slow to import

    repository, revision = address.repository, address.revision or None
    try:
        info = HfApi().model_info(repository, revision=revision, timeout=SECONDS)
        files = _needed_below(address, [file.rfilename for file in info.siblings or []])
        known = {name: try_to_load_from_cache(repository, name, revision=str(info.sha)) for name in files}
        if headers_in and not all(isinstance(path, str) for path in known.values()):
            listed = HfApi().list_repo_tree(repository, revision=info.sha, recursive=True)
            sizes = {file.path: file.size for file in listed if isinstance(file, RepoFile)}
            return mirror_hub(address, str(info.sha), {name: sizes[name] for name in files}, headers_in)
        home = Path(snapshot_download(repository, revision=revision, allow_patterns=[escape(name) for name in files]))
        for name in (name for name, path in known.items() if not isinstance(path, str)):
            _require_as_named(home / name)
        return home / address.folder
    except InputRefused:
        raise
    except Exception as error:  # the class for "no connection" differs between versions
        if isinstance(error, MemoryError):
            raise
        from llmconv.hub.repository import hub_refusal  # noqa: PLC0415 - most sources are local

        problem = hub_refusal(error, address)
        if problem is None and (found := cached(address)):
            return found
        from huggingface_hub.constants import HF_HUB_OFFLINE  # noqa: PLC0415

        why = "HF_HUB_OFFLINE is set" if HF_HUB_OFFLINE else "the hub cannot be reached"
        absent = f"`{address.short}` does not exist on this machine and is not in the hub's cache; {why}"
        rest = " and the current folder, or unset it" if HF_HUB_OFFLINE else ", the current folder and the network"
        hint = f"check the spelling{rest}"
        raise problem or InputRefused(absent, hint=hint) from error


def sha256_by_name(path: Path) -> str:
    """The sha256 that a large file in the hub's cache should have, by the name of its blob; empty for other files."""
    blob = path.resolve()
    return blob.name if blob.parent.name == "blobs" and BLOB.fullmatch(blob.name) else ""


def _require_as_named(path: Path) -> None:
    """Reads a file that was just downloaded: huggingface_hub compares its size alone. One that differs is deleted."""
    if not (expected := sha256_by_name(path)):
        return
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        path.resolve().unlink()
        path.unlink()
        problem = f"`{path.name}` arrived damaged from the hub: its sha256 is not the one that the hub has"
        raise MalformedInput(problem, hint="run again, which downloads this file again")


def _needed_below(address: HubAddress, listed: list[str]) -> list[str]:
    """The files to download for an address, by their paths in the repository; raises InputRefused if there are none."""
    if address.folder in listed:
        return [address.folder]
    _require_one_model(address, listed)
    if not address.folder:
        return needed(listed)
    start = f"{address.folder}/"
    if not (inside := [name.removeprefix(start) for name in listed if name.startswith(start)]):
        problem = f"`{address.repository}` on the hub has no folder or file `{address.folder}`"
        raise InputRefused(problem, hint="look at the list of its files, on its page")
    return [start + name for name in needed(inside)]


def _require_one_model(address: HubAddress, listed: list[str]) -> None:
    """Raises InputRefused for a folder that only contains folders of models, which it lists, before the download."""
    start = f"{address.folder}/" if address.folder else ""
    weights = [name for name in listed if name.startswith(start) and WEIGHTS.fullmatch(name)]
    homes = {name.rpartition("/")[0] for name in weights}
    models = sorted(home for home in homes if {f"{home}/{mark}" for mark in MARKS} & {*listed})
    is_checkpoint = address.folder in homes or any(name.endswith(".distcp") for name in weights)
    if is_checkpoint or len(models) < 2:
        return
    found = [f"hf://{replace(address, folder=home).short}" for home in models]
    problem = f"`{address.short}` on the hub is not a model itself; it contains {listing(found)}"
    raise InputRefused(problem, hint=f"give one of them: `{found[0]}`")


def cached(address: HubAddress) -> Path | None:
    """The folder (or file) of a model in the hub's cache, even if only the needed files are there; else None."""
    from huggingface_hub import snapshot_download, try_to_load_from_cache  # noqa: PLC0415 - see above
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    repository, revision = address.repository, address.revision or None
    place = f"{address.folder}/" if address.folder else ""
    try:
        home = Path(snapshot_download(repository, revision=revision, local_files_only=True))
    except HFValidationError:
        return None
    except LocalEntryNotFoundError:
        names = [*(place + mark for mark in MARKS), *([address.folder] if place else [])]
        found = [try_to_load_from_cache(repository, name, revision=revision) for name in names]
        files = [Path(file) for file in found if isinstance(file, str)]
        return next((file if file.name not in MARKS else file.parent for file in files), None)
    path = home / address.folder
    return path if path.exists() else None


def cached_model(name: str) -> Path | None:
    """The folder of a hub id in the hub's cache if it has a configuration, which messages name by the id; else None."""
    address = hub_address(name)
    kept = cached(address)
    if kept is None or not (kept / "config.json").is_file():
        return None
    _addresses[str(kept)] = str(address)
    return kept


def snapshot_home(path: Path) -> Path | None:
    """The folder `models--org--name` of the hub's cache whose snapshots contain `path`, None outside the cache."""
    above = [path, *path.parents]
    pairs = zip(above[1:], above[2:], strict=False)
    return next((home for one, home in pairs if one.name == "snapshots" and home.name.startswith("models--")), None)


def model_name(folder: Path) -> str:
    """What people call the model in a folder: the folder's name, but in a hub's cache that of the repository.

    A snapshot there is a folder named by its commit, or `master` (ModelScope, whose older caches have `Qwen2___5-7B`
    with a link `Qwen2.5-7B` to it).
    """
    path = folder.resolve()
    home = path.parent.parent.name if path.parent.name == "snapshots" else ""
    repository = home.rpartition("--")[2] if "--" in home else ""
    dotted = path.with_name(path.name.replace("___", ".")) if path.name else path
    return repository or (dotted if dotted.is_symlink() else path).name


def export_command(folder: Path, options: str = "") -> str:
    """`llmconv export` of a folder; into a new one where it is a download, or in the hub's cache."""
    is_fetched = snapshot_home(folder) is not None or str(folder) in _addresses
    return f"llmconv export {word(folder)}{options}" + (" -o OUT" if is_fetched else "")


def source_name(path: Path) -> str:
    """The name of an input: `org/name@commit[/folder]` in the hub's cache, else the last part of its path."""
    if (home := snapshot_home(path)) is None:
        return path.name
    commit, *folder = path.relative_to(home / "snapshots").parts
    return "/".join([f"{home.name.removeprefix('models--').replace('--', '/')}@{commit}", *folder])


def needed(files: Iterable[str]) -> list[str]:
    """The files that a repository's model needs: weights of one kind, configuration, tokenizer; all of any other."""
    listed = list(files)
    if "llmconv.json" in listed:
        return listed
    for weights in (SAFETENSORS, ADAPTER, TORCH_WEIGHTS):
        if any(weights.fullmatch(name) for name in listed):
            return [name for name in listed if any(kind.fullmatch(name) for kind in (weights, SMALL, ADAPTER))]
    return listed


WAIT_SECONDS = 30  # timeout of one answer
# status of an answer with all of a file, from a server that knows no ranges, and of one with the range
WHOLE, PART = 200, 206


class HubFiles:
    """The files of a repository at a commit hash; the content of a file at a commit never changes."""

    def __init__(self, address: HubAddress, commit: str) -> None:
        self._address, self._commit = address, commit

    def blocks(self, head: Head, start: int, stop: int) -> Iterator[memoryview]:
        """Bytes `start:stop` of a file by one request, as they arrive; InputRefused if the Hub does not give it."""
        from huggingface_hub import hf_hub_url, utils  # noqa: PLC0415 - 0.3 s that a local path does not pay

        hub: Any = utils  # its names are not exported to type checkers
        url = hf_hub_url(self._address.repository, head.key, revision=self._commit)
        headers = {**hub.build_hf_headers(), "range": f"bytes={start}-{stop - 1}", "accept-encoding": "identity"}
        with self._failing(), hub.http_stream_backoff("GET", url, headers=headers, timeout=WAIT_SECONDS) as answer:
            hub.hf_raise_for_status(answer)
            position = start if answer.status_code == PART else 0
            for block in answer.iter_bytes():
                wanted = memoryview(block)[max(start - position, 0) : stop - position]
                position += len(block)
                if wanted:
                    yield wanted
                if position >= stop:
                    return

    def changed(self, key: str) -> InputRefused:
        """The error for a file that is shorter than the Hub says."""
        problem = f"`{key}` of `{self._address.repository}` on the hub is not as long as its list of files says"
        return InputRefused(problem, hint="run again; if it happens again, download the repository with `hf download`")

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the class for "no connection" differs between versions
            if isinstance(error, MemoryError | InputRefused):
                raise
            from llmconv.hub.repository import hub_refusal  # noqa: PLC0415 - as above

            raise hub_refusal(error, self._address) or InputRefused(
                f"`{self._address.short}` cannot be read from the hub: {first_line(error, 120)}",
                hint="check the network, and run again",
            ) from error


def mirror_hub(address: HubAddress, commit: str, sizes: Mapping[str, int], folder: Path) -> Path:
    """Mirrors files of the Hub at a commit in `folder`, as `make_mirror`, and returns the path of what is at `address`.

    `sizes` maps paths in the repository to bytes, for the files at the address that the model needs. Raises
    InputRefused if the Hub does not give a file, or cannot be reached.
    """
    from llmconv.files.mirror import mirror_files  # noqa: PLC0415 - as above
    from llmconv.stores.object_store import Head  # noqa: PLC0415 - as above

    root = folder / address.repository.rpartition("/")[2]
    files = [(root / name, Head(name, size, "")) for name, size in sizes.items()]
    mirror_files(HubFiles(address, commit), files, folder)
    return root / address.folder


P = ParamSpec("P")
R = TypeVar("R")
PARTIAL = ".llmconv-partial"  # suffix of the folder in which an output is being made
# `org/name[@revision]`, or the bare name of one of the hub's oldest models, such as `gpt2`
HUB_ID = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
# `org/name[@revision]/folder`, which is `hf://…` for llmconv
HUB_FOLDER = re.compile(rf"{HUB_ID.pattern}(?:/[\w.-]+)+")

# bare names that are clearly files, not models of the hub
FILE_NAME = re.compile(rf".*\.(?:{SUFFIXES}|{ARCHIVES}|onnx|h5|np[yz]|json|ya?ml|jinja|txt)")


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
        uri = str(name).strip()
        if "://" not in uri:  # a Path turns two slashes into one
            hint = f"give a URI as text, with `://`; a local folder of that name is `./{uri}`"
            raise InputRefused(f"`{uri}` is neither a local path nor a complete URI", hint=hint)
        return _download(uri, in_parts=in_parts)
    path = follow_local(given)
    if path.exists():
        return path
    if path.is_symlink():
        problem = f"`{path}` is a link to `{path.readlink()}`, which does not exist"
        raise InputRefused(problem, hint="fetch it, too, or repair the link")
    text = str(name)
    if is_hub_id(text):
        try:
            return _from_hub(hub_address(text), headers)
        except InputRefused as error:
            error.hint = _meant(path) + error.hint
            raise
    hint = _meant(path) + "give a local path, a URI, or a hub id such as `org/name` or `gpt2`"
    if HUB_FOLDER.fullmatch(text) and not FILE_NAME.fullmatch(text):
        hint = f"check the spelling; a folder of a repository on the hub is `hf://{text}`"
    raise InputRefused(f"`{text}` does not exist", hint=hint)


def _meant(path: Path) -> str:
    """A question for the file or folder next to where `path` would be with nearly the same name; empty for none."""
    with suppress(OSError):
        near = get_close_matches(path.name, os.listdir(path.parent), n=1, cutoff=0.75)
        return f"did you mean `{path.with_name(near[0])}`? " if near else ""
    return ""


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
            hint="check the spelling; what is not on this machine needs a folder for weights and graphs: "
            f"`llmconv export {word(shown)} -o OUT`",
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
        from llmconv.files import mirror  # noqa: PLC0415 - as above

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


def _download(uri: str, *, in_parts: bool) -> Path:
    """Fetches a URI; object stores with obstore, which can fetch parts, and everything else with fsspec."""
    with _temporary() as folder, _fetching_from(uri):
        if not (is_store_address(uri) and find_spec("obstore")):
            import fsspec  # noqa: PLC0415 - not needed for local paths

            filesystem, remote = fsspec.url_to_fs(uri)
            remote = follow(remote, LocalTree() if uri.startswith(("file:", "local:")) else BucketTree(filesystem))
            filesystem.get(remote, str(folder) + "/", recursive=filesystem.isdir(remote))
            path = next(folder.iterdir(), folder)
            # under its plain name: that of a URL may end with a signature, and the manifest names the source
            plain = re.split("[?#]", path.name)[0]
            return path.rename(path.with_name(plain)) if path.is_file() and plain not in ("", path.name) else path
        from llmconv.files.mirror import make_mirror  # noqa: PLC0415 - as above

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
        hint = missing if isinstance(error, ImportError) else "check the address and the credentials"
        raise InputRefused(without_credentials(f"cannot fetch `{uri}`: {error}"), hint=hint) from error


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
    """`path` itself, or all files in that folder, sorted, except for unfinished outputs and the folder `without`.

    A file of a model in several (GGUF) stands for all of them; MalformedInput if one is missing.
    """
    if path.is_file():
        if path.suffix != ".gguf":
            return [path]
        from llmconv.files.gguf_file import parts_of  # noqa: PLC0415 - one format of many

        return parts_of(path)
    left_out = {without.absolute()} if without else set()
    files = (file for file in path.absolute().rglob("*") if file.is_file())
    return sorted(
        file
        for file in files
        if not left_out.intersection(file.parents) and not any(folder.name.endswith(PARTIAL) for folder in file.parents)
    )


def files_of_weights(path: Path, without: Path | None = None) -> list[Path]:
    """The `files_under` a path, and what decides about their weights near it: an adapter's scale, a strategy."""
    near = [file for file in files_near(path) if file.name == "adapter_config.json" or STRATEGY.fullmatch(file.name)]
    return [*files_under(path, without), *near]


# suffixes of the configurations, tokenizers and pointers that formats and adapters look for next to a named file
NEAR = {".json", ".yaml", ".yml", ".model", ".txt", ".tiktoken", ".jinja", ".symlink"}
# names of those that they look for in the folders above a checkpoint, too; the last one of llama2.c
ABOVE = {"config.json", "adapter_config.json", "generation_config.json", "params.json", "tokenizer_config.json"}
ABOVE |= {"tokenizer.json", "tokenizer.model", "tokenizer.bin"}
CONFIGS, STRATEGIES = "configs", "strategy"  # folders of GPT-NeoX and MindFormers
STRATEGY = re.compile(r".*strategy.*\.(?:ckpt|json)")


def files_near(path: Path) -> list[Path]:
    """The configurations, tokenizers and strategies that formats look for next to a path, and in two folders above it.

    Of a link they may be next to it, or next to what it leads to.
    """
    found = dict[Path, None]()
    for place in dict.fromkeys((path.absolute(), path.resolve())):
        for level, home in enumerate(place.parents[:2]):
            suffixes = NEAR if level == 0 and path.is_file() else {".symlink"}
            found |= {
                one: None
                for one in _plain_files(home)
                if one.suffix in suffixes or one.name in ABOVE or STRATEGY.fullmatch(one.name)
            }
            found |= dict.fromkeys((*_plain_files(home / CONFIGS), *_plain_files(home / STRATEGIES)))
    return [one for one in found if one not in (path.absolute(), path.resolve())]


def _plain_files(folder: Path) -> Iterator[Path]:
    """The files of a folder that are not hidden, sorted; none of a folder that cannot be read, or does not exist."""
    with suppress(OSError):
        yield from (one for one in sorted(folder.iterdir()) if not one.name.startswith(".") and one.is_file())
