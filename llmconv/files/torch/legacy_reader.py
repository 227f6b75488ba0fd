"""Reads torch files from before torch 1.6 lazily: five pickles in a row, then every storage inline.

Layout (pytorch `torch/serialization.py`, `_legacy_save`): magic number, protocol 1001, system facts, the value, the
list of storage keys; then per key an int64 with the number of elements, and the elements. A storage may be a view.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from llmconv.errors import UnsupportedInput
from llmconv.files.file_problem import FileProblem, naming
from llmconv.files.pickles.machine import COPY_AGAIN, NAME_LIMIT, PickleHooks, PickleMachine
from llmconv.files.pickles.reader import HOOKS, Global, StorageRef, interpret, storage_dtype
from llmconv.files.source_file import open_source

MAGIC = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
"""The first pickle, the number 0x1950a86a20f9469cfc6c, without its two protocol bytes."""

PROTOCOL = 1001
SIZE = struct.Struct("<q")
HEAD = 16
STORAGE_LIMIT = 1 << 62

StoragePositions = dict[str, tuple[int, int]]
"""Storage key to (position in the file, bytes)."""


def is_legacy(path: Path) -> bool:
    """Whether `path` is a file with the magic number that `torch.save` wrote before torch 1.6."""
    if not path.is_file():
        return False
    with open_source(path) as file:
        return MAGIC in file.read(HEAD)


def read_legacy(path: Path) -> tuple[Any, StoragePositions]:
    """Returns the pickled value, its tensors as TensorRef, and the position of each storage; reads no tensor data.

    Raises:
        UnsupportedInput: another protocol, or a file of a big-endian machine.
        MalformedInput: truncated or hostile, or it contains a storage that no tensor uses.
    """
    with (
        naming(f"`{path.name}`", COPY_AGAIN),
        open(path, "rb") as file,
        mmap(file.fileno(), 0, access=ACCESS_READ) as data,
    ):
        storages = _Storages()
        _, position = _pickle(data, 0, path)
        protocol, position = _pickle(data, position, path)
        system, position = _pickle(data, position, path)
        _check_system(path, protocol, system)
        content, position = _pickle(data, position, path, PickleHooks(HOOKS.name, HOOKS.call, storages.refer))
        keys, position = _pickle(data, position, path)
        records = _records(data, position, keys, storages.roots)
        return content, records | storages.views(records)


def _pickle(data: mmap, start: int, path: Path, hooks: PickleHooks = HOOKS) -> tuple[Any, int]:
    """The value of the pickle at `start`, and the position of its end."""
    machine = PickleMachine(data, hooks, alone=False)
    machine.position = start
    return interpret(machine, path.name), machine.position


def _check_system(path: Path, protocol: Any, system: Any) -> None:
    if protocol != PROTOCOL:
        shown = str(protocol)[:20] if isinstance(protocol, int) else type(protocol).__name__
        raise UnsupportedInput(
            f"`{path.name}` has protocol {shown} of old torch files; only {PROTOCOL} is supported",
            hint="if you trust the file, load it with torch and save it again with `torch.save`",
        )
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise UnsupportedInput(f"`{path.name}` is big-endian", hint="save it again on a little-endian machine")


class _Storages:
    """Collects the storages that the value refers to: those with data of their own, and views of them."""

    def __init__(self) -> None:
        self.roots: dict[str, StorageRef] = {}
        self.parts: dict[str, tuple[str, int, int, int]] = {}

    def refer(self, reference: Any) -> StorageRef:
        """The storage of a persistent id `("storage", type, key, location, numel, view)`.

        The view is None or `(key, offset, numel)`.
        """
        match reference:
            case ("storage", Global() as kind, str() as key, str(), int() as numel, *view) if (
                0 <= numel < STORAGE_LIMIT and len(key) <= NAME_LIMIT
            ):
                root = StorageRef(storage_dtype(kind), kind.name, key, numel)
            case _:
                raise FileProblem("has a persistent id that is not a storage")
        known = self.roots.setdefault(key, root)
        if (known.kind, known.numel) != (root.kind, root.numel):
            raise FileProblem(f"has contradictory descriptions of storage `{key[:40]}`")
        match view:
            case [] | [None]:
                return root
            case [(str() as name, int() as offset, int() as size)] if (
                0 <= offset <= numel - size <= numel and len(name) <= NAME_LIMIT
            ):
                part, place = f"{key}:{name}", (key, offset, size, root.dtype.itemsize if root.dtype else 1)
                if self.parts.setdefault(part, place) != place:
                    raise FileProblem(f"has contradictory descriptions of view `{name[:40]}`")
                return StorageRef(root.dtype, root.kind, part, size)
            case _:
                raise FileProblem("has a view that reaches outside its storage")

    def views(self, records: StoragePositions) -> StoragePositions:
        """The positions of the views, given those of the storages."""
        for key, _, _, _ in self.parts.values():
            if key not in records:
                raise FileProblem("has a view of a storage that it does not contain")
        return {
            part: (records[key][0] + offset * itemsize, size * itemsize)
            for part, (key, offset, size, itemsize) in self.parts.items()
        }


def _records(data: mmap, position: int, keys: Any, roots: Mapping[str, StorageRef]) -> StoragePositions:
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise FileProblem("has no list of storage keys")
    records: StoragePositions = {}
    for key in keys:
        if key not in roots or key in records:
            raise FileProblem(f"has a duplicate or unused storage key `{key[:40]}`")
        if position + SIZE.size > len(data):
            raise FileProblem(f"is truncated: it ends at byte {len(data)}, before the end of its storages")
        (count,) = SIZE.unpack_from(data, position)
        dtype = roots[key].dtype
        if count != roots[key].numel or dtype is None:
            raise FileProblem(f"declares both {roots[key].numel} and {count} elements for storage `{key[:40]}`")
        start, size = position + SIZE.size, count * dtype.itemsize
        if start + size > len(data):
            raise FileProblem(f"is truncated: it ends at byte {len(data)}, before the end of its storages")
        records[key] = (start, size)
        position = start + size
    if position != len(data):
        raise FileProblem(f"continues after its last storage, at byte {position}")
    return records
