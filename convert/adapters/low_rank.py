"""W + Σ s·B·A by rows: equal to the float64 sum in every element, mostly by float32 arithmetic, never held whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import ml_dtypes
import numpy as np

from llmconv.errors import UnsupportedInput
from llmconv.tensors import Array, DType, LazyTensor

TILE_ELEMENTS = 1 << 18
"""Elements whose sum is made at once: a megabyte in float32, so its passes stay in the cache."""

ROWS = 8
PRODUCT_LIMIT = 1 << 18
"""A product rows·r·columns up to this size is made by the calling thread alone. Larger ones OpenBLAS divides among
threads of its own (`interface/gemm.c`), which then fight with the writer's threads: five times slower, measured."""

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

WINDOW = 256
"""How many float32 steps from the middle between two bfloat16 a sum is looked at closer: one in 128 numbers is."""

MANY = 32
"""Where more than one number in so many is doubtful, the whole tile is summed in float64."""

MOST = 2.0**100
"""Errors count up to here, so that they stay float32."""


@dataclass(frozen=True)
class LowRank:
    """One adapter's change of one weight: `scale · b · a`, or its transpose.

    Attributes:
        a: r×in.
        b: out×r.
        scale: the factor, the adapter's weight included.
        transposed: the weight is stored in×out (Conv1D) or vocab×dim (an embedding).
    """

    a: LazyTensor
    b: LazyTensor
    scale: float
    transposed: bool = False

    def factors(self, start: int, stop: int) -> tuple[Array, Array]:
        """Two float64 matrices (rows×r, r×columns) whose product is rows `start:stop` of the change."""
        if self.transposed:
            left, right = self.a.read()[:, start:stop].T, self.b.read().T
        else:
            left, right = self.b.rows(start, stop), self.a.read()
        return left.astype(np.float64) * self.scale, right.astype(np.float64)

    def update(self, base: LazyTensor, start: int, stop: int) -> Array:
        """Rows `start:stop` of the change, float64, of two dimensions; see `updates.Update`."""
        left, right = self.factors(start, stop)
        product = np.empty((len(left), right.shape[1]))
        _multiply(left, right, product)
        return product


def add_low_rank(base: LazyTensor, changes: Sequence[LowRank], dtype: DType) -> LazyTensor:
    """`base` plus the sum of `changes`, rounded once (nearest even) to `dtype`.

    Every element is the float64 sum, rounded as torch and `ml_dtypes` do it: to float32 and from there to narrower
    types. The result does not depend on how many threads compute how many rows.

    Args:
        base: the weight, of two dimensions, or a bias.
        changes: whose products have the base's shape; a bias counts as one column.
        dtype: element type of the result.

    Raises (when rows are read):
        UnsupportedInput: a sum is too large for float16.
    """

    def load(start: int, stop: int) -> Array:
        return sum_rows(base.rows(start, stop), [change.factors(start, stop) for change in changes], dtype)

    return LazyTensor(dtype, base.shape, load, lambda other: add_low_rank(base, changes, other))


def sum_rows(rows: Array, pairs: Sequence[tuple[Array, Array]], dtype: DType) -> Array:
    """rows + Σ left @ right, rounded once to `dtype`, tile by tile; see `add_low_rank` for the arithmetic.

    Args:
        rows: of the base; what is behind the first dimension counts as columns.
        pairs: left (rows×r) and right (r×columns) of each change.
        dtype: element type of the result, whose shape is that of `rows`.
    """
    exact = np.hstack([pair[0] for pair in pairs]), np.vstack([pair[1] for pair in pairs])
    is_fast = dtype.numpy == BFLOAT16
    left, right = (factor.astype(np.float32) if is_fast else factor for factor in exact)
    errors = _errors(*exact) if is_fast else np.empty(0)
    by_column = np.ascontiguousarray(exact[1].T)
    result = np.empty(rows.shape, dtype.numpy)
    columns = prod(rows.shape[1:])
    source, target = rows.reshape(-1, columns), result.reshape(-1, columns)
    height = max(1, TILE_ELEMENTS // columns // ROWS) * ROWS
    total, term = np.empty((2, height, columns), left.dtype)
    for first in range(0, len(source), height):
        tile = slice(first, min(first + height, len(source)))
        size = tile.stop - first
        _multiply(left[tile], right, total[:size])
        widen_into(term[:size], source[tile])
        total[:size] += term[:size]
        if is_fast:
            doubtful = _round(target[tile], total[:size], term[:size], errors[tile])
            _settle(target[tile], doubtful, source[tile], exact[0][tile], by_column)
        else:
            round_into(target[tile], total[:size], term[:size])
    return result


def _errors(left: Array, right: Array) -> Array:
    """Of each row: how far the float32 sum may be from the exact one, float32.

    The error of a sum of r products is about √r·2⁻²⁴ of the product of the lengths (Higham and Mary, "A new approach to
    probabilistic rounding error analysis", 2019); three times that is allowed, ten standard deviations.
    """
    lengths = np.sqrt(np.square(left).sum(axis=1) * np.square(right).sum(axis=0).max(initial=0))
    errors: Array = np.minimum(3 * 2.0**-24 * (np.sqrt(left.shape[1]) + 1) * lengths, MOST).astype(np.float32)
    return errors


def _round(target: Array, total: Array, scratch: Array, errors: Array) -> Array:
    """target = total, rounded to the nearest bfloat16; says where the exact sum may have another one nearest.

    Args:
        target: bfloat16, the result.
        total: the float32 sum.
        scratch: memory of the same shape and type, overwritten.
        errors: from `_errors`, of these rows.

    Returns:
        Indices of the numbers that are in doubt, in memory order; numbers in the middle are among them.
    """
    if np.isnan(total.max(initial=0)):
        return np.arange(total.size)
    work, bits = scratch.view(np.uint32), total.view(np.uint32)
    np.add(bits, 0x8000, out=work)
    rounded = target.view(np.uint16)
    np.right_shift(work, 16, out=rounded, casting="unsafe")
    work <<= 16
    work += np.uint32(WINDOW << 16)
    doubtful = work <= np.uint32(2 * WINDOW << 16 | 0xFFFF)
    small = (errors * np.float32(2.0**23 / WINDOW)).view(np.uint32) >> 16  # below, an error may be more than the window
    doubtful |= (rounded & np.uint16(0x7FFF)) <= (small + 1).astype(np.uint16)[:, None]
    at = np.flatnonzero(doubtful)
    near = total.reshape(-1)[at]
    steps = (near.view(np.uint32) & 0xFFFF).astype(np.float32) - 0x8000
    certain = np.abs(steps * np.spacing(near)) > errors[at // total.shape[1]] + np.abs(np.spacing(near))
    result: Array = at[~certain]
    return result


def _settle(target: Array, at: Array, source: Array, left: Array, by_column: Array) -> None:
    """target[at] = source + left @ by_column.T, summed in float64; all of them where that is less work."""
    if at.size > target.size // MANY:
        sums = np.empty(target.shape)
        _multiply(left, by_column.T, sums)
        sums += source.astype(np.float64)
        target[...] = sums.astype(np.float32)
    elif at.size:
        rows, columns = np.divmod(at, target.shape[1])
        sums = np.einsum("kr,kr->k", left[rows], by_column[columns])
        sums += source[rows, columns].astype(np.float64)
        target[rows, columns] = sums.astype(np.float32)


def _multiply(left: Array, right: Array, product: Array) -> None:
    """product = left @ right, in parts no larger than `PRODUCT_LIMIT`."""
    rank, columns = right.shape
    width = max(64, PRODUCT_LIMIT // (ROWS * rank))
    whole = len(left) // ROWS * ROWS
    for rows in (slice(0, whole), slice(whole, len(left))):
        parts = left[rows].reshape(-1, min(ROWS, max(1, rows.stop - rows.start)), rank)
        target = product[rows].reshape(*parts.shape[:2], columns)
        for first in range(0, columns, width) if parts.size else ():
            part = slice(first, first + width)
            np.matmul(parts, right[:, part], out=target[:, :, part])


def widen_into(target: Array, values: Array) -> None:
    """target = values, exactly; bfloat16 is the upper half of float32, and integers move outside the interpreter lock.

    Args:
        target: float32 or float64.
        values: of any float type, of the same shape.
    """
    if values.dtype == BFLOAT16 and target.dtype == np.float32:
        bits = target.view(np.uint32)
        bits[...] = values.view(np.uint16)
        bits <<= 16
    else:
        target[...] = values


def round_into(target: Array, values: Array, scratch: Array) -> None:
    """target = values, rounded to nearest even.

    bfloat16 is float32 without its lower half, so it is rounded with integers: numpy then runs outside the interpreter
    lock, which it does not while `ml_dtypes` casts. That needs numbers; where there is a NaN, `ml_dtypes` does it.

    Args:
        target: the result.
        values: float32 or float64, of the same shape.
        scratch: memory of the same shape and type, overwritten.

    Raises:
        UnsupportedInput: a finite value is too large for float16.
    """
    if target.dtype == BFLOAT16 and values.dtype == np.float32 and not np.isnan(values.max(initial=0)):
        bits, work = values.view(np.uint32), scratch.view(np.uint32)
        np.right_shift(bits, 16, out=work)
        work &= 1
        work += 0x7FFF
        work += bits
        work >>= 16
        target.view(np.uint16)[...] = work
        return
    try:
        with np.errstate(over="raise"):
            target[...] = values.astype(np.float32) if target.dtype.itemsize < 4 else values
    except FloatingPointError as error:
        raise UnsupportedInput(
            f"a merged weight is too large for {target.dtype.name}", hint="give `--dtype bfloat16` or `--dtype float32`"
        ) from error
