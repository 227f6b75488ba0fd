"""ScaledWeight: float8 or int8 codes with a scale per block; blocks at the edges may be partial."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import prod
from threading import Lock
from typing import Any, Self

import numpy as np

from llmconv.errors import MalformedInput
from llmconv.quantized_weights.packed_weight import (
    FLOAT32,
    TILE_ELEMENTS,
    IntegerCodes,
    PackedWeight,
    bounded,
    finite,
    part,
    refuse,
    tiled,
    unsigned,
)
from llmconv.tensors import Array, DType, LazyTensor

LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}  # the largest absolute value of the codes

SCALES = ("float32", "bfloat16", "float16", "uint8")
NORMAL = 0x3C800000  # the bits in float32 of the smallest normal float8_e4m3fn, 2^-6
EXPONENT_BIAS = 127  # bias of scales that are stored as exponents of two (OCP Microscaling, E8M0)


@dataclass(frozen=True, eq=False)
class ScaledWeight(PackedWeight):
    """value = code · scale of its block of `block` (rows, columns); codes have the weight's shape."""

    codes: str
    scales: str
    block: tuple[int, int]

    @property
    def cells(self) -> tuple[int, int]:
        """Rows and columns of the scales of one matrix."""
        return -(-self.shape[-2] // self.block[0]), -(-self.shape[-1] // self.block[1])

    def values(self, start: int, stop: int) -> Array:
        """See `PackedWeight`; a tensor of experts is a stack of matrices."""
        codes = self.parts[self.codes].rows(start, stop)
        wide = _table(self.parts[self.codes].dtype)[codes.view(np.uint8)].reshape(-1, self.shape[-1])
        height = prod(self.shape[1:-1])
        wide *= self._spread(self.grid, start * height, stop * height)
        return wide.reshape(codes.shape)

    @property
    def integers(self) -> IntegerCodes | None:
        """See `PackedWeight`; None for float8."""
        codes = self.parts[self.codes]
        if codes.dtype.name != "int8" or len(self.shape) != 2:
            return None

        def scales(start: int, stop: int) -> Array:
            return bounded(self.grid[np.arange(start, stop) // self.block[0]], 128, self.name)

        groups = np.arange(self.shape[1]) // self.block[1]
        return IntegerCodes(self.shape, 8, groups, unsigned(codes).rows, scales, None, FLOAT32)

    def requantized(self, weight: LazyTensor) -> Self:
        """See `PackedWeight`. A block keeps its scale where its largest value fits and uses half of the range."""
        scales, codes = self.parts[self.scales], self.parts[self.codes]
        lock = Lock()

        @cache
        def computed_grid() -> Array:
            return self._new_scales(weight)

        def grid() -> Array:
            with lock:  # one pass over the weight, for the thread that comes first
                return computed_grid()

        def new_codes(start: int, stop: int) -> Array:
            height = prod(self.shape[1:-1])
            rows = weight.rows(start, stop).astype(np.float32)
            flat = rows.reshape(-1, self.shape[-1])
            flat /= self._spread(grid(), start * height, stop * height)
            return _rounded(flat, codes.dtype).reshape(rows.shape)

        def new_scales(start: int, stop: int) -> Array:
            return _encoded(grid(), scales.dtype).reshape(scales.shape or (1,))[start:stop]

        parts = {
            self.codes: tiled(LazyTensor(codes.dtype, codes.shape, new_codes), prod(codes.shape[1:])),
            self.scales: LazyTensor(scales.dtype, scales.shape, new_scales),
        }
        return replace(self, parts={**self.parts, **parts})

    def _spread(self, grid: Array, start: int, stop: int) -> Array:
        """The scale of every element of rows `start:stop`, counted over all matrices."""
        rows = np.arange(start, stop)
        cells = rows // self.shape[-2] * self.cells[0] + rows % self.shape[-2] // self.block[0]
        return np.repeat(grid[cells], self.block[1], axis=1)[:, : self.shape[-1]]

    @cached_property
    def grid(self) -> Array:
        """Scales in float32: a row of `cells` below the other, of all matrices."""
        scales = self.parts[self.scales]
        return _decoded(scales.read(), scales.dtype, self.scales).reshape(-1, self.cells[1])

    def _new_scales(self, weight: LazyTensor) -> Array:
        dtype, old, codes = self.parts[self.scales].dtype, self.grid, self.parts[self.codes].dtype.name
        largest = LARGEST[codes]
        peaks = self._peaks(weight)
        reach = largest + 1 if codes == "int8" else largest  # -128 is a code, too
        fits = (peaks <= old * reach) & (peaks > old * largest / 2) | (peaks == 0)
        new = np.where(fits, old, peaks / np.float32(largest))
        return _decoded(_encoded(new, dtype), dtype, self.scales)

    def _peaks(self, weight: LazyTensor) -> Array:
        """The largest absolute value of every block."""
        peaks = np.zeros_like(self.grid)
        height, columns = prod(self.shape[1:-1]), self.shape[-1]
        edges = np.arange(0, columns, self.block[1])
        for start, stop in weight.blocks(TILE_ELEMENTS * weight.dtype.itemsize):
            rows = np.abs(weight.rows(start, stop).reshape(-1, columns)).astype(np.float32)
            by_row = np.maximum.reduceat(rows, edges, axis=1)
            index = np.arange(start * height, stop * height)
            cells = index // self.shape[-2] * self.cells[0] + index % self.shape[-2] // self.block[0]
            firsts = np.flatnonzero(np.diff(cells, prepend=-1))
            largest = np.maximum.reduceat(by_row, firsts, axis=0)
            peaks[cells[firsts]] = np.maximum(peaks[cells[firsts]], largest)
        return peaks


def _table(dtype: DType) -> Array:
    """float32 of every code."""
    return np.arange(256, dtype=np.uint8).view(dtype.numpy).astype(np.float32)


def _rounded(values: Array, dtype: DType) -> Array:
    """float32 values as codes, to nearest even, within the range."""
    limit = LARGEST[dtype.name]
    if dtype.name == "float8_e4m3fn":
        return float8(np.clip(values, -limit, limit)).view(dtype.numpy)
    limits = (-limit, limit)
    if dtype.name == "int8":
        values, limits = np.rint(values), (-limit - 1, limit)
    clipped: Array = np.clip(values, *limits)
    return clipped.astype(dtype.numpy)


def float8(values: Array) -> Array:
    """float32 values of magnitude up to 448 as the bits of float8_e4m3fn, to nearest even.

    By integers, because numpy releases the interpreter lock for them, while casts of `ml_dtypes` do not.
    """
    bits = values.view(np.uint32)
    size = bits & np.uint32(0x7FFFFFFF)
    small = np.rint(np.abs(values) * np.float32(512)).astype(np.uint32)  # subnormal: multiples of 2^-9
    normal = (size + (size >> 20 & 1) + np.uint32(0x7FFFF) >> 20) - np.uint32(120 << 3)  # the exponent's bias: 127 to 7
    codes: Array = np.where(size < NORMAL, small, normal) | (bits >> 24 & 0x80)
    return codes.astype(np.uint8)


def _decoded(scales: Array, dtype: DType, name: str) -> Array:
    if dtype.name == "uint8":
        with np.errstate(over="ignore"):
            scales = np.exp2(scales.astype(np.float32) - np.float32(EXPONENT_BIAS))
    return finite(scales, name)


def _encoded(scales: Array, dtype: DType) -> Array:
    """Scales in the stored dtype; exponents are rounded up, so that the largest value fits."""
    if dtype.name == "uint8":
        exponents = np.ceil(np.log2(np.maximum(scales, np.finfo(np.float32).tiny))) + EXPONENT_BIAS
        fitting: Array = np.clip(exponents, 0, 254)
        return fitting.astype(np.uint8)
    return scales.astype(dtype.numpy)


def open_scaled(
    tensors: Mapping[str, LazyTensor], name: str, scales: str, block: tuple[int, int] | None
) -> ScaledWeight:
    """The weight with the codes `name`, and one scale, one per row, or one per `block` (rows, columns) in `scales`.

    Raises MalformedInput for missing or mismatched parts.
    """
    codes, grid = tensors[name], part(tensors, scales, name)
    if codes.dtype.name not in LARGEST or len(codes.shape) not in (2, 3):
        refuse(name, f"has scales, but is stored as {codes.dtype.name} of shape {list(codes.shape)}")
    if grid.dtype.name not in SCALES:
        refuse(scales, f"is stored as {grid.dtype.name}, which is not supported for scales")
    shape = codes.shape
    found = _block_of(shape, grid.shape, block)
    if found is None or 0 in shape:
        of_block = f" in blocks of {list(block)}" if block else ""
        refuse(scales, f"has shape {list(grid.shape)}, which fits no weight of shape {list(shape)}{of_block}")
    inside = min(found[0], shape[-2]), min(found[1], shape[-1])
    return ScaledWeight(name, {name: codes, scales: grid}, shape, name, scales, inside)


def _block_of(shape: tuple[int, ...], grid: tuple[int, ...], block: tuple[int, int] | None) -> tuple[int, int] | None:
    """Rows and columns per scale, or None for mismatched shapes."""
    stack, (rows, columns) = shape[:-2], shape[-2:]
    if block and grid == (*stack, -(-rows // block[0]), -(-columns // block[1])):
        return block
    if prod(grid) == prod(stack) and len(grid) <= len(shape):
        return rows, columns
    if grid in ((*stack, rows), (*stack, rows, 1)):
        return 1, columns
    return None


def block_size(given: Any) -> tuple[int, int] | None:
    """`weight_block_size` or `block_structure` as (rows, columns), both positive; else raises MalformedInput."""
    if given is None:
        return None
    if not isinstance(given, list | tuple) or len(given) != 2 or not all(type(n) is int and n > 0 for n in given):
        raise MalformedInput(
            f"the model's `weight_block_size` is {str(given)[:80]}",
            hint="it is a pair of numbers such as [128, 128]; repair the `config.json`",
        )
    return given[0], given[1]
