"""Where inputs come from: local paths, URIs that fsspec knows, and hub ids."""

from __future__ import annotations

import atexit
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmconv.errors import InputRefused
from llmconv.hub import from_hub
from llmconv.pointers import TEXT_LIMIT, LocalTree, follow, follow_local

PARTIAL = ".llmconv-partial"
"""How the name of a folder ends in which an output is being made."""

HUB_ID = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
"""`org/name[@revision]`, or the bare name of one of the hub's oldest models, such as `gpt2`."""

FILE_NAME = re.compile(
    r".*\.(?:pth?|bin|ckpt|safetensors|pdparams|onnx|gguf|npz?|json|ya?ml|jinja|txt|tar|t?gz|zip|zst|h5|msgpack|distcp)"
)
"""Bare names that are those of files: nobody means a model of the hub."""


def local_path(name: str | Path, *, keep: bool = True) -> Path:
    """A local path for `name`: itself when it exists, a download when it is a URI or a hub id (`org/name[@revision]`).

    A pointer file of Composer is followed, on the disk and in a bucket.

    Args:
        name: path, URI or hub id.
        keep: whether what is fetched from a URI stays when the process ends.

    Raises:
        InputRefused: there is no such path, and it is neither a reachable URI nor a hub id.
    """
    path = follow_local(Path(name))
    if path.exists():
        return path
    if path.is_symlink():
        raise InputRefused(
            f"`{path}` is a link to `{path.readlink()}`, which is not there", hint="fetch that too, or mend the link"
        )
    text = str(name)
    if "://" in text:
        return _download(text, keep)
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
    """Whether `name` is a URI or a hub id, whose files are not ones to write next to."""
    return not Path(name).exists() and ("://" in str(name) or is_hub_id(name))


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


def _download(uri: str, keep: bool) -> Path:
    import fsspec  # noqa: PLC0415 - a local path does without it

    folder = Path(tempfile.mkdtemp(prefix="llmconv-"))
    if not keep:
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        filesystem, remote = fsspec.url_to_fs(uri)
        remote = follow(remote, LocalTree() if uri.startswith(("file:", "local:")) else Bucket(filesystem))
        filesystem.get(remote, str(folder) + "/", recursive=filesystem.isdir(remote))
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
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
