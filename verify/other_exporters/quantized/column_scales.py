"""ColumnScales: whether the scales of int8 columns (`--quant a8w8`) are their largest magnitude / 127."""

from __future__ import annotations

import numpy as np

from llmconv.tensors import Array
from llmconv.verify.other_exporters.quantized.quantized_matrix import QuantizedMatrix
from llmconv.verify.other_exporters.quantized.tensor_matching import TensorMatch
from llmconv.verify.other_exporters.quantized.weight_blocks import EXACT

STEPS = 127
SMALLEST = float(np.finfo(np.float32).tiny)
"""A column with a smaller scale is stored as zeros, with the scale 1."""


class ColumnScales:
    """The scales of a matrix with one for each column.

    Args:
        scales: float32 of all columns.
    """

    def __init__(self, scales: Array) -> None:
        self._scales, self._extremes = scales.astype(np.float64), np.zeros(len(scales))

    @classmethod
    def of(cls, stored: QuantizedMatrix, match: TensorMatch) -> ColumnScales | None:
        """The scales of columns that a tensor fills; None if the matrix has other scales.

        Args:
            stored: the matrix.
            match: the tensor.
        """
        rows = stored.shape[0]
        if stored.repeat != (rows, 1) or len(match.rows) != rows or stored.scale.size != stored.shape[1]:
            return None
        return cls(stored.scale.reshape(-1)[match.columns.start : match.columns.stop])

    def add(self, original: Array) -> None:
        """Receives rows of the model's weights, of these columns."""
        self._extremes = np.maximum(self._extremes, np.abs(original).max(axis=0, initial=0))

    def problem(self) -> str:
        """Describes the first scale that is another one; empty if there is none."""
        wanted = self._extremes / STEPS
        wanted = np.where(wanted > SMALLEST, wanted, 1.0)
        odd = np.flatnonzero(~(np.abs(self._scales - wanted) <= EXACT * wanted))
        if not len(odd):
            return ""
        more = f" and {len(odd) - 1:,} more" if len(odd) > 1 else ""
        found, first = self._scales[odd[0]], wanted[odd[0]]
        return f"the scale of column {odd[0]}{more} is {found:.3g}; that of its weights is {first:.3g}"
