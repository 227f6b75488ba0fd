"""Blocks: rows of the model's weights in the blocks of a quantized matrix, with their scales and zero points."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import ml_dtypes
import numpy as np

from llmconv.tensors import Array
from llmconv.verify.other_exporters.quantized.quantized_matrix import TINY, QuantizedMatrix

EXACT = 1e-5
"""Maximum relative difference of quotients and sums in float32."""


@dataclass(frozen=True)
class Blocks:
    """Some rows of a matrix in blocks.

    Attributes:
        weights: float32 [rows, blocks, size], padded with zeros.
        scales: float64 [rows, blocks], as stored.
        zeros: float64 [rows, blocks].
        values: what the codes stand for, float64 [rows, blocks, size].
        largest: the largest code.
        dtype: of the stored scales.
        symmetric: no zero points are stored.
    """

    weights: Array
    scales: Array
    zeros: Array
    values: Array
    largest: int
    dtype: np.dtype
    symmetric: bool

    @classmethod
    def of(cls, stored: QuantizedMatrix, original: Array, columns: slice, start: int) -> Blocks | None:
        """The blocks of rows from `start` on; None if columns cut a block, or are no blocks.

        Args:
            stored: the matrix.
            original: float32 [rows, columns], of the model.
            columns: of the matrix, of which these are the original ones.
            start: number of the first row.
        """
        size, stop = stored.repeat[1], start + len(original)
        cut = columns.start % size or (columns.stop % size and columns.stop != stored.shape[1])
        if stored.repeat[0] != 1 or stored.largest is None or stored.columns is not None or cut:
            return None
        part = slice(columns.start // size, -(-columns.stop // size))
        scales, zeros = (grid[start:stop, part].astype(np.float64) for grid in (stored.scale, stored.zero))
        values = stored.rows(start, stop)[:, columns].astype(np.float64)
        weights, padded = (_in_blocks(one, size) for one in (original, values))
        return cls(weights, scales, zeros, padded, stored.largest, stored.scale.dtype, stored.symmetric)

    @property
    def middle(self) -> int:
        """The zero point of symmetric blocks."""
        return (self.largest + 1) // 2

    @cached_property
    def low(self) -> Array:
        """The least value, or 0."""
        low: Array = np.minimum(self.weights.min(axis=2), np.float32(0))
        return low

    @cached_property
    def high(self) -> Array:
        """The largest value, or 0."""
        high: Array = np.maximum(self.weights.max(axis=2), np.float32(0))
        return high

    @property
    def extent(self) -> Array:
        """Largest minus least value, float64, at least `TINY`."""
        return np.maximum(self.high.astype(np.float64) - self.low, TINY)

    @cached_property
    def extreme(self) -> Array:
        """The value of largest magnitude."""
        extreme: Array = np.where(self.high > -self.low, self.high, self.low).astype(np.float64)
        return extreme

    @property
    def is_middle(self) -> Array:
        """Where the zero point is that of symmetric blocks."""
        found: Array = self.zeros == self.middle
        return found

    def near(self, wanted: Array) -> Array:
        """Where scales are `wanted` up to their rounding."""
        found: Array = np.abs(self.scales - wanted) <= self.relative * np.abs(wanted) + self.smallest
        return found

    @property
    def relative(self) -> float:
        """Relative rounding of scales."""
        return float(ml_dtypes.finfo(self.dtype).eps) / 2 + EXACT

    @property
    def smallest(self) -> float:
        """Rounding of the least scales."""
        return float(ml_dtypes.finfo(self.dtype).smallest_subnormal) / 2


def _in_blocks(rows: Array, size: int) -> Array:
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % size)))
    return padded.reshape(len(rows), -1, size)
