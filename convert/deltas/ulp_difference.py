"""Lossless difference of two arrays of weights: for each element, the number of representable floats between them.

The bit pattern of a float counts the floats between zero and it, so bit patterns in the order of their values can be
subtracted as integers, modulo 2ⁿ. The difference of any two patterns is reversible, NaN, infinities and -0 included.
Weights that training hardly moved give small integers, whose upper bytes are zeros and compress well.
"""

from __future__ import annotations

import numpy as np

from llmconv.tensors import FLOATS, Array, DType, LazyTensor


def ulp_differences(tuned: Array, guess: Array) -> Array:
    """The difference of two arrays of one dtype and shape, as unsigned integers: 0, then -1, +1, -2, +2, … as 1, 2, 3.

    The sign is the lowest bit, so that the upper bits of small differences in both directions are zeros.
    """
    change, sign = _ordered(tuned), _ordered(guess)
    change -= sign
    _spread_sign(change, sign)
    change <<= 1
    change ^= sign
    return change.reshape(tuned.shape)


def with_differences(guess: Array, change: Array) -> Array:
    """The reverse of `ulp_differences`, bit for bit: the tuned array from `guess` and the differences."""
    steps = change.reshape(-1)
    sign = steps & 1
    np.negative(sign, out=sign)
    sign ^= steps >> 1
    sign += _ordered(guess)
    return _unordered(sign, guess.dtype).reshape(guess.shape)


def _ordered(values: Array) -> Array:
    """Bit patterns as unsigned integers; those of floats in the order of their values: negative ones are inverted."""
    bits = values.reshape(-1).view(f"u{values.dtype.itemsize}")
    return bits.copy() if values.dtype.kind in "iub" else _flipped(bits)


def _unordered(bits: Array, dtype: np.dtype[np.generic]) -> Array:
    """The reverse of `_ordered`: the same operation, since the sign bit does not change."""
    return (bits if dtype.kind in "iub" else _flipped(bits)).view(dtype)


def _flipped(bits: Array) -> Array:
    """Inverts all bits but the highest where the highest is set."""
    flip = np.empty_like(bits)
    _spread_sign(bits, flip)
    flip >>= 1
    flip ^= bits
    return flip


def _spread_sign(bits: Array, target: Array) -> None:
    """target = all ones where the highest bit of `bits` is set, else zero."""
    signed = f"i{bits.itemsize}"
    np.right_shift(bits.view(signed), 8 * bits.itemsize - 1, out=target.view(signed))


def byte_planes(change: Array) -> Array:
    """uint8, itemsize×elements: the highest bytes of all integers first, the lowest last; zeros lie together."""
    steps, size = change.reshape(-1), change.itemsize
    content = np.empty((size, len(steps)), np.uint8)
    for number, plane in enumerate(content):
        np.right_shift(steps, 8 * (size - 1 - number), out=plane, casting="unsafe")
    return content


def from_planes(content: bytes, itemsize: int) -> Array:
    """The reverse of `byte_planes`; the length of `content` is a multiple of `itemsize`."""
    first, *others = np.frombuffer(content, np.uint8).reshape(itemsize, -1)
    steps = first.astype(f"<u{itemsize}")
    for plane in others:
        steps <<= 8
        steps |= plane
    return np.asarray(steps)


def can_predict(base: LazyTensor, dtype: DType, shape: tuple[int, ...]) -> bool:
    """Whether a tuned tensor can be stored as a difference from `base`: equal row shape, equal dtype or both float."""
    same_rows = len(base.shape) == len(shape) and base.shape[1:] == shape[1:]
    return same_rows and (base.dtype == dtype or (base.dtype.name in FLOATS and dtype.name in FLOATS))


def known_rows(base: LazyTensor | None, start: int, stop: int) -> Array | None:
    """The rows `start:stop` of `base`, as far as it has them; None if it has none of them."""
    last = min(stop, base.num_rows) if base else start
    return base.rows(start, last) if base and start < last else None


def predicted_rows(known: Array | None, dtype: DType, shape: tuple[int, ...]) -> Array:
    """The rows that a difference is taken from: `known`, rounded to `dtype`, and zeros beyond them.

    `known` are rows of the base, at most as many as `shape` has; None for zeros alone.
    """
    if known is not None and known.dtype == dtype.numpy and known.shape == shape:
        return known
    rows = np.zeros(shape, dtype.numpy)
    if known is not None:
        rows[: len(known)] = _as_type(known, dtype)
    return rows


def _as_type(rows: Array, dtype: DType) -> Array:
    """Rounded to nearest even; NaN becomes 0, because the bits of a converted NaN depend on the machine."""
    if rows.dtype == dtype.numpy:
        return rows
    with np.errstate(all="ignore"):
        cast = rows.astype(dtype.numpy)
    cast[np.isnan(rows)] = 0
    return cast
