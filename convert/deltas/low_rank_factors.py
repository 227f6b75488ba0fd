"""The best approximation of tuned − base by a product of two narrow matrices, and the share of the norm it captures.

By Eckart and Young it consists of the largest singular triples. With Q, the singular vectors of D = tuned − base on its
smaller side, it is Q·Qᵀ·D (or D·Q·Qᵀ): D itself if Q is square. Up to a million elements Q is exact; for larger weights
it is iterated (`singular_vectors`), and of white noise the product captures 99.9 % of the optimum.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from threading import Lock

import numpy as np

from llmconv.convert.algebra.blas_threads import single_threaded
from llmconv.convert.deltas.singular_vectors import MatrixChange, largest_vectors, not_finite
from llmconv.tensors import Array

KEPT = 8
"""Number of products in memory: as many as the writer may need out of order."""

CHUNK = 4096

DENSE, THIN, SPARSE = 1 << 20, 512, 8
"""All singular vectors are computed exactly up to this number of elements, up to this length of the smaller side, and
for ranks above this fraction (1/`SPARSE`) of it."""


@dataclass(frozen=True)
class CapturedNorm:
    """Squared Frobenius norms: of the product (`held`), and of the change that it approximates."""

    held: float
    change: float

    @property
    def captured(self) -> float:
        """‖product‖ / ‖change‖, 0 to 1."""
        return sqrt(min(1.0, self.held / self.change)) if self.change else 1.0


class FactoredChanges:
    """The products of many changes, each computed when one of its factors is first needed, one at a time.

    Args:
        changes: by name of the weight.
        ranks: the width of each product.
    """

    def __init__(self, changes: Mapping[str, MatrixChange], ranks: Mapping[str, int]) -> None:
        self._changes, self._ranks = changes, ranks
        self._shares: dict[str, CapturedNorm] = {}
        self._recent: OrderedDict[str, tuple[Array, Array]] = OrderedDict()
        self._lock = Lock()

    def of(self, name: str) -> tuple[Array, Array]:
        """left (rows×rank) and right (rank×columns) in float32, each multiplied by the roots of the singular values.

        Raises:
            UnsupportedInput: the change is not finite.
        """
        with self._lock:
            if name not in self._recent:
                with single_threaded():
                    left, right, self._shares[name] = factored(name, self._changes[name], self._ranks[name])
                self._recent[name] = left, right
                if len(self._recent) > KEPT:
                    self._recent.popitem(last=False)
            return self._recent[name]

    def share(self, name: str) -> CapturedNorm:
        """The norms of a change and of its product."""
        if name not in self._shares:
            self.of(name)
        return self._shares[name]


def factored(name: str, change: MatrixChange, rank: int) -> tuple[Array, Array, CapturedNorm]:
    """left, right and the norms of their product and the change; see `FactoredChanges.of`.

    Args:
        name: of the weight, for messages.
        change: of the weight.
        rank: columns of left.
    """
    rows, columns = change.shape
    if rows * columns > DENSE and min(rows, columns) > THIN and SPARSE * rank <= min(rows, columns):
        found = largest_vectors(name, change, rank)
        pair = (found.images, found.vectors.T) if rows >= columns else (found.vectors, found.images.T)
        left, right, total = *pair, found.total
    else:
        left, right, total = _dense(name, change, rank)
    # One side is orthonormal, the other as long as the singular values; √σ for each.
    values = np.linalg.norm(left, axis=0) * np.linalg.norm(right, axis=1)
    share = CapturedNorm(float(np.square(values).sum()), total)
    root = np.sqrt(np.where(values > 0, values, 1))
    upper, lower = (root, 1 / root) if rows < columns else (1 / root, root)
    return (left * upper).astype(np.float32), (right * lower[:, None]).astype(np.float32), share


def _dense(name: str, change: MatrixChange, rank: int) -> tuple[Array, Array, float]:
    """The two factors of D·Q·Qᵀ, or of Q·Qᵀ·D if D is wider than high, in float64, and the squared norm of D.

    Q is from all eigenvectors of the smaller of D·Dᵀ and Dᵀ·D.
    Memory follows the matrix: its smaller side squared, and the whole matrix if it is wider than high.
    """
    rows, columns = change.shape
    blocks = list(change.tuned.blocks())
    if rows >= columns:
        gram = sum((_squared(change.rows(*block).T) for block in blocks), np.zeros((columns, columns)))
        basis = _top(name, gram, rank)
        left = np.concatenate([change.rows(*block) @ basis for block in blocks])
        right = basis.T
    else:
        whole = np.concatenate([change.rows(*block).astype(np.float32) for block in blocks])
        parts = [slice(first, first + CHUNK) for first in range(0, columns, CHUNK)]
        gram = sum((_squared(whole[:, part].astype(np.float64)) for part in parts), np.zeros((rows, rows)))
        basis = _top(name, gram, rank)
        left, right = basis, np.hstack([basis.T @ whole[:, part] for part in parts])
    return left, right, float(np.trace(gram))


def _squared(part: Array) -> Array:
    return part @ part.T


def _top(name: str, gram: Array, rank: int) -> Array:
    """The eigenvectors of the `rank` largest eigenvalues, as columns, the largest first."""
    if not np.isfinite(gram).all():
        raise not_finite(name)
    return np.asarray(np.linalg.eigh(gram)[1][:, ::-1][:, :rank])
