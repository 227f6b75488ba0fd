"""Bitwise conversion between float32 and narrower floating-point types, to nearest even: faster than numpy's casts.

`ml_dtypes` casts bfloat16 inside the interpreter lock; numpy casts float16 at a third of this speed, and subnormal
numbers at a fortieth. A float16 moved into the bits of a float32 is that number times 2⁻¹¹², subnormal ones too. Back,
float32 rounds: added to a number whose last bit is that of the float16, a value is rounded to nearest even.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from llmconv.errors import UnsupportedInput
from llmconv.tensors import Array

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

TILE = 1 << 15
"""Elements at once, so that all passes over them stay in the core's cache."""

SHIFT, EXPONENT, SIGN = 13, np.uint32(0x7F800000), np.uint32(0x8000)
UP, DOWN = np.float32(2.0**112), np.float32(2.0**-112)
SMALLEST = np.uint32((127 - 14) << 23)
"""The exponent of the smallest normal float16, whose last bit is that of the subnormal ones."""

OVERFLOW, INFINITY = np.float32(65520), 0x7C00
"""The first float32 that is rounded to infinity; the bits of that."""


def round_into(target: Array, values: Array) -> None:
    """target = values, rounded as torch does: to float32, and from there to narrower types, to nearest even.

    `target` is float64, float32, float16 or bfloat16, C-contiguous; `values` are float32 or float64, of the same shape.
    Raises UnsupportedInput if a finite value is too large for `target`.
    """
    try:
        with np.errstate(over="raise"):
            narrow = values.astype(np.float32, copy=False) if target.dtype.itemsize < 4 else values
            if target.dtype == BFLOAT16:
                _round_to_bfloat16(target, narrow)
            elif target.dtype != np.float16 or not round_to_float16(target, narrow):
                target[...] = narrow
    except FloatingPointError as error:
        too_large = target.dtype.name == "float16"
        raise UnsupportedInput(
            f"a merged weight is too large for {target.dtype.name}",
            hint="give `--dtype bfloat16` or `--dtype float32`"
            if too_large
            else "give a smaller `--weight`, or check the adapter's alpha",
        ) from error


def _round_to_bfloat16(target: Array, values: Array) -> None:
    if np.isnan(values.max(initial=0)):
        target[...] = values
        return
    bits = values.view(np.uint32)
    work = bits >> 16
    work &= 1
    work += 0x7FFF
    work += bits
    work >>= 16
    target.view(np.uint16)[...] = work


def widen(values: Array) -> Array:
    """The same values, of any floating-point type, in float32; float32 and float64 as they are."""
    if values.dtype == BFLOAT16:  # the upper half of float32
        bits = values.view(np.uint16).astype(np.uint32)
        bits <<= 16
        wide: Array = bits.view(np.float32)
        return wide
    if values.dtype == np.float16 and values.flags.c_contiguous:
        return widen_float16(values)
    return values if values.dtype.itemsize >= 4 else values.astype(np.float32)


def widen_float16(values: Array) -> Array:
    """C-contiguous float16 `values` in float32."""
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


def round_to_float16(target: Array, values: Array) -> bool:
    """Rounds float32 `values` into `target`; False, with an undefined result, for large values, infinities and NaN."""
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
