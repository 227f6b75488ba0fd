"""Reads a pickle as data: nothing that the file names is ever imported, built or called.

A handful of globals (tensor views, storages, `OrderedDict`, …) become data records; every other global, call or
object becomes an inert `Stub`. It never falls back to `torch.load`.
"""

from __future__ import annotations

import gc
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llmconv.files.file_problem import FileProblem, naming
from llmconv.files.pickles.machine import COPY_AGAIN, NAME_LIMIT, PickleHooks, PickleMachine, Stub
from llmconv.files.pickles.opcodes import make_dict, run
from llmconv.files.pickles.tree_size import check_unfolded
from llmconv.tensors import BY_NAME, DType

RANK_LIMIT = 16

COMMAND_MODULES = {"os", "posix", "nt", "sys", "subprocess", "pty", "shutil", "socket", "importlib", "runpy", "ctypes"}
COMMAND_NAMES = {"eval", "exec", "compile", "open", "__import__", "breakpoint"}
"""Only for the message that the file is an attack: nothing named in a file is run in any case."""


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
    """Returns the value of one pickle: dicts, lists, tuples, sets, scalars and the records of this module.

    Args:
        data: the whole pickle.
        source: file name for error messages.

    Raises:
        MalformedInput: truncated, over a limit, an unknown opcode, bytes after the end, or a call that runs commands.
    """
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
    dtype = BY_NAME.get(named.name) if named else storage.dtype
    return TensorRef(storage, dtype, offset, shape, stride)


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


def _ordered_dict(pairs: Any = ()) -> dict[Any, Any]:
    return make_dict([item for pair in pairs for item in _pair(pair)])


def _pair(pair: Any) -> tuple[Any, Any]:
    first, second = pair
    return first, second


def _encode(text: str, encoding: str = "utf-8") -> bytes:
    """`_codecs.encode`, the form of bytes in protocol 2."""
    if encoding != "latin1":
        raise FileProblem(f"encodes bytes as `{encoding}`")
    return text.encode("latin1")


def _first(value: Any, *_rest: Any) -> Any:
    return value


def _from_type(function: Any, _kind: Any, args: tuple[Any, ...], _state: Any = None) -> Any:
    return _record(function, args)


RECORDS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._utils._rebuild_parameter": _first,
    "torch._utils._rebuild_parameter_with_state": _first,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "collections.OrderedDict": _ordered_dict,
    "torch.Size": lambda sizes=(): tuple(sizes),
    "_codecs.encode": _encode,
    "__builtin__.bytes": lambda: b"",
}
"""The only calls that yield data; each calls a constructor of this module, never the function that the file names."""


HOOKS = PickleHooks(_name, _record, _storage)
