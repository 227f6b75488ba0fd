"""What one array of weights is over another, without loss: by how many representable numbers each weight moved.

The bit pattern of a float counts the floats between zero and it, so bit patterns in the order of their values can be
subtracted as integers, modulo 2ⁿ. Any two patterns have a difference that leads back exactly: NaN, infinities, -0 too.
Weights that training hardly moved give small integers, whose upper bytes are zeros: that compresses.
"""

from __future__ import annotations

import numpy as np

from llmconv.tensors import FLOATS, Array, DType, LazyTensor


def moves(tuned: Array, guess: Array) -> Array:
    """The difference of two arrays of one dtype and shape, as unsigned integers: 0, then -1, +1, -2, +2, … as 1, 2, 3.

    The sign goes into the lowest bit, so that small moves in both directions have zeros above.
    """
    change, sign = _ordered(tuned), _ordered(guess)
    change -= sign
    _spread_sign(change, sign)
    change <<= 1
    change ^= sign
    return change.reshape(tuned.shape)


def moved(guess: Array, change: Array) -> Array:
    """The array that `moves` gave `change` for; the reverse, bit for bit."""
    steps = change.reshape(-1)
    sign = steps & 1
    np.negative(sign, out=sign)
    sign ^= steps >> 1
    sign += _ordered(guess)
    return _unordered(sign, guess.dtype).reshape(guess.shape)


def _ordered(values: Array) -> Array:
    """Bit patterns as unsigned integers, those of floats in the order of the values: below zero all other bits flip."""
    bits = values.reshape(-1).view(f"u{values.dtype.itemsize}")
    return bits.copy() if values.dtype.kind in "iub" else _flipped(bits)


def _unordered(bits: Array, dtype: np.dtype[np.generic]) -> Array:
    """The reverse of `_ordered`, which is itself: the sign bit does not change."""
    return (bits if dtype.kind in "iub" else _flipped(bits)).view(dtype)


def _flipped(bits: Array) -> Array:
    """All bits but the highest the other way round where that is set."""
    flip = np.empty_like(bits)
    _spread_sign(bits, flip)
    flip >>= 1
    flip ^= bits
    return flip


def _spread_sign(bits: Array, target: Array) -> None:
    """target = all ones where the highest bit is set, else zero."""
    signed = f"i{bits.itemsize}"
    np.right_shift(bits.view(signed), 8 * bits.itemsize - 1, out=target.view(signed))


def planes(change: Array) -> Array:
    """The integers byte by byte: first the highest byte of all, last the lowest; equal bytes lie side by side."""
    steps, size = change.reshape(-1), change.itemsize
    content = np.empty((size, len(steps)), np.uint8)
    for number, plane in enumerate(content):
        np.right_shift(steps, 8 * (size - 1 - number), out=plane, casting="unsafe")
    return content


def from_planes(content: bytes, itemsize: int) -> Array:
    """The reverse of `planes`; the length is a multiple of `itemsize`."""
    first, *others = np.frombuffer(content, np.uint8).reshape(itemsize, -1)
    steps = first.astype(f"<u{itemsize}")
    for plane in others:
        steps <<= 8
        steps |= plane
    return np.asarray(steps)


def tells_of(base: LazyTensor, dtype: DType, shape: tuple[int, ...]) -> bool:
    """Whether `base` is a guess for a tensor: rows of one shape, of the same type or both of floats up to 32 bits."""
    same_rows = len(base.shape) == len(shape) and base.shape[1:] == shape[1:]
    return same_rows and (base.dtype == dtype or (base.dtype.name in FLOATS and dtype.name in FLOATS))


def known_rows(base: LazyTensor | None, start: int, stop: int) -> Array | None:
    """Those of the rows `start:stop` that `base` has; None where it has none of them."""
    last = min(stop, base.num_rows) if base else start
    return base.rows(start, last) if base and start < last else None


def guess_rows(known: Array | None, dtype: DType, shape: tuple[int, ...]) -> Array:
    """What rows are told from: those of the base, rounded to `dtype` where they are of another, and zeros beyond them.

    Args:
        known: rows of a base that `tells_of` the tensor, no more than are wanted; None for zeros alone.
        dtype: element type of the tensor.
        shape: of the rows wanted.
    """
    if known is not None and known.dtype == dtype.numpy and known.shape == shape:
        return known
    rows = np.zeros(shape, dtype.numpy)
    if known is not None:
        rows[: len(known)] = _as_type(known, dtype)
    return rows


def _as_type(rows: Array, dtype: DType) -> Array:
    """Rounded to nearest even; NaN becomes 0, because which NaN it would become depends on the machine."""
    if rows.dtype == dtype.numpy:
        return rows
    with np.errstate(all="ignore"):
        cast = rows.astype(dtype.numpy)
    cast[np.isnan(rows)] = 0
    return cast
