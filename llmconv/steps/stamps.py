"""Stamps: what tells whether a file has changed, without reading it.

The stamp of a local file is its size and its time of change, as of `make`; that of an object in a store is its ETag,
that of a model on the Hub its commit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from llmconv.convert.models.config_file import YAML_LIMIT
from llmconv.errors import LlmconvError
from llmconv.files.paths import is_address, without_credentials
from llmconv.files.pointer_files import follow_local
from llmconv.files.sources import PARTIAL, is_hub_id
from llmconv.hub.address import HubAddress, hub_address, is_hub_address, parse_hub_address
from llmconv.output.manifest import MANIFEST
from llmconv.stores.address import is_store_address, parse_address

Stamps = dict[str, str]
"""By path, relative to the folder of the run file, or by address. An empty stamp never equals another run's."""

UNKNOWN = ""
MANIFEST_STAMP = "manifest"
"""Of every `llmconv.json`: each command adds to it, and what it lists has stamps of its own."""

SIDE_FILES = {".json", ".yaml", ".yml", ".model", ".txt", ".tiktoken", ".jinja", ".ckpt", ".symlink"}
"""Suffixes of the files that formats and adapters look for next to the named one."""

ABOVE = {"config.json", "generation_config.json", "params.json", "tokenizer.json", "tokenizer.model"}
"""What formats look for in the folder above a checkpoint."""

STEPS = re.compile(r"^steps\s*:", re.MULTILINE)

TAGS = ("ETag", "etag", "e_tag", "md5Hash", "LastModified", "mtime", "last_modified", "created")
"""What file systems of fsspec call the property that changes with the content."""

SECONDS = 30.0
"""Timeout of the Hub."""


def stamps(names: Iterable[str], home: Path, *, are_read: bool = False) -> Stamps:
    """The stamps of all files of some inputs or outputs (paths, URIs or Hub ids); none of those that do not exist.

    With `are_read`, they are inputs: files are read with others near them, and a name such as `org/name` that does not
    exist here is a model on the Hub.
    """
    found: Stamps = {}
    for name in names:
        path = home / name
        if is_address(name):
            found |= _remote_stamps(name)
        elif os.path.lexists(target := follow_local(path)):
            near = _read_with(target) if are_read else ()
            found |= {os.path.relpath(file, home): _stamp(file) for file in (*_files(target), *near, *_files(path))}
        elif are_read and is_hub_id(name):
            found[name] = _commit(hub_address(name))
    return found


def _files(path: Path) -> Iterator[Path]:
    """A file, or the files of a folder at any depth, also behind links to folders."""
    if not path.is_dir():
        yield from [path] if path.is_file() else ()
        return
    seen: set[str] = set()
    for folder, below, names in os.walk(path, followlinks=True):
        place = os.path.realpath(folder)
        if place in seen or folder.endswith(PARTIAL):
            below.clear()
            continue
        seen.add(place)
        yield from (file for name in names if (file := Path(folder) / name).is_file())


def _read_with(path: Path) -> list[Path]:
    """The configurations and tokenizers that formats look for next to a path, and in the folder above it."""
    near = [one for one in _plain(path.parent) if one.suffix in SIDE_FILES and path.is_file()]
    above = path.parent if path.is_dir() else path.parent.parent
    far = [one for one in _plain(above) if one.name in ABOVE or one.suffix in (".ckpt", ".symlink")]
    return [one for one in {*near, *far} if one != path and not _is_run_file(one)]


def _plain(folder: Path) -> Iterator[Path]:
    """The files of a folder that are not hidden; none of a folder that cannot be read."""
    with suppress(OSError):
        yield from (one for one in folder.iterdir() if not one.name.startswith(".") and one.is_file())


def _is_run_file(path: Path) -> bool:
    """Whether a file has steps, and so is not read by one."""
    if path.suffix not in (".yaml", ".yml") or path.stat().st_size > YAML_LIMIT:
        return False
    return bool(STEPS.search(path.read_text("utf-8", "replace")))


def _stamp(file: Path) -> str:
    if file.name == MANIFEST:
        return MANIFEST_STAMP
    status = file.stat()
    return f"{status.st_size}:{status.st_mtime_ns}"


def _remote_stamps(uri: str) -> Stamps:
    """A stamp for each object below a URI; `UNKNOWN` if its store does not tell whether one has changed."""
    shown = without_credentials(uri)
    try:
        if is_hub_address(uri):
            return {shown: _commit(parse_hub_address(uri))}
        listed = _in_store(uri) if is_store_address(uri) else _in_file_system(uri)
        return {f"{shown}#{key}": stamp for key, stamp in listed}
    except (LlmconvError, OSError, ImportError, ValueError):  # the step itself reports what is wrong
        return {shown: UNKNOWN}


def _commit(address: HubAddress) -> str:
    """The commit that a revision is now."""
    from huggingface_hub import HfApi  # noqa: PLC0415 - 0.3 s that a local path does not pay

    try:
        info = HfApi().model_info(address.repository, revision=address.revision or None, timeout=SECONDS)
        return info.sha or UNKNOWN
    except Exception as error:  # the class for "no connection" differs between versions
        if isinstance(error, MemoryError):
            raise
        return UNKNOWN


def _in_store(uri: str) -> Iterator[tuple[str, str]]:
    from llmconv.stores.object_store import ObjectStore  # noqa: PLC0415 - an extra

    address = parse_address(uri)
    heads = [*ObjectStore(address).list()]
    if not heads and address.key:
        head = ObjectStore(address.parent).head(address.name)
        heads = [head] if head else []
    for head in heads:
        is_manifest = head.key.rpartition("/")[2] == MANIFEST
        yield head.key, MANIFEST_STAMP if is_manifest else head.e_tag or f"{head.size}:{head.modified}"


def _in_file_system(uri: str) -> Iterator[tuple[str, str]]:
    import fsspec  # noqa: PLC0415 - not needed for local paths

    filesystem, place = fsspec.url_to_fs(uri)
    found: dict[str, Any] = filesystem.find(place, detail=True) or {place: filesystem.info(place)}
    for key, info in found.items():
        tag = next((info[name] for name in TAGS if info.get(name)), None)
        yield key.removeprefix(place), UNKNOWN if tag is None else f"{info.get('size')}:{tag}"
