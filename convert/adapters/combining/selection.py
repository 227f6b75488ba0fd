"""The k-th largest magnitude of a tensor, by two passes over its row blocks, without holding it."""

from __future__ import annotations

import numpy as np

from llmconv.tensors import Array, LazyTensor

SHIFT = 44
"""Low bits of a float64 that the first pass ignores: it counts by exponent and eight bits of the fraction."""


def kth_largest(tensor: LazyTensor, count: int) -> float:
    """The magnitude of the `count`-th largest element; infinite when `count` is 0.

    The bits of positive floats are ordered as their values are, so the first pass counts elements by their upper bits,
    and the second sorts those of one group. Memory is that of a row block, 8 MiB, and a group: a few thousandths of
    the elements, more where many are nearly equal.

    Args:
        tensor: float64, finite.
        count: at most the number of elements.
    """
    if count == 0:
        return np.inf
    counts = np.zeros(1 << (63 - SHIFT), np.int64)
    for start, stop in tensor.blocks():
        counts += np.bincount((_bits(tensor, start, stop) >> np.uint64(SHIFT)).astype(np.int64), minlength=len(counts))
    above = np.cumsum(counts[::-1])[::-1]
    group = int(np.flatnonzero(above >= count)[-1])
    rest = count - (int(above[group + 1]) if group + 1 < len(above) else 0)
    return _of_group(tensor, group, rest)


def _of_group(tensor: LazyTensor, group: int, rank: int) -> float:
    parts = []
    for start, stop in tensor.blocks():
        bits = _bits(tensor, start, stop)
        parts.append(bits[(bits >> np.uint64(SHIFT)) == group])
    members = np.concatenate(parts)
    return float(np.partition(members, len(members) - rank)[len(members) - rank].view(np.float64))


def _bits(tensor: LazyTensor, start: int, stop: int) -> Array:
    """The magnitudes of rows as integers in the same order."""
    return np.abs(tensor.rows(start, stop)).reshape(-1).view(np.uint64)
