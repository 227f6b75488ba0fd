"""Rounding float64 once: to bfloat16 it goes by way of float32, which must not round to nearest on the way."""

from __future__ import annotations

import numpy as np

from llmconv.tensors import Array


def to_odd(values: Array) -> Array:
    """`values` in float32, rounded to odd: what lies between two numbers becomes the one whose last bit is 1.

    Rounding that once more, to a type with two bits less at least, gives the value nearest to the original
    (S. Boldo and G. Melquiond, "Emulation of FMA and correctly rounded sums", IEEE Transactions on Computers 57, 2008).

    Args:
        values: float64, any shape.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        result = values.astype(np.float32)
    back = result.astype(np.float64)
    bits = result.view(np.uint32)
    bits -= np.abs(back) > np.abs(values)
    bits |= (back != values) & ~np.isnan(values)
    return result
