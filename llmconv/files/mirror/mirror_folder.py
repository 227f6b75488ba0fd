"""Makes the mirror of an object, or of all objects of a folder, in an object store."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import cache
from pathlib import Path, PurePosixPath

from llmconv.errors import InputRefused, MalformedInput
from llmconv.files.mirror import mirrored_file
from llmconv.files.mirror.mirrored_file import Blocks, MirroredFile
from llmconv.files.pointer_files import TEXT_LIMIT, follow
from llmconv.stores.address import StoreAddress, parse_address
from llmconv.stores.object_store import Head, ObjectStore

REQUESTS_AT_ONCE = 16
"""Of one mirror: a connection to a store carries about 90 MB/s."""

SMALL = 8 << 20
"""Bytes up to which files that are not known as weights are fetched at once."""

SIDE_FILES = frozenset((".json", ".jsonl", ".txt", ".md", ".jinja", ".model", ".py", ".yaml", ".yml", ".tiktoken"))
"""Suffixes of files that are fetched at once: other libraries read them."""

WEIGHTS = frozenset(
    (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".distcp", ".pdparams", ".onnx", ".data", ".gguf", ".npz", ".npy")
)
"""Suffixes of files of which only what is needed is fetched."""


def make_mirror(uri: str, folder: Path, *, whole: bool) -> Path:
    """Mirrors the object or the folder at `uri` in `folder`, and returns its path there.

    `folder` must be empty, and not be removed before `registry.remove(folder)`. Pointer files of Composer are followed.
    With `whole`, all content is fetched now, else only small files. Raises InputRefused if nothing is there, access is
    denied, or an object changed; OutputFailed if the store failed.
    """
    address = parse_address(uri)
    tree = StoreTree(ObjectStore(StoreAddress(address.scheme, address.bucket)))
    found = parse_address(follow(str(address), tree))
    heads = tree.heads(found)
    if not heads:
        raise InputRefused(f"`{address}` does not exist", hint="check the bucket and the path")
    root = folder / found.name
    mirrored_file.set_address(root, found)
    mirror_files(tree.store, [(root / name, head) for name, head in _below(found.key, heads)], folder)
    if whole:
        mirrored_file.complete(folder)
    return root


def mirror_files(store: Blocks, files: Sequence[tuple[Path, Head]], folder: Path) -> None:
    """Fetches small files to their paths, and makes the others files of which only what is read is fetched."""
    pool = fetching_pool()
    for path, head in files:
        _make_folder(path.parent, head)
    lazy = [(path, head) for path, head in files if head.size and not _is_small(head)]
    for path, head in lazy:
        mirrored_file.add(MirroredFile(path, store, head, folder, pool))
    list(pool.map(lambda file: _fetch(store, *file), (file for file in files if file not in lazy)))


@cache
def fetching_pool() -> Executor:
    """The threads that fetch, for all mirrors."""
    return ThreadPoolExecutor(REQUESTS_AT_ONCE, thread_name_prefix="fetch")


def _is_small(head: Head) -> bool:
    suffix = PurePosixPath(head.key).suffix
    return suffix in SIDE_FILES or (suffix not in WEIGHTS and head.size <= SMALL)


def _fetch(store: Blocks, path: Path, head: Head) -> None:
    """Writes all of a small object, with the time of the object."""
    path.write_bytes(b"".join(store.blocks(head, 0, head.size)) if head.size else b"")
    os.utime(path, ns=(head.modified, head.modified))


def _below(key: str, heads: Sequence[Head]) -> Iterator[tuple[str, Head]]:
    """Objects with their paths below `key` (empty for itself); raises MalformedInput for one that leads out of it."""
    for head in heads:
        parts = PurePosixPath(head.key.removeprefix(key).strip("/")).parts
        if ".." in parts or not head.key.isprintable():
            raise MalformedInput(
                f"the folder contains an object with the name {head.key[:80]!r}", hint="rename or delete it"
            )
        yield "/".join(parts), head


def _make_folder(path: Path, head: Head) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise MalformedInput(
            f"the object `{head.key}` lies below another object",
            hint="give a folder in which no object is a folder, too",
        ) from error


class StoreTree:
    """The objects of a whole bucket, for `follow`; paths are addresses."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self._found: dict[str, list[Head]] = {}

    def heads(self, place: StoreAddress) -> list[Head]:
        """The object at an address, or all objects of that folder; what its name suggests is asked for first."""
        if place.key not in self._found:
            ways = [self._object, self._folder]
            if PurePosixPath(place.key).suffix not in SIDE_FILES | WEIGHTS:
                ways.reverse()
            self._found[place.key] = ways[0](place.key) or ways[1](place.key)
        return self._found[place.key]

    def _object(self, key: str) -> list[Head]:
        head = self.store.head(key) if key else None
        return [head] if head else []

    def _folder(self, key: str) -> list[Head]:
        return [one for one in self.store.list(key) if _is_file(one)]

    def exists(self, path: str) -> bool:
        """Whether an object or a folder exists."""
        return bool(self.heads(parse_address(path)))

    def head(self, path: str) -> bytes | None:
        """See `PointerTree`."""
        place = parse_address(path)
        found = self.heads(place)
        if [one.key for one in found] != [place.key]:
            return None
        return self.store.read_range(found[0], 0, min(found[0].size, TEXT_LIMIT + 1)) if found[0].size else b""

    def roots(self, path: str) -> Iterator[str]:
        """The bucket first; any folder above the pointer may be what its names are relative to."""
        place = parse_address(path)
        parts = place.key.split("/") if place.key else []
        bucket = StoreAddress(place.scheme, place.bucket)
        yield str(bucket)
        yield from (str(bucket / "/".join(parts[:count])) for count in range(1, len(parts) + 1))


def _is_file(head: Head) -> bool:
    """Consoles of stores make empty objects as folders."""
    return not head.key.endswith("/")
