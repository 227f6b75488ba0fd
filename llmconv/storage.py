"""Where inputs come from: local paths, URIs that fsspec knows, and hub ids."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmconv.errors import InputRefused

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


def local_path(name: str | Path) -> Path:
    """A local path for `name`: itself when it exists, a download when it is a URI or a hub id (`org/name[@revision]`).

    Raises:
        InputRefused: there is no such path, and it is neither a reachable URI nor a hub id.
    """
    path = Path(name)
    if path.exists():
        return path
    text = str(name)
    if "://" in text:
        return _download(text)
    if HUB_ID.fullmatch(text):
        return _from_hub(*text.partition("@")[::2])
    raise InputRefused(f"`{text}` does not exist", hint="give a local path, a URI, or a hub id such as `org/name`")


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


def _download(uri: str) -> Path:
    import fsspec  # noqa: PLC0415 - a local path does without it

    folder = Path(tempfile.mkdtemp(prefix="llmconv-"))
    try:
        filesystem, remote = fsspec.url_to_fs(uri)
        filesystem.get(remote, str(folder) + "/", recursive=filesystem.isdir(remote))
    except (OSError, ImportError, ValueError) as error:
        raise InputRefused(
            f"cannot fetch `{uri.partition('?')[0]}`: {error}", hint="check the address and the credentials"
        ) from error
    return next(folder.iterdir(), folder)


def _from_hub(repository: str, revision: str) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - 0.3 s that a local path does not pay
    from huggingface_hub.errors import (  # noqa: PLC0415
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(repository, revision=revision or None))
    except (HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError, OSError) as error:
        raise InputRefused(
            f"`{repository}` is no local path, and the hub does not give it", hint="check the spelling, or the network"
        ) from error
