"""LazyTensor: a tensor with known dtype and shape, whose rows are read only when a writer needs them.

Arrays are numpy arrays; bfloat16 and float8 are types of `ml_dtypes`, so that their bits are never converted.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from llmconv.errors import InputRefused

Array = NDArray[Any]
# block size for streaming: small enough to stay in the CPU cache for hashing and writing, large enough to be few
BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class DType:
    """One element type under its three names."""

    name: str  # the name torch and Hugging Face configs use, such as `bfloat16`
    code: str  # the name in a safetensors header, such as `BF16`
    numpy: np.dtype[Any]  # the numpy (or `ml_dtypes`) type of its arrays

    @property
    def itemsize(self) -> int:
        return self.numpy.itemsize


DTYPES: tuple[DType, ...] = (
    DType("float64", "F64", np.dtype("<f8")),
    DType("float32", "F32", np.dtype("<f4")),
    DType("float16", "F16", np.dtype("<f2")),
    DType("bfloat16", "BF16", np.dtype(ml_dtypes.bfloat16)),
    DType("float8_e4m3fn", "F8_E4M3", np.dtype(ml_dtypes.float8_e4m3fn)),
    DType("float8_e5m2", "F8_E5M2", np.dtype(ml_dtypes.float8_e5m2)),
    DType("float8_e8m0fnu", "F8_E8M0", np.dtype(ml_dtypes.float8_e8m0fnu)),
    DType("int64", "I64", np.dtype("<i8")),
    DType("int32", "I32", np.dtype("<i4")),
    DType("int16", "I16", np.dtype("<i2")),
    DType("int8", "I8", np.dtype("i1")),
    DType("uint64", "U64", np.dtype("<u8")),
    DType("uint32", "U32", np.dtype("<u4")),
    DType("uint16", "U16", np.dtype("<u2")),
    DType("uint8", "U8", np.dtype("u1")),
    DType("bool", "BOOL", np.dtype("?")),
)
BY_NAME = {dtype.name: dtype for dtype in DTYPES}
BY_CODE = {dtype.code: dtype for dtype in DTYPES}
FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class LazyTensor:
    """A tensor whose rows (slices of dim 0) are computed or read on demand."""

    dtype: DType
    shape: tuple[int, ...]  # sizes; `()` is a scalar
    # `load(start, stop)` returns rows `start:stop` as a C-contiguous array of shape `(stop - start, *shape[1:])`; a
    # scalar is loaded with `(0, 1)` and has shape `(1,)`
    load: Callable[[int, int], Array]
    # for computed values, returns the tensor rounded once to another dtype instead of this one
    recast: Callable[[DType], LazyTensor] | None = None

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def num_rows(self) -> int:
        """Size of dim 0 (1 for a scalar)."""
        return self.shape[0] if self.shape else 1

    def rows(self, start: int, stop: int) -> Array:
        return self.load(start, stop)

    def read(self) -> Array:
        """The whole tensor as an array of `shape`."""
        return self.load(0, self.num_rows).reshape(self.shape)

    def blocks(self, limit: int = BLOCK_BYTES) -> Iterator[tuple[int, int]]:
        """Row ranges `(start, stop)` that cover the tensor, each of at most `limit` bytes (or one row)."""
        row_bytes = max(1, self.nbytes // max(1, self.num_rows))
        step = max(1, limit // row_bytes)
        for start in range(0, self.num_rows, step):
            yield start, min(start + step, self.num_rows)


# part of a file to write: bytes, a tensor's data, or a function of the CRC-32 of all tensors, called in order
Piece = bytes | LazyTensor | Callable[[Sequence[int]], bytes]
# a file format: from the tensors, in order, to all pieces of a file that contains them
Container = Callable[[Mapping[str, LazyTensor]], Iterable[Piece]]


def in_memory(array: Array, dtype: DType) -> LazyTensor:
    """A LazyTensor of an array of any shape, whose bits are reinterpreted as `dtype`."""
    rows = np.ascontiguousarray(array)  # also gives a scalar a dimension
    return LazyTensor(dtype, np.shape(array), lambda start, stop: rows[start:stop])


def cast(tensor: LazyTensor, dtype: DType, name: str = "a weight", flushed: Flushed | None = None) -> LazyTensor:
    """`tensor` rounded to `dtype` (nearest even); non-float tensors and equal dtypes are returned unchanged.

    Reading the result raises InputRefused where a finite value is too large for `dtype`; `flushed` counts the values
    that become zero.
    """
    if tensor.dtype == dtype or tensor.dtype.name not in ("float64", *FLOATS):
        return tensor
    if tensor.recast:
        return tensor.recast(dtype)
    return LazyTensor(dtype, tensor.shape, lambda start, stop: rounded(tensor.load(start, stop), dtype, name, flushed))


@dataclass
class Flushed:
    """Number of values that a cast flushed to zero."""

    _counts: list[int] = field(default_factory=list)

    def add(self, count: int) -> None:
        """Counts some more; several threads may call it at once."""
        self._counts.append(count)

    @property
    def count(self) -> int:
        return sum(self._counts)


def rounded(values: Array, dtype: DType, name: str, flushed: Flushed | None = None) -> Array:
    """Values rounded to a float dtype, nearest even, `flushed` counting new zeros; InputRefused if one overflows."""
    with np.errstate(over="ignore"):
        result: Array = values.astype(dtype.numpy)
    if dtype.name != "float16":
        return result
    if (np.isinf(result) & np.isfinite(values)).any():
        largest = np.abs(values[np.isfinite(values)]).max()
        raise InputRefused(
            f"`{name}` contains {float(largest):.6g}, and the largest number of float16 is 65504",
            hint="bfloat16 has the range of float32: give `--dtype bfloat16`, or for graphs `--precision bfloat16`",
        )
    if flushed and (zeros := int(((result == 0) & (values != 0)).sum())):
        flushed.add(zeros)
    return result


def as_bytes(array: Array) -> memoryview:
    """The array's memory, row-major, as bytes."""
    return array.reshape(-1).view("u1").data


Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")


def lists_by_key(pairs: Iterable[tuple[Key, Item]]) -> dict[Key, list[Item]]:
    """The items of pairs (key, item) by key, in their order."""
    found: dict[Key, list[Item]] = {}
    for key, item in pairs:
        found.setdefault(key, []).append(item)
    return found
