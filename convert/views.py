"""Views of lazy tensors: some of the rows, and the transpose."""

from __future__ import annotations

import threading

import numpy as np

from llmconv.tensors import Array, LazyTensor


def slice_rows(tensor: LazyTensor, start: int, stop: int) -> LazyTensor:
    """Rows `start:stop` of a tensor."""
    shape = (stop - start, *tensor.shape[1:])
    return LazyTensor(tensor.dtype, shape, lambda first, last: tensor.rows(start + first, start + last))


def transpose(tensor: LazyTensor) -> LazyTensor:
    """A matrix with its rows and columns exchanged.

    A few rows of the result need all rows of the source, so the source is read once and kept until the last row of the
    result was asked for: the memory of one matrix.
    """
    rows, columns = tensor.shape
    lock, served = threading.Lock(), [0]
    kept: list[Array] = []

    def load(start: int, stop: int) -> Array:
        with lock:
            if not kept:
                kept.append(tensor.read())
            whole = kept[0]
            served[0] += stop - start
            if served[0] >= columns:
                kept.clear()
                served[0] = 0
        return np.ascontiguousarray(whole[:, start:stop].T)

    return LazyTensor(tensor.dtype, (columns, rows), load)
