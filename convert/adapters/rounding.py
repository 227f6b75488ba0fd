"""Rounding: arrays of one floating-point type into another, to nearest even, fast where numpy is slow."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from llmconv.errors import UnsupportedInput
from llmconv.tensors import Array

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def round_into(target: Array, values: Array) -> None:
    """target = values, rounded as torch does it: to float32, and from there to narrower types, to nearest even.

    bfloat16 is float32 without its lower half, so it is rounded with integers: numpy then runs outside the interpreter
    lock, which it does not while `ml_dtypes` casts. That needs numbers; where there is a NaN, `ml_dtypes` does it.

    Args:
        target: the result.
        values: float32 or float64, of the same shape.

    Raises:
        UnsupportedInput: a finite value is too large for `target`.
    """
    try:
        with np.errstate(over="raise"):
            narrow = values.astype(np.float32, copy=False) if target.dtype.itemsize < 4 else values
            if target.dtype == BFLOAT16:
                _round_to_bfloat16(target, narrow)
            else:
                target[...] = narrow
    except FloatingPointError as error:
        wider = "give `--dtype bfloat16` or `--dtype float32`"
        raise UnsupportedInput(
            f"a merged weight is too large for {target.dtype.name}",
            hint=wider
            if target.dtype.name == "float16"
            else "give a smaller `--weight`, or look at the adapter's alpha",
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
    """float32 or float64 of the very values: bfloat16 is the upper half of float32, moved outside the lock.

    Args:
        values: of any float type.
    """
    if values.dtype == BFLOAT16:
        bits = values.view(np.uint16).astype(np.uint32)
        bits <<= 16
        wide: Array = bits.view(np.float32)
        return wide
    return values if values.dtype.itemsize >= 4 else values.astype(np.float32)
