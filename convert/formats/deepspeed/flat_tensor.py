"""A tensor joined from slices: its elements, in row-major order, lie in several one-dimensional tensors."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import numpy as np

from llmconv.tensors import Array, DType, LazyTensor


@dataclass(frozen=True)
class FlatSlice:
    """Elements `start:stop` of a one-dimensional tensor."""

    flat: LazyTensor
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def read(self, start: int, stop: int) -> Array:
        """Elements `start:stop` of the slice."""
        return self.flat.rows(self.start + start, self.start + stop)


def slices_of(flats: Sequence[LazyTensor], start: int, stop: int) -> list[FlatSlice]:
    """Elements `start:stop` of the concatenated flat tensors; fewer if those end before `stop`.

    Args:
        flats: one-dimensional tensors, in order.
        start, stop: elements of their concatenation.
    """
    slices = []
    for flat in flats:
        low, high = max(start, 0), min(stop, flat.shape[0])
        if low < high:
            slices.append(FlatSlice(flat, low, high))
        start, stop = start - flat.shape[0], stop - flat.shape[0]
    return slices


def first_elements(slices: Sequence[FlatSlice], numel: int) -> list[FlatSlice]:
    """The first `numel` elements of the slices, without padding at the end."""
    kept = []
    for part in slices:
        if numel > 0 and part.numel:
            kept.append(FlatSlice(part.flat, part.start, min(part.stop, part.start + numel)))
        numel -= part.numel
    return kept


def joined(slices: Sequence[FlatSlice], shape: tuple[int, ...], dtype: DType) -> LazyTensor:
    """The tensor of the slices' elements, in order; a block of rows reads only the ranges that it needs.

    Args:
        slices: its elements, in row-major order.
        shape: of the tensor.
        dtype: of every slice.

    Raises:
        ValueError: a slice has another dtype, or the number of elements does not match `shape`.
    """
    ends = list(accumulate((part.numel for part in slices), initial=0))[1:]
    numel, width = ends[-1] if ends else 0, prod(shape[1:])
    if numel != prod(shape):
        raise ValueError(f"expected {prod(shape)} elements, got {numel}")
    if any(part.flat.dtype != dtype for part in slices):
        raise ValueError("the dtypes differ between ranks")

    def load(start: int, stop: int) -> Array:
        first, last = start * width, stop * width
        parts = [np.empty(0, dtype.numpy)]
        for number in range(bisect_right(ends, first), bisect_left(ends, last) + 1 if last > first else 0):
            begin = ends[number] - slices[number].numel
            parts.append(slices[number].read(max(first, begin) - begin, min(last, ends[number]) - begin))
        flat = parts[1] if len(parts) == 2 else np.concatenate(parts)
        return flat.reshape(stop - start, *shape[1:])

    return LazyTensor(dtype, shape, load)
