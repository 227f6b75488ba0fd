"""ColumnFormat: matrices [K, N] of int8 codes, with one scale for every column, that is for every output."""

from __future__ import annotations

from dataclasses import dataclass

from llmconv.export.quantization.block_format import BlockFormat

LARGEST = 127
"""The largest code; the smallest is its negative."""


@dataclass(frozen=True)
class ColumnFormat:
    """The layout of `com.microsoft.DynamicQuantizeMatMul`: a weight is `code * scale`, all in float32.

    The other factor is rounded to uint8 at run time, with one scale for the whole tensor. `size` is the least number of
    rows K.
    """

    bits: int = 8
    size: int = 1


WeightFormat = BlockFormat | ColumnFormat
"""How a weight is stored."""
