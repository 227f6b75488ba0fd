"""Products of a large matrix with a narrow one, in tiles small enough for OpenBLAS kernels that do not copy.

For larger products it first copies the large matrix into another order: half as fast for a few columns, measured.
"""

from __future__ import annotations

import numpy as np

from llmconv.convert.adapters.low_rank_sum import PRODUCT_LIMIT
from llmconv.tensors import Array

NARROW = 32
"""Columns of the narrow matrix per product."""

HIGH = (8, PRODUCT_LIMIT // (8 * NARROW))
TURNED = (128, PRODUCT_LIMIT // (128 * NARROW))
"""Rows and columns of a tile of the large matrix."""


def product(left: Array, right: Array) -> Array:
    """`left` @ `right`, in the wider of their dtypes.

    Args:
        left: of any size.
        right: narrow.
    """
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
