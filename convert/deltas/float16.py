"""float16 to float32 and back, to nearest even, by bits: numpy takes three times as long, and for small numbers forty.

A float16 moved into the bits of a float32 is that number times 2⁻¹¹², subnormal ones too. The way back lets float32
round: where a sum has its last bit at that of the float16, adding and subtracting rounds to nearest even.
"""

from __future__ import annotations

import numpy as np

from llmconv.tensors import Array

TILE = 1 << 15
"""Elements at once, so that all passes over them stay in the core's cache."""

SHIFT, EXPONENT, SIGN = 13, np.uint32(0x7F800000), np.uint32(0x8000)
UP, DOWN = np.float32(2.0**112), np.float32(2.0**-112)
SMALLEST = np.uint32((127 - 14) << 23)
"""The exponent of the smallest normal float16, whose last bit is that of the subnormal ones."""

OVERFLOW, INFINITY = np.float32(65520), 0x7C00
"""The first float32 that is rounded to infinity; the bits of that."""


def widened_halves(values: Array) -> Array:
    """float32 of the very values.

    Args:
        values: float16, C-contiguous.
    """
    result = np.empty(values.shape, np.float32)
    source, target = values.reshape(-1).view(np.int16), result.reshape(-1)
    for start in range(0, len(source), TILE):
        tile, bits = target[start : start + TILE], source[start : start + TILE]
        if not _has_subnormals() or (bits & INFINITY).max() == INFINITY:
            return values.astype(np.float32)
        moved = tile.view(np.int32)
        moved[...] = bits
        moved <<= SHIFT
        moved &= ~0x70000000  # the copies of the sign
        tile *= UP
    return result


def round_to_halves(target: Array, values: Array) -> bool:
    """target = values, rounded to nearest even; False where that takes more: too large ones, infinities, NaN.

    Args:
        target: float16, C-contiguous.
        values: float32, C-contiguous, of the same shape.
    """
    source, result = values.reshape(-1), target.reshape(-1).view(np.uint16)
    for start in range(0, len(source), TILE):
        tile = source[start : start + TILE]
        size = np.abs(tile)
        if not size.max() < OVERFLOW or not _has_subnormals():
            return False
        bits = tile.view(np.uint32)
        high = bits & EXPONENT
        np.maximum(high, SMALLEST, out=high)
        high += np.uint32(SHIFT << 23)
        size += high.view(np.float32)
        size -= high.view(np.float32)
        size *= DOWN
        pattern = size.view(np.uint32)
        pattern >>= SHIFT
        np.right_shift(bits, 16, out=high)
        high &= SIGN
        pattern |= high
        result[start : start + TILE] = pattern
    return True


def _has_subnormals() -> bool:
    """Whether this thread computes with them; a library may have switched that off for speed."""
    small = np.full(1, 2.0**-24, np.float32) * DOWN
    return bool((small * UP)[0] == 2.0**-24)
