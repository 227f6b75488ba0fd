"""Scales in the type that a file stores them in: none overflows, and a matrix of small weights does not vanish."""

from __future__ import annotations

import numpy as np

from llmconv.errors import InputRefused
from llmconv.tensors import Array, DType

MOST_LOST = 1 / 16
"""Root mean square of what rounding takes from the scales of a matrix, relative to theirs; float16 takes 1/5000."""

WIDER = {"float16": "give `--precision bfloat16` or float32", "bfloat16": "give `--precision float32`"}
"""Hints by the type that is too narrow."""


def stored_scales(scales: Array, dtype: DType, name: str, *, kept: bool = False) -> Array:
    """Float32 scales of the weight `name`, cast to `dtype`.

    Of a checkpoint's own scales (`kept`) an error does not suggest `--quant-exclude`.

    Raises:
        InputRefused: a scale is too large for the type.
    """
    with np.errstate(over="ignore"):
        stored: Array = scales.astype(dtype.numpy)
    if not np.isfinite(stored.astype(np.float32)).all():
        wider = bool(np.isfinite(scales).all())
        raise InputRefused(f"a scale of `{name}` is too large for {dtype.name}", hint=_hint(dtype, wider, kept))
    return stored


def squares_lost(wanted: Array, stored: Array) -> Array:
    """Float64 [rows, 2]: squares of what rounding takes from scales [rows, ...], and of the scales, summed by row.

    `wanted` is float32, `stored` the same scales in another type, finite.
    """
    wide = wanted.astype(np.float64).reshape(len(wanted), -1)
    lost = wide - stored.astype(np.float64).reshape(wide.shape)
    return np.stack([np.sum(lost**2, axis=1), np.sum(wide**2, axis=1)], axis=1)


def require_kept(squares: Array, dtype: DType, name: str, *, kept: bool = False) -> None:
    """Refuses a matrix whose scales the type does not hold; a few small blocks among larger ones may vanish.

    `squares` are those of `squares_lost`, of all rows.

    Raises:
        InputRefused: most scales are too small for the type.
    """
    lost, total = squares.sum(axis=0)
    if lost > MOST_LOST**2 * total:
        raise InputRefused(f"the scales of `{name}` are too small for {dtype.name}", hint=_hint(dtype, True, kept))


def _hint(dtype: DType, wider: bool, kept: bool) -> str:
    """What helps: a wider type, if one holds the scales, or floats, if the weights are not codes already."""
    wide = WIDER.get(dtype.name) if wider else None
    plain = None if kept else "leave the weight as it is: `--quant-exclude`"
    return ", or ".join(filter(None, (wide, plain))) or "take the model it was quantized from"
