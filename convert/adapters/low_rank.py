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

WINDOW = 128
"""How many float32 steps from the middle between two bfloat16 a sum is looked at closer, a power of two: one number in
256 is."""

MANY = 32
"""Where more than one number in so many is doubtful, the whole block is summed in float64."""

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


def is_mirrored(one: object, other: object) -> bool:
    """Whether two changes are the same: in the same factors, or in transposed ones (an embedding and its tied head)."""
    if not isinstance(one, LowRank) or not isinstance(other, LowRank) or one.scale != other.scale:
        return False
    if one.transposed == other.transposed:
        pairs = [(one.a.read(), other.a.read()), (one.b.read(), other.b.read())]
    else:
        pairs = [(one.a.read(), other.b.read().T), (one.b.read(), other.a.read().T)]
    return all(np.array_equal(mine, others) for mine, others in pairs)


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
    left, right = np.hstack([pair[0] for pair in pairs]), np.vstack([pair[1] for pair in pairs])
    result = np.empty(rows.shape, dtype.numpy)
    columns = prod(rows.shape[1:])
    source, target = rows.reshape(-1, columns), result.reshape(-1, columns)
    if dtype.numpy != BFLOAT16:
        _sum_exactly(target, source, left, right)
    else:
        _sum_fast(target, source, left, right)
    return result


def _height(columns: int) -> int:
    """Rows of a tile."""
    return max(1, TILE_ELEMENTS // columns // ROWS) * ROWS


def _sum_exactly(target: Array, source: Array, left: Array, right: Array) -> None:
    """target = source + left @ right in the element type of the factors, rounded."""
    height = _height(source.shape[1])
    total, term = np.empty((2, height, source.shape[1]), left.dtype)
    for first in range(0, len(source), height):
        tile = slice(first, min(first + height, len(source)))
        size = tile.stop - first
        _add_product(total[:size], term[:size], source[tile], left[tile], right)
        round_into(target[tile], total[:size], term[:size])


def _sum_fast(target: Array, source: Array, left: Array, right: Array) -> None:
    """target = source + left @ right: bfloat16 from float32 arithmetic, and from float64 where that is in doubt."""
    narrow_left, narrow_right = left.astype(np.float32), right.astype(np.float32)
    errors = _errors(left, right)
    small = ((errors * np.float32(2.0**23 / WINDOW)).view(np.uint32) >> 16).astype(np.uint16)[:, None] + np.uint16(1)
    height = _height(source.shape[1])
    buffers = np.empty((3, height, source.shape[1]), np.float32)
    indices, values = [], []
    for first in range(0, len(source), height):
        tile = slice(first, min(first + height, len(source)))
        total, term, spare = buffers[:, : tile.stop - first]
        _add_product(total, term, source[tile], narrow_left[tile], narrow_right)
        at = _round_roughly(target[tile], total, (term, spare), small[tile])
        values.append(total.take(at))
        at += first * source.shape[1]
        indices.append(at)
    _settle(target, source, (left, right), errors, (np.concatenate(indices), np.concatenate(values)))


def _settle(
    target: Array, source: Array, factors: tuple[Array, Array], errors: Array, found: tuple[Array, Array]
) -> None:
    """Rounds what `_round_roughly` found: nearest even, and from the float64 sum where an error may decide.

    Args:
        target: bfloat16, corrected.
        source: of the base.
        factors: left and right in float64.
        errors: from `_errors`.
        found: indices in memory order, and the float32 sums there.
    """
    at, values = found
    _put(target, at, values)
    with np.errstate(invalid="ignore"):  # infinity has no spacing; it is looked at only beside a NaN
        spacing = np.abs(np.spacing(values))
    steps = (values.view(np.uint32) & 0xFFFF).astype(np.float32) - 0x8000
    at = at[~(np.abs(steps) * spacing > errors[at // source.shape[1]] + spacing)]
    if at.size > source.size // MANY:
        _sum_exactly(target, source, *factors)
    elif at.size:
        rows, columns = np.divmod(at, source.shape[1])
        sums = np.einsum("kr,kr->k", factors[0][rows], np.ascontiguousarray(factors[1].T)[columns])
        sums += source.reshape(-1).take(at).astype(np.float64)
        _put(target, at, sums.astype(np.float32))


def _put(target: Array, at: Array, values: Array) -> None:
    """target[at] = values, rounded; as integers, which numpy copies outside the interpreter lock."""
    nearest = np.empty(values.shape, BFLOAT16)
    round_into(nearest, values, np.empty_like(values))
    target.reshape(-1).view(np.uint16)[at] = nearest.view(np.uint16)


def _add_product(total: Array, term: Array, source: Array, left: Array, right: Array) -> None:
    """total = source + left @ right; `term` is overwritten."""
    _multiply(left, right, total)
    widen_into(term, source)
    total += term


def _errors(left: Array, right: Array) -> Array:
    """Of each row: how far the float32 sum may be from the exact one, float32.

    The roundings of a sum of r products are a walk whose standard deviation is at most √r/3·2⁻²⁴ of the product of the
    lengths (Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019), and a quarter of that
    where the factors do not point the same way. Four times the most is allowed: an element is only rounded wrongly if
    besides, one in 10⁵, its sum lies that near the middle.
    """
    lengths = np.sqrt(np.square(left).sum(axis=1) * np.square(right).sum(axis=0).max(initial=0))
    errors: Array = np.minimum(1.25 * 2.0**-24 * (np.sqrt(left.shape[1]) + 1) * lengths, MOST).astype(np.float32)
    return errors


def _round_roughly(target: Array, total: Array, scratch: tuple[Array, Array], small: Array) -> Array:
    """target = total rounded to bfloat16, but for those near the middle between two; with integers, see `round_into`.

    Args:
        target: bfloat16, the result.
        total: the float32 sum.
        scratch: twice the memory of `total`, overwritten.
        small: bits of bfloat16, for each row, up to which the error of a sum may be more than `WINDOW` of its steps.

    Returns:
        Indices of the numbers that are near the middle, or small, in memory order; all where one is not a number.
    """
    if np.isnan(total.max(initial=0)):
        return np.arange(total.size)
    work, spare = (memory.view(np.uint32) for memory in scratch)
    np.add(total.view(np.uint32), np.uint32(0x8000 + WINDOW), out=work)
    np.right_shift(work, np.uint32(16), out=spare)
    rounded = target.view(np.uint16)
    rounded[...] = spare
    half, flags = np.split(spare.reshape(-1).view(np.uint8), 2)
    magnitude = half.view(np.uint16).reshape(total.shape)
    is_small, is_near = flags.view(np.bool_).reshape(2, *total.shape)
    np.bitwise_and(work, np.uint32(0x10000 - 2 * WINDOW), out=work)
    np.equal(work, 0, out=is_near)
    np.bitwise_and(rounded, np.uint16(0x7FFF), out=magnitude)
    np.less_equal(magnitude, small, out=is_small)
    np.logical_or(is_near, is_small, out=is_near)
    return np.flatnonzero(is_near)


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


def thin_product(left: Array, right: Array) -> Array:
    """left @ right in float64, by the calling thread alone; see `PRODUCT_LIMIT`."""
    product = np.empty((len(left), right.shape[1]))
    _multiply(left, right, product)
    return product


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
