"""Packing of n-bit numbers (2, 3, 4, 8) in int32 words: number i of a row starts at bit i·n, little-endian."""

from __future__ import annotations

import numpy as np

from llmconv.tensors import Array

WIDTHS = (2, 3, 4, 8)


def unpack(words: Array, bits: int) -> Array:
    """The numbers in `words`.

    Args:
        words: int32, rows×(columns·bits/32).
        bits: per number.

    Returns:
        uint8, rows×columns.
    """
    raw = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return raw
    if bits == 3:
        digits = np.unpackbits(raw, axis=1, bitorder="little")
        digits = digits[:, : digits.shape[1] // 3 * 3].reshape(len(raw), -1, 3)
        return digits[..., 0] | digits[..., 1] << 1 | digits[..., 2] << 2
    per_byte = 8 // bits
    numbers = np.empty((*raw.shape, per_byte), np.uint8)
    for place in range(per_byte):
        np.right_shift(raw, place * bits, out=numbers[..., place])
    numbers &= (1 << bits) - 1
    return numbers.reshape(len(raw), -1)


def pack(numbers: Array, bits: int, width: int) -> Array:
    """The reverse of `unpack`.

    Args:
        numbers: uint8, rows×columns.
        bits: per number.
        width: words per row, padded with zeros.

    Returns:
        int32, rows×width.
    """
    full = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % 32)))
    if bits == 3:
        digits = np.unpackbits(full[..., np.newaxis], axis=2, count=3, bitorder="little")
        raw = np.packbits(digits.reshape(len(full), -1), axis=1, bitorder="little")
    else:
        grouped = full.reshape(len(full), -1, 8 // bits)
        raw = np.zeros(grouped.shape[:2], np.uint8)
        for place in range(8 // bits):
            raw |= grouped[..., place] << (place * bits)
    return np.ascontiguousarray(raw.view("<i4")[:, :width])
