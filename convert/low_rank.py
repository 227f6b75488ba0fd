"""W + Σ s·B·A by rows: float32 arithmetic, one rounding, never a whole product in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from llmconv.tensors import Array, DType, LazyTensor

if TYPE_CHECKING:
    import torch

TILE_ELEMENTS = 1 << 18
"""Elements per tile: small enough that the float32 tile stays in the cache between its three passes."""


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


def add_low_rank(base: LazyTensor, changes: Sequence[LowRank], dtype: DType) -> LazyTensor:
    """`base` plus the sum of `changes`, rounded once (nearest even) to `dtype`.

    Args:
        base: the weight; one of more than two dimensions is not accepted, one of one dimension counts as one column.
        changes: whose products have the base's shape.
        dtype: element type of the result.
    """

    def load(start: int, stop: int) -> Array:
        rows = base.rows(start, stop)
        pairs = [change.factors(start, stop) for change in changes]
        left = np.hstack([pair[0] for pair in pairs])
        right = np.vstack([pair[1] for pair in pairs])
        return _sum_rows(rows, left, right, dtype)

    return LazyTensor(dtype, base.shape, load)


def _sum_rows(rows: Array, left: Array, right: Array, dtype: DType) -> Array:
    """rows + left @ right; float64 arithmetic only where the weight itself is float64."""
    import torch  # noqa: PLC0415 - planning, refusing and `--dry-run` do without it

    result = np.empty(rows.shape, dtype.numpy)
    columns = prod(rows.shape[1:])
    source, target = _as_torch(rows).view(-1, columns), _as_torch(result).view(-1, columns)
    work = torch.float64 if torch.float64 in (source.dtype, target.dtype) else torch.float32
    factors = [torch.from_numpy(np.ascontiguousarray(matrix)).to(work) for matrix in (left, right)]
    step = max(1, TILE_ELEMENTS // columns)
    for first in range(0, len(rows), step):
        tile = slice(first, first + step)
        target[tile] = source[tile].to(work).addmm_(factors[0][tile], factors[1])
    return result


def _as_torch(array: Array) -> torch.Tensor:
    """The same memory as a torch tensor; types that numpy lacks go through an integer view."""
    import torch  # noqa: PLC0415

    if array.dtype.kind != "V":
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(f"u{array.itemsize}")).view(getattr(torch, array.dtype.name))


@contextmanager
def one_thread_per_block() -> Iterator[Any]:
    """Keeps torch from dividing a tile among threads, because the writer already computes several blocks at once."""
    import torch  # noqa: PLC0415

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
