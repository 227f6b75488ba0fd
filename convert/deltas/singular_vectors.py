"""The largest singular values of a weight's change and their vectors, without computing all others.

Block Krylov iteration (Musco and Musco 2015, algorithm 2) with reorthogonalized blocks: products with D and Dᵀ in
float32, never Dᵀ·D itself, which would lose the small singular values; the small matrices in float64. It ends when one
more block of vectors adds less than `GAIN` to the captured norm: for a change of exactly low rank after two blocks; for
white noise, the slowest case, at 99.9 % of the optimum (Eckart and Young). One step of subspace iteration in float64
follows.

Products of a large matrix with a narrow one are computed in tiles: for larger ones OpenBLAS first copies the large
matrix into another order, which is half as fast for a few columns (measured).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from llmconv.convert.adapters.low_rank_sum import PRODUCT_LIMIT
from llmconv.convert.algebra.rounding import widen
from llmconv.errors import UnsupportedInput
from llmconv.tensors import Array, LazyTensor

SPARE, DEPTH, GAIN = 8, 16, 1e-3
"""Additional columns of a block; maximum number of blocks; share of the captured norm that another block must add."""

MEMORY = 512 << 20
"""Bytes of a change in float32 that is held; a larger one (a head of a large vocabulary) is computed per product."""

SAFE = 30
"""float32 safely represents the squares of norms between 2⁻³⁰ and 2³⁰."""

TINY = 1e-5
"""Relative to the longest column: the rounding error of float32 for a column that the others span."""


@dataclass(frozen=True)
class MatrixChange:
    """One linear weight before and after, of one shape (rows×columns)."""

    base: LazyTensor
    tuned: LazyTensor

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        rows, columns = self.tuned.shape
        return rows, columns

    def rows(self, start: int, stop: int) -> Array:
        """Rows of tuned − base in float64."""
        before, after = (widen(side.rows(start, stop)).astype(np.float64) for side in (self.base, self.tuned))
        return np.asarray(after - before)

    def narrow_rows(self, start: int, stop: int) -> Array:
        """Rows of tuned − base in float32, or in float64 where either is; the difference is rounded once."""
        before, after = (widen(side.rows(start, stop)) for side in (self.base, self.tuned))
        return np.asarray(after - before)


@dataclass(frozen=True)
class SingularVectors:
    """The vectors of the largest singular values of D, the largest first.

    Attributes:
        vectors: on the smaller side of D, orthonormal columns.
        images: D · `vectors`, or Dᵀ · `vectors` if D is wider than high; their norms are the singular values.
        total: the squared norm of D.
    """

    vectors: Array
    images: Array
    total: float


MatrixProduct = Callable[[Array], Array]


def not_finite(name: str) -> UnsupportedInput:
    """The error for a change that is not finite."""
    return UnsupportedInput(f"the change of `{name}` is not finite", hint="extract an exact delta, without `--rank`")


def largest_vectors(name: str, change: MatrixChange, rank: int) -> SingularVectors:
    """The `rank` largest singular values and vectors, in float64; UnsupportedInput if the change is not finite."""
    matrix = _Matrix(name, change)
    both: tuple[MatrixProduct, MatrixProduct] = matrix.times, matrix.transposed_times
    ahead, back = both if change.shape[0] >= change.shape[1] else both[::-1]
    start = np.random.default_rng(0).standard_normal((min(change.shape), rank + SPARE)).astype(np.float32)
    known, gram = _krylov(_orthonormal(start), ahead, back, rank)
    best = product(known, np.linalg.eigh(gram)[1][:, ::-1][:, :rank])
    # One more step in float64 restores the precision of float32 products for changes of low rank.
    basis = np.linalg.qr(ahead(best))[0]
    left, values, right = np.linalg.svd(back(basis), full_matrices=False)
    return SingularVectors(left, product(basis, right.T * values * matrix.scale), matrix.total)


def _krylov(block: Array, ahead: MatrixProduct, back: MatrixProduct, rank: int) -> tuple[Array, Array]:
    """An orthonormal basis of the span of `block`, (DᵀD)·`block`, …; the inner products of its images under D."""
    known, images, gram, before = np.empty((len(block), 0), np.float32), None, np.empty((0, 0)), 0.0
    for _ in range(DEPTH):
        known, image = np.hstack([known, block]), ahead(block)
        images = image if images is None else np.hstack([images, image])
        gram = _with_products(gram, images)
        held = float(np.sqrt(np.linalg.eigvalsh(gram)[::-1][:rank].clip(0).sum()))
        if held - before <= GAIN * held:
            break
        before = held
        block = _orthogonal(back(_orthonormal(image)), known)
        if not block.size:
            break
    return known, gram


def _with_products(gram: Array, images: Array) -> Array:
    """The inner products of all columns in float64; `gram` has those of the first ones."""
    there = len(gram)
    more = transposed_product(images, images[:, there:].astype(np.float64))
    return np.hstack([np.vstack([gram, more[:there].T]), more])


def _orthogonal(block: Array, known: Array) -> Array:
    """An orthonormal basis of `block` outside the span of `known`, without columns that are rounding errors."""
    least = TINY * np.linalg.norm(block, axis=0).max(initial=0)
    rest = block - product(known, transposed_product(known, block))
    basis = _orthonormal(rest, least)
    return _orthonormal(basis - product(known, transposed_product(known, basis)), 0.5)


def _orthonormal(block: Array, least: float = 0.0) -> Array:
    """An orthonormal basis of the columns, without directions in which their norm is at most `least`.

    From the eigenvectors of the small blockᵀ·block (SVQB, Stathopoulos and Wu 2002), twice because of rounding: two
    products with a narrow matrix, while LAPACK's QR goes column by column.
    """
    wide = block.astype(np.float64)
    for _ in range(2):
        values, vectors = np.linalg.eigh(transposed_product(wide, wide))
        long = values > max(least * least, 1e-12 * values.max(initial=0))
        wide = product(wide, vectors[:, long] / np.sqrt(values[long]))
        least = 0.0
    return wide.astype(np.float32)


class _Matrix:
    """A change in float32 by blocks of rows, divided by `scale`, a power of two (1 unless its norm is extreme).

    `total` is the squared norm of the change.
    """

    def __init__(self, name: str, change: MatrixChange) -> None:
        rows, columns = change.shape
        self._change, self.scale, self.total = change, 1.0, 0.0
        self._kept: list[Array] | None = [] if 4 * rows * columns <= MEMORY else None
        for part in self._computed():
            self.total += float(np.square(part, dtype=np.float64).sum())
            if self._kept is not None:
                self._kept.append(part)
        if not np.isfinite(self.total):
            raise not_finite(name)
        exponent = int(np.frexp(np.sqrt(self.total))[1])
        if abs(exponent) > SAFE:
            self.scale = 2.0**exponent
            self._kept = [self._scaled(part) for part in self._kept] if self._kept is not None else None

    def _computed(self) -> Iterator[Array]:
        for start, stop in self._change.tuned.blocks():
            with np.errstate(all="ignore"):  # values too large for float32 are refused as not finite
                yield self._change.narrow_rows(start, stop).astype(np.float32, copy=False)

    def _scaled(self, part: Array) -> Array:
        return part if self.scale == 1 else (part / self.scale).astype(np.float32, copy=False)

    def _parts(self) -> Iterable[Array]:
        return self._kept if self._kept is not None else map(self._scaled, self._computed())

    def times(self, right: Array) -> Array:
        """D · `right` / scale, in the dtype of `right`."""
        return np.concatenate([product(part, right) for part in self._parts()])

    def transposed_times(self, left: Array) -> Array:
        """Dᵀ · `left` / scale, in the dtype of `left`."""
        total = np.zeros((self._change.shape[1], left.shape[1]), left.dtype)
        start = 0
        for part in self._parts():
            total += transposed_product(part, left[start : start + len(part)])
            start += len(part)
        return total


NARROW = 32
"""Columns of the narrow matrix per product."""

HIGH = (8, PRODUCT_LIMIT // (8 * NARROW))
TURNED = (128, PRODUCT_LIMIT // (128 * NARROW))
"""Rows and columns of a tile of the large matrix."""


def product(left: Array, right: Array) -> Array:
    """`left` @ `right` (narrow), in the wider of their dtypes."""
    height, width = HIGH
    result = np.zeros((len(left), right.shape[1]), np.result_type(left, right))
    whole = len(left) // height * height
    for first in range(0, right.shape[1], NARROW):
        for start in range(0, len(right), width):
            inner, columns = slice(start, start + width), slice(first, first + NARROW)
            part = right[inner, columns]
            stack = left[:whole, inner].reshape(-1, height, len(part))
            result[:whole, columns] += (stack @ part).reshape(whole, part.shape[1])
            result[whole:, columns] += left[whole:, inner] @ part
    return result


def transposed_product(left: Array, right: Array) -> Array:
    """`left`ᵀ @ `right`, in the wider of their dtypes; see `product`."""
    height, width = TURNED
    result = np.zeros((left.shape[1], right.shape[1]), np.result_type(left, right))
    whole = left.shape[1] // width * width
    for first in range(0, right.shape[1], NARROW):
        for start in range(0, len(left), height):
            inner, columns = slice(start, start + height), slice(first, first + NARROW)
            part = right[inner, columns]
            stack = left[inner, :whole].reshape(len(part), -1, width).transpose(1, 2, 0)
            result[:whole, columns] += (stack @ part).reshape(whole, part.shape[1])
            result[whole:, columns] += left[inner, whole:].T @ part
    return result
