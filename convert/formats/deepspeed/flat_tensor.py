"""A tensor made of flat pieces: its elements in row-major order lie in ranges of several one-dimensional tensors."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import numpy as np

from llmconv.tensors import Array, DType, LazyTensor


@dataclass(frozen=True)
class Piece:
    """Elements `start:stop` of a one-dimensional tensor."""

    flat: LazyTensor
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Elements in it."""
        return self.stop - self.start

    def read(self, start: int, stop: int) -> Array:
        """Elements `start:stop` of the piece."""
        return self.flat.rows(self.start + start, self.start + stop)


def cut(flats: Sequence[LazyTensor], start: int, stop: int) -> list[Piece]:
    """Elements `start:stop` of the flat tensors laid one after the other; fewer, where they end before `stop`."""
    pieces = []
    for flat in flats:
        low, high = max(start, 0), min(stop, flat.shape[0])
        if low < high:
            pieces.append(Piece(flat, low, high))
        start, stop = start - flat.shape[0], stop - flat.shape[0]
    return pieces


def first_elements(pieces: Sequence[Piece], numel: int) -> list[Piece]:
    """The first `numel` elements of the pieces: what is left without padding at the end."""
    kept = []
    for piece in pieces:
        if numel > 0 and piece.numel:
            kept.append(Piece(piece.flat, piece.start, min(piece.stop, piece.start + numel)))
        numel -= piece.numel
    return kept


def shaped(pieces: Sequence[Piece], shape: tuple[int, ...], dtype: DType) -> LazyTensor:
    """The tensor whose elements the pieces hold, in order; a block of rows reads only the ranges that it touches.

    Raises:
        ValueError: a piece has another dtype, or their elements are not as many as those of `shape`.
    """
    ends = list(accumulate((piece.numel for piece in pieces), initial=0))[1:]
    there, width = ends[-1] if ends else 0, prod(shape[1:])
    if there != prod(shape):
        raise ValueError(f"there are {there} elements")
    if any(piece.flat.dtype != dtype for piece in pieces):
        raise ValueError("the ranks hold different dtypes")

    def load(start: int, stop: int) -> Array:
        first, last = start * width, stop * width
        parts = [np.empty(0, dtype.numpy)]
        for number in range(bisect_right(ends, first), bisect_left(ends, last) + 1 if last > first else 0):
            begin = ends[number] - pieces[number].numel
            parts.append(pieces[number].read(max(first, begin) - begin, min(last, ends[number]) - begin))
        flat = parts[1] if len(parts) == 2 else np.concatenate(parts)
        return flat.reshape(stop - start, *shape[1:])

    return LazyTensor(dtype, shape, load)
