"""Reads a pickle as data: nothing that the file names is ever imported, built or called.

A handful of globals (tensor views, storages, `OrderedDict`, …) become data records; every other global, call or
object becomes an inert `Stub`. It never falls back to `torch.load`.

The size of a value as a tree is limited, since code that walks, copies or prints it pays for the tree: lists of ten
references to lists of ten references grow exponentially. The values that trainers save share only small parts.
"""

from __future__ import annotations

import gc
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

from llmconv.files.pickle_machine import COPY_AGAIN, NAME_LIMIT, PickleHooks, PickleMachine, Stub, make_dict, run
from llmconv.files.source_file import FileProblem, naming
from llmconv.tensors import BY_NAME, DType

RANK_LIMIT = 16
COMMAND_MODULES = {"os", "posix", "nt", "sys", "subprocess", "pty", "shutil", "socket", "importlib", "runpy", "ctypes"}
# only for the message that the file is an attack: nothing named in a file is run in any case
COMMAND_NAMES = {"eval", "exec", "compile", "open", "__import__", "breakpoint"}


@dataclass(frozen=True, eq=False, slots=True)
class Global:
    """The name of a class or function, never the object itself."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, eq=False, slots=True)
class StorageRef:
    """A storage record of a torch file: `dtype` is None for an untyped one, whose `numel` counts bytes."""

    dtype: DType | None
    kind: str
    key: str
    numel: int


@dataclass(frozen=True, eq=False, slots=True)
class TensorRef:
    """A view of a storage; `offset` and `stride` count elements of `dtype`."""

    storage: StorageRef
    dtype: DType | None
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}


def read_pickle(data: bytes, source: str) -> Any:
    """The value of one pickle; MalformedInput if it is truncated, over a limit, or runs commands, or bytes follow."""
    return interpret(PickleMachine(data, HOOKS), source)


def interpret(machine: PickleMachine, source: str) -> Any:
    """Returns the value of the pickle in `machine`, bounded in size as a tree too; see `read_pickle`."""
    with naming(f"the pickle in `{source}`", COPY_AGAIN), _without_collector():
        try:
            value = run(machine)
            machine.forget()
            check_unfolded(value)
            return value
        except (IndexError, KeyError, struct.error, UnicodeDecodeError):
            reason = "truncated or damaged"
        except (TypeError, ValueError, AttributeError, OverflowError, RecursionError):
            reason = "inconsistent"
        raise FileProblem(f"is {reason} at byte {machine.position}")


@contextmanager
def _without_collector() -> Iterator[None]:
    """Turns the cycle collector off, which would scan all new objects again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _name(module: str, name: str) -> Global:
    builtin = module in ("builtins", "__builtin__")
    if module.partition(".")[0] in COMMAND_MODULES or (builtin and name in COMMAND_NAMES):
        raise FileProblem(
            f"calls `{module}.{name}`; nothing was run",
            "this file is an attack, not a checkpoint; delete it and report it to its source",
        )
    return Global(module, name)


def _record(function: Any, args: tuple[Any, ...]) -> Any:
    """The data record for a known call, an inert Stub for any other."""
    make = RECORDS.get(str(function)) if isinstance(function, Global) else None
    return make(*args) if make else Stub(function, args)


def _tensor(
    storage: Any, offset: Any, shape: Any, stride: Any, _grad: Any = None, _hooks: Any = None, *more: Any
) -> TensorRef:
    """`torch._utils._rebuild_tensor_v2`, and `_v3`, which names the dtype of an untyped storage."""
    if not isinstance(storage, StorageRef) or not _naturals((offset,)):
        raise FileProblem("describes a tensor without a storage")
    if not (_is_shape(shape) and _is_shape(stride) and len(shape) == len(stride)):
        raise FileProblem("describes a tensor with an invalid shape")
    named = more[0] if more and isinstance(more[0], Global) else None
    return TensorRef(storage, BY_NAME.get(named.name) if named else storage.dtype, offset, shape, stride)


def _is_shape(values: Any) -> bool:
    return isinstance(values, tuple) and len(values) <= RANK_LIMIT and _naturals(values)


def _naturals(values: Any) -> bool:
    return isinstance(values, tuple) and all(type(value) is int and 0 <= value < 1 << 62 for value in values)


def _storage(reference: Any) -> StorageRef:
    """A persistent id: `("storage", type, key, location, numel)`."""
    match reference:
        case ("storage", Global() as kind, str() as key, str(), int() as numel) if (
            0 <= numel < 1 << 62 and len(key) <= NAME_LIMIT
        ):
            return StorageRef(storage_dtype(kind), kind.name, key, numel)
        case _:
            raise FileProblem("has a persistent id that is not a storage")


def storage_dtype(kind: Global) -> DType | None:
    """The element type of a torch storage class, None for an untyped or quantized one."""
    return BY_NAME.get(STORAGES.get(kind.name, ""))


def _encode(text: str, encoding: str = "utf-8") -> bytes:
    """`_codecs.encode`, the form of bytes in protocol 2."""
    if encoding != "latin1":
        raise FileProblem(f"encodes bytes as `{encoding}`")
    return text.encode("latin1")


def _with_state(function: Any, _kind: Any, args: Any, state: Any = None) -> Any:
    """A call and the attributes of its result, which a stub of a subclass (`DTensor`, `ShardedTensor`) keeps."""
    made = _record(function, args)
    if isinstance(made, Stub):
        made.state = state
    return made


def _first(value: Any, *_rest: Any) -> Any:
    return value


# the only calls that yield data; each calls a constructor of this module, never the function that the file names
RECORDS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._utils._rebuild_parameter": _first,
    "torch._utils._rebuild_parameter_with_state": _first,
    "torch._tensor._rebuild_from_type_v2": _with_state,
    "collections.OrderedDict": lambda pairs=(): make_dict([one for first, second in pairs for one in (first, second)]),
    "torch.Size": lambda sizes=(): tuple(sizes),
    "_codecs.encode": _encode,
    "__builtin__.bytes": lambda: b"",
}


HOOKS = PickleHooks(_name, _record, _storage)
TREE, TREE_PER_PART = 1_000_000, 2  # limit of parts in the tree: a constant, plus this many per part in memory
DEPTH_LIMIT, OBJECT_DEPTH_LIMIT = 200, 5_000  # nesting of containers, and of objects: code that walks them is recursive
CHARACTERS = 64  # characters of a text that count as one part
KINDS = frozenset({dict, list, tuple, set, frozenset, Stub})
COUNTED = KINDS | {str, bytes}


class _Frame:
    """A container on the current path from the root."""

    __slots__ = ("children", "depth", "node", "shared", "size")

    def __init__(self, node: Any, *, shared: bool) -> None:
        self.node, self.shared = node, shared
        self.children = _children(node)
        self.size = self.depth = 1


def _children(node: Any) -> Iterator[Any]:
    if isinstance(node, dict):
        return chain(node, node.values())
    return iter((node.function, node.args, node.state)) if isinstance(node, Stub) else iter(node)


class _TreeWalk:
    """The walk: containers on the current path, and the sizes of shared containers."""

    def __init__(self, root: Any) -> None:
        self.frames = [_Frame(root, shared=True)]
        self.known: dict[int, tuple[int, int]] = {}
        self.waiting = {id(root): 0}
        self.parts = 0

    def run(self) -> None:
        """Walks the whole value; raises FileProblem as `check_unfolded`."""
        while self.frames:
            frame = self.frames[-1]
            if not any(self.add(frame, child) for child in frame.children):
                self.frames.pop()
                self.leave(frame)

    def add(self, frame: _Frame, child: Any) -> bool:
        """Counts a child; returns whether it has to be walked first."""
        kind = type(child)
        self.parts += 1
        frame.size += 1
        if kind is str or kind is bytes:
            if len(child) >= CHARACTERS:
                frame.size += len(child) // CHARACTERS
                self.parts += 0 if id(child) in self.known else len(child) // CHARACTERS
                self.known[id(child)] = 0, 0
            return False
        if kind not in KINDS or (kind is not Stub and not child):
            return False
        shared = sys.getrefcount(child) > _UNSHARED
        if not shared and (kind is tuple or kind is list) and COUNTED.isdisjoint(map(type, child)):
            self.parts += len(child)
            frame.size += len(child)
            frame.depth = max(frame.depth, 2)
            return False
        return not self.is_known(frame, child) if shared else self.enter(child, shared=False)

    def is_known(self, frame: _Frame, child: Any) -> bool:
        """Adds the known size of a shared child; else enters it."""
        if known := self.known.get(id(child)):
            frame.size += known[0]
            frame.depth = max(frame.depth, known[1] + 1)
            return True
        if (place := self.waiting.get(id(child))) is not None:
            if not any(type(one.node) is Stub for one in self.frames[place:]):
                raise FileProblem("has a container that contains itself")
            return True
        return not self.enter(child, shared=True)

    def enter(self, child: Any, *, shared: bool) -> bool:
        """Starts walking a child; its container is charged in `leave`."""
        if shared:
            self.waiting[id(child)] = len(self.frames)
        self.frames.append(_Frame(child, shared=shared))
        if len(self.frames) > OBJECT_DEPTH_LIMIT:
            raise FileProblem(f"is nested deeper than {OBJECT_DEPTH_LIMIT}")
        return True

    def leave(self, frame: _Frame) -> None:
        """Charges a container, all of whose children are counted, to its own container."""
        depth = 0 if type(frame.node) is Stub else frame.depth
        if depth > DEPTH_LIMIT:
            raise FileProblem(f"is nested deeper than {DEPTH_LIMIT}")
        if frame.size > TREE + TREE_PER_PART * self.parts:
            raise FileProblem("refers to the same parts again and again, which checkpoints do not")
        if frame.shared:
            del self.waiting[id(frame.node)]
            self.known[id(frame.node)] = frame.size, depth
        if self.frames:
            self.frames[-1].size += frame.size
            self.frames[-1].depth = max(self.frames[-1].depth, depth + 1)


class _ReferenceProbe(_TreeWalk):
    """Measures the reference count of a child that only its container refers to."""

    found = 0

    def add(self, frame: _Frame, child: Any) -> bool:
        self.found = sys.getrefcount(child)
        return False


_probe = _ReferenceProbe([[None]])
_probe.run()
_UNSHARED = _probe.found


def check_unfolded(root: Any) -> None:
    """Counts a walk from `root`; FileProblem if it is far larger than the value, too deep, or endless but by stubs."""
    if type(root) in KINDS:
        _TreeWalk(root).run()
