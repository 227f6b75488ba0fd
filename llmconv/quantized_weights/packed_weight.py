"""PackedWeight: one quantized weight of a checkpoint: its tensors in the files, and its plain values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NoReturn, Self

import numpy as np

from llmconv.errors import MalformedInput
from llmconv.files.safetensors_file import FileTensor
from llmconv.tensors import BY_NAME, Array, DType, LazyTensor

FLOAT32 = BY_NAME["float32"]
INFINITE = "has scales so large that its values are infinite"
TILE_ELEMENTS = 1 << 18  # values computed at once: a megabyte in float32, which fits into the cache


@dataclass(frozen=True, eq=False)
class PackedWeight(ABC):
    """A weight that is stored as codes with scales, and possibly zero points or tables."""

    name: str  # name of the plain weight
    parts: Mapping[str, LazyTensor]  # its tensors in the files, by name
    shape: tuple[int, ...]  # of the plain weight

    @abstractmethod
    def values(self, start: int, stop: int) -> Array:
        """Rows `start:stop` of the plain weight in float32, of shape `(stop - start, *shape[1:])`.

        The arithmetic is that of the library that wrote the files, in float32, without its final rounding.
        """

    @abstractmethod
    def requantized(self, weight: LazyTensor) -> Self:
        """Another weight of the same shape in the same format: parts with the same names, dtypes and shapes."""

    @property
    def integers(self) -> IntegerCodes | None:
        """The stored codes if they are integers with scales; None for codes of another kind."""
        return None

    @property
    def plain(self) -> LazyTensor:
        """The values as a lazy float32 tensor, computed by tiles."""
        return tiled(LazyTensor(FLOAT32, self.shape, self._finite_values), prod(self.shape[1:]))

    def _finite_values(self, start: int, stop: int) -> Array:
        try:
            with np.errstate(over="raise"):
                return self.values(start, stop)
        except FloatingPointError:
            refuse(self.name, INFINITE)


def with_recent_rows(tensor: LazyTensor) -> LazyTensor:
    """A computed tensor that caches its last small ranges of rows, which must not be changed."""

    def load(start: int, stop: int) -> Array:
        small = (stop - start) * prod(tensor.shape[1:]) <= TILE_ELEMENTS
        return _remember(tensor, start, stop) if small else tensor.rows(start, stop)

    return LazyTensor(tensor.dtype, tensor.shape, load)


@lru_cache(maxsize=32)
def _remember(tensor: LazyTensor, start: int, stop: int) -> Array:
    return tensor.rows(start, stop)


def tiled(tensor: LazyTensor, columns: int) -> LazyTensor:
    """The same computed tensor, computed few rows at a time; one row is computed from `columns` values."""
    step = max(1, TILE_ELEMENTS // max(1, columns))

    def load(start: int, stop: int) -> Array:
        result = np.empty((stop - start, *tensor.shape[1:]), tensor.dtype.numpy)
        for first in range(start, stop, step):
            last = min(first + step, stop)
            result[first - start : last - start] = tensor.rows(first, last)
        return result

    return LazyTensor(tensor.dtype, tensor.shape, load)


def peaks_of(weight: LazyTensor, start: int, stop: int) -> Array:
    """The largest absolute value of each of the rows `start:stop` of a weight [rows, columns], float32."""
    rows = np.abs(weight.rows(start, stop).reshape(stop - start, -1))
    largest: Array = rows.max(axis=1, initial=0)
    return largest.astype(np.float32)


def as_bytes(tensor: LazyTensor) -> LazyTensor:
    """The data of a tensor of any dtype and shape as one-dimensional uint8."""
    uint8 = BY_NAME["uint8"]
    if isinstance(tensor, FileTensor):
        return FileTensor(tensor.path, tensor.offset, uint8, (tensor.nbytes,), tensor.record)
    size = max(1, tensor.nbytes // max(1, tensor.num_rows))

    def load(start: int, stop: int) -> Array:
        rows = tensor.rows(start // size, -(-stop // size)).reshape(-1).view(np.uint8)
        return rows[start % size :][: stop - start]

    return LazyTensor(uint8, (tensor.nbytes,), load)


def unsigned(tensor: LazyTensor) -> LazyTensor:
    def load(start: int, stop: int) -> Array:
        return tensor.rows(start, stop).view(np.uint8) ^ np.uint8(128)

    return LazyTensor(BY_NAME["uint8"], tensor.shape, load)


def finite(scales: Array, name: str) -> Array:
    """Scales in float32; raises MalformedInput for a value that is not finite."""
    wide = scales.astype(np.float32)
    if not np.isfinite(wide).all():
        refuse(name, "has a scale that is not finite")
    return wide


def bounded(scales: Array, largest: int, name: str) -> Array:
    """Finite scales float32, as they are; raises MalformedInput if their product with `largest` is not finite."""
    with np.errstate(over="ignore"):
        reach = np.abs(scales).max(initial=0) * np.float32(largest)
    if not np.isfinite(reach):
        refuse(name, INFINITE)
    return scales


def require_middle(zeros: Array, middle: int, name: str) -> Array:
    """Zero points of a symmetric weight, as they are; raises MalformedInput for any but `middle`."""
    if (zeros != middle).any():
        refuse(name, f"has zero points other than {middle}, and the `quantization_config` says they are symmetric")
    return zeros


def require(tensor: LazyTensor, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> LazyTensor:
    """`tensor`, a part of a quantized weight; raises MalformedInput for another shape, or none of `dtypes`."""
    if tensor.dtype.name not in dtypes:
        refuse(name, f"is stored as {tensor.dtype.name}, not as {' or '.join(dtypes)}")
    if tensor.shape != shape:
        refuse(name, f"has a shape mismatch: expected {list(shape)}, got {list(tensor.shape)}")
    return tensor


def part(tensors: Mapping[str, LazyTensor], name: str, of: str) -> LazyTensor:
    """The tensor `name`, a part of the weight `of`; raises MalformedInput if it is missing."""
    if name not in tensors:
        refuse(of, f"is quantized, with the missing key `{name}`")
    return tensors[name]


def refuse(name: str, problem: str) -> NoReturn:
    """Raises MalformedInput about one tensor of a quantized model."""
    raise MalformedInput(
        f"`{name}` {problem}",
        hint="the model is damaged, or not quantized as its `quantization_config` says; copy or download it again",
    )


MOST_BITS = 8  # of a code of onnxruntime's products
SIZES = (128, 64, 32, 16)
"""Blocks of onnxruntime's products; in larger ones activations would be rounded to int8 too coarsely."""


@dataclass(frozen=True)
class IntegerCodes:
    """value = (code - zero point of its group) * scale of its group."""

    shape: tuple[int, ...]  # [N, K], or [experts, N, K]; columns of K share a scale in groups
    bits: int  # of a code
    groups: Array  # int64 [K], the group of each column
    # `codes(start, stop)` returns those of rows `start:stop` of the first axis, uint8 [rows, …, K]
    codes: Callable[[int, int], Array]
    scales: Callable[[int, int], Array]  # `scales(start, stop)` returns theirs, [rows, …, groups], finite
    # `zeros()` returns all zero points, uint8 [N, groups]; None if all are the middle code
    zeros: Callable[[], Array] | None
    scale_dtype: DType  # element type of the scales
    turned: bool = False  # the plain weight is [..., K, N]
    # the tensors with the codes and scales if their bytes are these codes, the first in the low bits, and these scales
    in_file: tuple[FileTensor, FileTensor] | None = None

    @property
    def block_size(self) -> int | None:
        """The largest block, columns sorted by group, that onnxruntime has a product for; else None."""
        groups = np.sort(self.groups)
        for size in SIZES:
            blocks = np.pad(groups, (0, -len(groups) % size), mode="edge").reshape(-1, size)
            if (blocks == blocks[:, :1]).all():
                return size
        return None

    @property
    def has_operator(self) -> bool:
        """Whether onnxruntime has a product for codes like these."""
        return self.bits <= MOST_BITS and self.block_size is not None
