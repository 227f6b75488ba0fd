"""`.pdparams` files read lazily: one pickle of numpy arrays, whose bytes stay where they lie in the file.

Layout (paddle `framework/io.py`, `framework/io_utils.py`): a dict of name to numpy array, of protocol 2 to 4, and under
`StructuredToParameterName@@` a table of names that nothing needs. bfloat16 is stored as uint16.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from llmconv.convert.algebra.operations import concat
from llmconv.convert.formats.paddle.utf8_bytes import Utf8Bytes
from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.files.file_problem import FileProblem
from llmconv.files.pickles.machine import PickleHooks, PickleMachine, Stub
from llmconv.files.pickles.opcodes import STRING_LIMIT, text
from llmconv.files.pickles.reader import HOOKS, RANK_LIMIT, Global, interpret
from llmconv.files.safetensors_file import FileTensor
from llmconv.tensors import BY_NAME, DType, LazyTensor

KEPT_BYTES = 1024
"""Longer values are not read, only their place is kept."""

HEAD_BYTES = 1 << 20
PARAMETER_NAMES = "StructuredToParameterName@@"
SPLIT_ARRAYS = "UnpackBigParamInfor@@"
"""Before protocol 4 arrays over 2^30 - 1 bytes are cut: `{name: {"OriginShape": sizes, "slices": [names]}}`."""

TORCH_MAGIC = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"

NUMPY_CODES = {dtype.numpy.str[1:]: dtype for dtype in BY_NAME.values() if dtype.numpy.kind in "fiub"}
NUMPY_CODES["u2"] = BY_NAME["bfloat16"]

MARKS = (b"multiarray", b"_frombuffer")
RECONSTRUCT = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
FROM_BUFFER = ("numpy.core.numeric._frombuffer", "numpy._core.numeric._frombuffer")


@dataclass(frozen=True, eq=False)
class BytesAt:
    """A long value that was left in the file; `encoded`: as UTF-8 text, one character a byte (protocol 2)."""

    position: int
    size: int
    encoded: bool


@dataclass(frozen=True)
class PaddleFile:
    """What a `.pdparams` file holds: its tensors, in file order, and the names of what is no tensor."""

    tensors: dict[str, LazyTensor]
    others: tuple[str, ...]


class _FileMachine(PickleMachine):
    """A PickleMachine over a mapped file, which steps over long values."""

    def sized(self, count: int, decode: Callable[[bytes], Any], limit: int) -> Any:
        if count <= KEPT_BYTES or limit < STRING_LIMIT:
            return super().sized(count, decode, limit)
        place = BytesAt(self.position, count, decode is text)
        self.position += count
        self.skipped += count
        if self.position > len(self.data):
            raise FileProblem(f"is truncated: it ends at byte {len(self.data)}")
        return place


def is_pdparams(path: Path) -> bool:
    """Whether `path` is a pickle (protocol 2 to 5) that begins with numpy arrays."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
    is_pickle = head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")
    return is_pickle and not head.startswith(TORCH_MAGIC) and any(mark in head for mark in MARKS)


def open_pdparams(path: Path) -> PaddleFile:
    """The tensors of a file that `paddle.save` wrote; no tensor data is read.

    Raises:
        MalformedInput: truncated, hostile, or an array whose parts contradict each other.
        UnsupportedInput: an element type or byte order that safetensors cannot hold.
    """
    content = _read(path)
    if not isinstance(content, dict):
        raise MalformedInput(
            f"`{path.name}` is no state dict", hint="save the model's `state_dict()` with `paddle.save`"
        )
    tensors: dict[str, LazyTensor] = {}
    others: list[str] = []
    for key, value in content.items():
        name = key if isinstance(key, str) else f"({type(key).__name__})"
        array = _named_array(value)
        if array is not None:
            tensors[name] = _tensor(path, name, array)
        elif name not in (PARAMETER_NAMES, SPLIT_ARRAYS):
            others.append(name)
    return PaddleFile(_joined(path, tensors, content.get(SPLIT_ARRAYS, {})), tuple(others))


def _read(path: Path) -> Any:
    if path.stat().st_size == 0:
        raise MalformedInput(f"`{path.name}` is empty", hint="copy it again from where it was saved")
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return interpret(_FileMachine(data, PickleHooks(_name, _call, HOOKS.refer)), path.name)


def _name(module: str, name: str) -> Any:
    if (module, name) in (("builtins", "eval"), ("__builtin__", "eval")):
        return Global(module, name)  # only to be seen in `_call`, which looks at its arguments
    return HOOKS.name(module, name)


def _call(function: Any, args: tuple[Any, ...]) -> Any:
    """As `HOOKS.call`, and the two calls by which paddle stores tensors inside other objects."""
    match str(function) if isinstance(function, Global) else "", args:
        case (("builtins.eval" | "__builtin__.eval"), ("data", {"data": Stub() as array})):
            return array  # paddle's spelling of a static tensor: the array itself
        case (("builtins.eval" | "__builtin__.eval"), _):
            return HOOKS.name("builtins", "eval")  # refused there
        case (("builtins.tuple" | "__builtin__.tuple"), ((tuple() | list()) as items,)):
            return tuple(items)
        case "_codecs.encode", (BytesAt() as place, "latin1"):
            return place
    return HOOKS.call(function, args)


def _named_array(value: Any) -> Stub | None:
    """The array of a value that is one, or that is (name, array) as in nested objects."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
        value = value[1]
    return value if _made_by(value) in (*RECONSTRUCT, *FROM_BUFFER) else None


def _made_by(value: Any) -> str:
    """The global that a Stub would have called; empty for anything else."""
    return str(value.function) if isinstance(value, Stub) and isinstance(value.function, Global) else ""


def _tensor(path: Path, name: str, array: Stub) -> LazyTensor:
    if _made_by(array) in FROM_BUFFER:
        state = (*array.args, None, None, None)
        data, kind, shape, column_major = state[0], state[1], state[2], state[3] == "F"
    else:
        match array.state:
            case (_, shape, kind, column_major, data):
                pass
            case _:
                _refuse(path, f"holds no data for `{name}`")
    dtype = _dtype(path, name, kind)
    if not isinstance(shape, tuple) or not _naturals(shape):
        _refuse(path, f"gives `{name}` an impossible shape")
    if column_major and len(shape) > 1:
        raise UnsupportedInput(
            f"`{name}` in `{path.name}` is stored by columns", hint="save it with `np.ascontiguousarray`"
        )
    return _placed(path, name, data, dtype, shape)


def _naturals(values: Any) -> bool:
    return len(values) <= RANK_LIMIT and all(type(value) is int and 0 <= value < 1 << 48 for value in values)


def _dtype(path: Path, name: str, kind: Any) -> DType:
    code, order = None, "|"
    if _made_by(kind) == "numpy.dtype" and kind.args:
        code = kind.args[0]
        order = kind.state[1] if isinstance(kind.state, tuple) and len(kind.state) > 1 else order
    if not isinstance(code, str) or code not in NUMPY_CODES or order not in ("<", "|"):
        shown = f"`{order}{code}`" if isinstance(code, str) and isinstance(order, str) else "a compound type"
        raise UnsupportedInput(
            f"`{name}` in `{path.name}` is stored as {shown[:40]}",
            hint="only little-endian floats, integers and bools can be converted",
        )
    return NUMPY_CODES[code]


def _placed(path: Path, name: str, data: Any, dtype: DType, shape: tuple[int, ...]) -> LazyTensor:
    wanted = prod(shape) * dtype.itemsize
    if isinstance(data, str):
        data = data.encode("latin1", "replace")
    if isinstance(data, BytesAt) and data.encoded:
        if not wanted <= data.size <= 2 * wanted:
            _refuse(path, f"has {data.size} characters for `{name}`, its shape needs {wanted} bytes")
        return Utf8Bytes(path, data.position, data.size).tensor(dtype, shape)
    size = data.size if isinstance(data, BytesAt) else len(data) if isinstance(data, bytes) else -1
    if size != wanted:
        _refuse(path, f"has {size} bytes for `{name}`, its shape needs {wanted}")
    if isinstance(data, BytesAt):
        return FileTensor(path, data.position, dtype, shape)
    rows = np.frombuffer(data, dtype.numpy).reshape(shape or (1,))
    return LazyTensor(dtype, shape, lambda start, stop: rows[start:stop])


def _joined(path: Path, tensors: dict[str, LazyTensor], table: Any) -> dict[str, LazyTensor]:
    """The tensors with those that were cut (`name@@.0`, `name@@.1`, …) whole again."""
    joined = dict(tensors)
    for name, entry in table.items() if isinstance(table, dict) else ():
        match entry:
            case {"OriginShape": (tuple() | list()) as sizes, "slices": (tuple() | list()) as pieces} if _naturals(
                sizes
            ):
                parts = [joined.pop(piece, None) for piece in pieces if isinstance(piece, str)]
                joined[str(name)] = _reshaped(path, str(name), parts, tuple(sizes))
            case _:
                _refuse(path, f"does not say how `{name}` was cut")
    return joined


def _reshaped(path: Path, name: str, parts: list[LazyTensor | None], shape: tuple[Any, ...]) -> LazyTensor:
    present = [part for part in parts if part is not None and len(part.shape) == 1]
    if not parts or len(present) != len(parts):
        _refuse(path, f"lacks a piece of `{name}`, which is cut into {len(parts)}")
    flat, row = concat(present, 0), prod(shape[1:])
    if flat.shape[0] != prod(shape):
        _refuse(path, f"has {flat.shape[0]} elements for `{name}`, its shape needs {prod(shape)}")
    return LazyTensor(
        flat.dtype, shape, lambda start, stop: flat.rows(start * row, stop * row).reshape(stop - start, *shape[1:])
    )


def _refuse(path: Path, problem: str) -> NoReturn:
    raise MalformedInput(f"`{path.name}` {problem}", hint="the file is damaged or hostile; copy it again")


def as_bfloat16(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """The tensors of a safetensors file, with uint16 taken for what Paddle means by it."""
    bfloat16 = BY_NAME["bfloat16"]
    return {
        name: FileTensor(tensor.path, tensor.offset, bfloat16, tensor.shape)
        if isinstance(tensor, FileTensor) and tensor.dtype.name == "uint16"
        else tensor
        for name, tensor in tensors.items()
    }
