"""W' = W + Σ sᵢ·Bᵢ·Aᵢ: the one place that adds low-rank products to a weight.

Shapes: W out×in, A r×in, B out×r (or the transpose of their product, for weights stored in×out). Products and sums are
computed in float64, by blocks of rows, and rounded once (nearest even) to the result's type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from types import ModuleType

import numpy as np

from llmconv.convert.algebra.rounding import BFLOAT16, round_into, widen
from llmconv.tensors import Array, DType, LazyTensor

compiled: ModuleType | None
try:
    from llmconv.convert.adapters import _low_rank_sum as compiled
except ImportError:  # llmconv was installed without a C compiler
    compiled = None

TILE_ELEMENTS = 1 << 18  # elements summed at once: two megabytes in float64, which fit into a core's cache
ROWS = 8
PRODUCT_LIMIT = 1 << 18
"""Largest rows·r·columns of one product. OpenBLAS divides larger ones among its own threads (`interface/gemm.c`), which
compete with the writer's threads: five times slower, measured."""


@dataclass(frozen=True)
class LoraProduct:
    """One adapter's update of a weight, `scale · b · a` (b out×r, a r×in), or its transpose for weights in×out."""

    a: LazyTensor
    b: LazyTensor
    scale: float
    transposed: bool = False

    def factors(self, start: int, stop: int) -> tuple[Array, Array]:
        """Two float64 matrices (rows×r, r×columns) whose product is rows `start:stop` of the update."""
        if self.transposed:
            left, right = self.a.read()[:, start:stop].T, self.b.read().T
        else:
            left, right = self.b.rows(start, stop), self.a.read()
        return left.astype(np.float64) * self.scale, right.astype(np.float64)

    def update(self, base: LazyTensor, start: int, stop: int) -> Array:
        return thin_product(*self.factors(start, stop))


def is_mirrored(one: object, other: object) -> bool:
    """Whether two updates are equal: of the same factors, or of transposed ones (an embedding and its tied head)."""
    if not isinstance(one, LoraProduct) or not isinstance(other, LoraProduct) or one.scale != other.scale:
        return False
    if one.transposed == other.transposed:
        pairs = [(one.a.read(), other.a.read()), (one.b.read(), other.b.read())]
    else:
        pairs = [(one.a.read(), other.b.read().T), (one.b.read(), other.a.read().T)]
    return all(np.array_equal(mine, others) for mine, others in pairs)


def add_products(base: LazyTensor, products: Sequence[LoraProduct], dtype: DType | None = None) -> LazyTensor:
    """The lazy tensor W + Σ s·B·A, every element summed in float64 and rounded once to `dtype` (default: of `base`).

    The rounding is that of torch and `ml_dtypes`: to float32, and from there to narrower types, to nearest even. The
    result does not depend on the number of threads or the division into rows. `base` is two-dimensional, or a bias,
    which counts as one column. Reading rows raises UnsupportedInput for a sum too large for `dtype`.
    """
    kind = dtype or base.dtype

    def load(start: int, stop: int) -> Array:
        return add_products_to_rows(base.rows(start, stop), [each.factors(start, stop) for each in products], kind)

    return LazyTensor(kind, base.shape, load, lambda other: add_products(base, products, other))


def add_products_to_rows(rows: Array, pairs: Sequence[tuple[Array, Array]], dtype: DType) -> Array:
    """rows + Σ left [rows, r] @ right [r, all other dims], float64, rounded once to `dtype`; see `add_products`."""
    left, right = np.hstack([pair[0] for pair in pairs]), np.vstack([pair[1] for pair in pairs])
    result = np.empty(rows.shape, dtype.numpy)
    columns = prod(rows.shape[1:])
    source, target = rows.reshape(-1, columns), result.reshape(-1, columns)
    if not add_in_one_pass(target, source, left, right):
        add_by_tiles(target, source, left, right)
    return result


def add_in_one_pass(target: Array, source: Array, left: Array, right: Array) -> bool:
    """target = source + left @ right by the compiled code, for finite sums in bfloat16; returns whether it was done."""
    if not compiled or not source.size or not (source.dtype == target.dtype == BFLOAT16):
        return False
    bits, left, right = (np.ascontiguousarray(each) for each in (source.view(np.uint16), left, right))
    return bool(compiled.add(target.view(np.uint16), bits, left, right, left.shape[1]))


def add_by_tiles(target: Array, source: Array, left: Array, right: Array) -> None:
    """target [rows, in] = source [rows, in] + left [rows, r] @ right [r, in], factors float64; any float types."""
    height = max(1, TILE_ELEMENTS // source.shape[1] // ROWS) * ROWS
    for first in range(0, len(source), height):
        tile = slice(first, min(first + height, len(source)))
        total = thin_product(left[tile], right)
        total += widen(source[tile])
        round_into(target[tile], total)


def thin_product(left: Array, right: Array) -> Array:
    """left (rows×r) @ right (r×columns) in float64, in parts up to `PRODUCT_LIMIT`, by the calling thread alone."""
    rank, columns = right.shape
    product = np.empty((len(left), columns))
    width = max(64, PRODUCT_LIMIT // (ROWS * rank))
    whole = len(left) // ROWS * ROWS
    for rows in (slice(0, whole), slice(whole, len(left))):
        parts = left[rows].reshape(-1, min(ROWS, max(1, rows.stop - rows.start)), rank)
        target = product[rows].reshape(*parts.shape[:2], columns)
        for first in range(0, columns, width) if parts.size else ():
            part = slice(first, first + width)
            np.matmul(parts, right[:, part], out=target[:, :, part])
    return product
