"""The singular vectors of one weight's change that belong to its largest singular values, without all the others.

Block Krylov iteration (Musco and Musco 2015, algorithm 2) with reorthogonalized blocks, begun again from the best
vectors of the last time. Products with D and Dᵀ, never Dᵀ·D itself, which would lose the small singular values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from llmconv.errors import UnsupportedInput
from llmconv.tensors import Array, LazyTensor

SPARE, DEPTH, RESTARTS, GAIN = 8, 12, 20, 3e-6
"""Columns more than are wanted; blocks of a basis; how often it is built at most; the share of the squared norm that
another time would add when it is not built again. White noise, the slowest case, takes two or three."""

MEMORY = 512 << 20
"""Bytes of a change in float32 that are kept; a larger one (a large vocabulary's head) is made for each product."""

TINY = 1e-5
"""Of the longest column: what rounding to float32 leaves of one that the others span."""


@dataclass(frozen=True)
class Change:
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
        before, after = (side.rows(start, stop).astype(np.float64) for side in (self.base, self.tuned))
        return np.asarray(after - before)


Product = Callable[[Array], Array]


def not_finite(name: str) -> UnsupportedInput:
    """The refusal of a change that has no singular values."""
    return UnsupportedInput(f"the change of `{name}` is not finite", hint="extract an exact delta, without `--rank`")


def largest_vectors(name: str, change: Change, rank: int) -> Array:
    """Singular vectors on the smaller side as orthonormal columns, in float64, the largest value first.

    Raises:
        UnsupportedInput: the change is not finite.
    """
    matrix = _Matrix(name, change)
    both: tuple[Product, Product] = matrix.times, matrix.turned_times
    ahead, back = both if change.shape[0] >= change.shape[1] else both[::-1]
    block = np.random.default_rng(0).standard_normal((min(change.shape), rank + SPARE)).astype(np.float32)
    before = gain = 0.0
    for _ in range(RESTARTS):
        block, held = _improved(block, ahead, back, rank)
        last, gain = gain, held - before
        if gain * gain <= GAIN * held * last or gain <= GAIN * held:
            break
        before = held
    return np.asarray(np.linalg.qr(block[:, :rank].astype(np.float64))[0])


def _improved(block: Array, ahead: Product, back: Product, rank: int) -> tuple[Array, float]:
    """The best vectors in the span of `block`, (DᵀD)·`block`, (DᵀD)²·`block`, …; and what `rank` of them hold."""
    parts, images = [_orthonormal(block)], list[Array]()
    while parts[-1].size:
        images.append(ahead(parts[-1]))
        if len(images) == DEPTH:
            break
        parts.append(_orthogonal(back(_orthonormal(images[-1])), np.hstack(parts)))
    image = np.hstack(images).astype(np.float64)
    values, vectors = np.linalg.eigh(image.T @ image)
    best = np.hstack(parts) @ vectors[:, ::-1][:, : block.shape[1]].astype(np.float32)
    return best, float(values[::-1][:rank].sum())


def _orthogonal(block: Array, known: Array) -> Array:
    """An orthonormal basis of what `block` has beyond the span of `known`; no columns where that is rounding alone."""
    least = TINY * np.linalg.norm(block, axis=0).max(initial=0)
    rest = block - known @ (known.T @ block)
    basis = _orthonormal(rest, least)
    return _orthonormal(basis - known @ (known.T @ basis), 0.5)


def _orthonormal(block: Array, least: float = 0.0) -> Array:
    """An orthonormal basis of the columns, without directions in which they are no longer than `least`.

    From the eigenvectors of the small blockᵀ·block (SVQB, Stathopoulos and Wu 2002), twice, as rounding spoils the
    first: two products with a narrow matrix, where LAPACK's QR goes column by column.
    """
    for _ in range(2):
        values, vectors = np.linalg.eigh((block.T @ block).astype(np.float64))
        long = values > max(least * least, 1e-12 * values.max(initial=0))
        block = block @ (vectors[:, long] / np.sqrt(values[long])).astype(np.float32)
        least = 0.0
    return block


class _Matrix:
    """A change in float32, by blocks of rows."""

    def __init__(self, name: str, change: Change) -> None:
        rows, columns = change.shape
        self._name, self._change = name, change
        self._kept = list(self._computed()) if 4 * rows * columns <= MEMORY else None

    def _computed(self) -> Iterator[Array]:
        for start, stop in self._change.tuned.blocks():
            part = self._change.rows(start, stop).astype(np.float32)
            if not np.isfinite(part).all():
                raise not_finite(self._name)
            yield part

    def _parts(self) -> Iterator[Array]:
        return iter(self._kept) if self._kept is not None else self._computed()

    def times(self, right: Array) -> Array:
        """D · `right`."""
        return np.concatenate([part @ right for part in self._parts()])

    def turned_times(self, left: Array) -> Array:
        """Dᵀ · `left`."""
        total = np.zeros((self._change.shape[1], left.shape[1]), np.float32)
        start = 0
        for part in self._parts():
            total += part.T @ left[start : start + len(part)]
            start += len(part)
        return total
