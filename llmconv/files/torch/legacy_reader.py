"""Torch files from before torch 1.6: five pickles in a row, then every storage inline; read lazily.

Layout (pytorch `torch/serialization.py`, `_legacy_save`): magic number, protocol 1001, system facts, the value, the
list of storage keys; then per key an int64 with the number of elements, and the elements. A storage may be a view.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, NoReturn

from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.files.pickles.machine import NAME_LIMIT, Hooks, Machine, Refused
from llmconv.files.pickles.reader import HOOKS, Global, StorageRef, interpret, storage_dtype

MAGIC = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
"""The first pickle without its two bytes of protocol: the number 0x1950a86a20f9469cfc6c."""

PROTOCOL = 1001
SIZE = struct.Struct("<q")
HEAD = 16
STORAGE_LIMIT = 1 << 62

Records = dict[str, tuple[int, int]]
"""Storage key to (position in the file, bytes)."""


def is_legacy(path: Path) -> bool:
    """Whether a file begins with the magic number that `torch.save` wrote before 1.6."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return MAGIC in file.read(HEAD)


def read_legacy(path: Path) -> tuple[Any, Records]:
    """The pickled value (its tensors are TensorRef) and where each storage lies; no tensor data is read.

    Raises:
        UnsupportedInput: another protocol, or a file of a big-endian machine.
        MalformedInput: truncated, hostile, or a storage that nobody refers to.
    """
    with open(path, "rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        storages = _Storages()
        _, position = _pickle(data, 0, path)
        protocol, position = _pickle(data, position, path)
        system, position = _pickle(data, position, path)
        _check_system(path, protocol, system)
        content, position = _pickle(data, position, path, Hooks(HOOKS.name, HOOKS.call, storages.refer))
        keys, position = _pickle(data, position, path)
        records = _records(path, data, position, keys, storages.roots)
    return content, records | storages.views(path, records)


def _pickle(data: mmap, start: int, path: Path, hooks: Hooks = HOOKS) -> tuple[Any, int]:
    """The value of the pickle at `start`, and where it ends."""
    machine = Machine(data, hooks, alone=False)
    machine.position = start
    return interpret(machine, path.name), machine.position


def _check_system(path: Path, protocol: Any, system: Any) -> None:
    if protocol != PROTOCOL:
        told = str(protocol)[:20] if isinstance(protocol, int) else type(protocol).__name__
        raise UnsupportedInput(
            f"`{path.name}` has the protocol {told} of old torch files, known is {PROTOCOL}",
            hint="load it with a torch you trust it to, and save it again with `torch.save`",
        )
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise UnsupportedInput(f"`{path.name}` is big-endian", hint="save it again on a little-endian machine")


class _Storages:
    """The storages that the value refers to: those with data of their own, and views of them."""

    def __init__(self) -> None:
        self.roots: dict[str, StorageRef] = {}
        self.parts: dict[str, tuple[str, int, int, int]] = {}

    def refer(self, reference: Any) -> StorageRef:
        """A persistent id: `("storage", type, key, location, numel, view)`, the view None or `(key, offset, numel)`."""
        match reference:
            case ("storage", Global() as kind, str() as key, str(), int() as numel, *view) if (
                0 <= numel < STORAGE_LIMIT and len(key) <= NAME_LIMIT
            ):
                root = StorageRef(storage_dtype(kind), kind.name, key, numel)
            case _:
                raise Refused("refers to something outside that is no storage")
        known = self.roots.setdefault(key, root)
        if (known.kind, known.numel) != (root.kind, root.numel):
            raise Refused(f"describes storage `{key[:40]}` in two ways")
        match view:
            case [] | [None]:
                return root
            case [(str() as name, int() as offset, int() as size)] if (
                0 <= offset <= numel - size <= numel and len(name) <= NAME_LIMIT
            ):
                part, place = f"{key}:{name}", (key, offset, size, root.dtype.itemsize if root.dtype else 1)
                if self.parts.setdefault(part, place) != place:
                    raise Refused(f"describes view `{name[:40]}` in two ways")
                return StorageRef(root.dtype, root.kind, part, size)
            case _:
                raise Refused("describes a view that reaches outside its storage")

    def views(self, path: Path, records: Mapping[str, tuple[int, int]]) -> Records:
        """Where the views lie."""
        for key, _, _, _ in self.parts.values():
            if key not in records:
                _refuse(path, "has a view of a storage that it does not hold")
        return {
            part: (records[key][0] + offset * itemsize, size * itemsize)
            for part, (key, offset, size, itemsize) in self.parts.items()
        }


def _records(path: Path, data: mmap, position: int, keys: Any, roots: Mapping[str, StorageRef]) -> Records:
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        _refuse(path, "has no list of storages")
    records: Records = {}
    for key in keys:
        if key not in roots or key in records:
            _refuse(path, f"holds a storage `{key[:40]}` twice, or that no tensor uses")
        if position + SIZE.size > len(data):
            _refuse(path, f"is truncated: it ends at byte {len(data)}, before all of its storages")
        (count,) = SIZE.unpack_from(data, position)
        dtype = roots[key].dtype
        if count != roots[key].numel or dtype is None:
            _refuse(path, f"says that storage `{key[:40]}` has {roots[key].numel} elements, and also {count}")
        start, size = position + SIZE.size, count * dtype.itemsize
        if start + size > len(data):
            _refuse(path, f"is truncated: it ends at byte {len(data)}, before all of its storages")
        records[key] = (start, size)
        position = start + size
    if position != len(data):
        _refuse(path, f"goes on after its last storage, at byte {position}")
    return records


def _refuse(path: Path, problem: str) -> NoReturn:
    raise MalformedInput(f"`{path.name}` {problem}", hint="the file is damaged or hostile; copy it again")
