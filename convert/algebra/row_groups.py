"""Splitting and joining fused matrices by groups of rows, lazily."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmconv.tensors import BLOCK_BYTES, Array, LazyTensor


def pick_rows(tensor: LazyTensor, group: int, first: int, count: int) -> LazyTensor:
    """Rows `first:first + count` of every group of `group` rows, one group after the other.

    Args:
        tensor: of any number of dimensions.
        group: rows in a group.
        first: the first row that is taken of each group.
        count: rows that are taken of each group.

    Raises:
        ValueError: the rows do not divide into such groups, or a group has no such rows.
    """
    if group <= 0 or count <= 0 or tensor.num_rows % group or not 0 <= first <= group - count:
        raise ValueError(f"{tensor.num_rows} rows have no rows {first}:{first + count} in groups of {group}")
    row_bytes = max(1, tensor.nbytes // max(1, tensor.num_rows))

    def load(start: int, stop: int) -> Array:
        low, high = start // count, -(-stop // count)
        if group * row_bytes < BLOCK_BYTES:
            rows = tensor.rows(low * group, high * group)
            picked = rows.reshape(high - low, group, *rows.shape[1:])[:, first : first + count]
            return np.ascontiguousarray(picked.reshape(-1, *rows.shape[1:])[start - low * count : stop - low * count])
        pieces = []
        for number in range(low, high):
            begin, end = max(start - number * count, 0), min(stop - number * count, count)
            pieces.append(tensor.rows(number * group + first + begin, number * group + first + end))
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    return LazyTensor(tensor.dtype, (tensor.num_rows // group * count, *tensor.shape[1:]), load)


def interleave_rows(parts: Sequence[LazyTensor], counts: Sequence[int]) -> LazyTensor:
    """The next `counts[k]` rows of each part in turn, until all are used up; the reverse of `pick_rows`.

    Raises:
        ValueError: the parts do not have the same number of groups, or differ in dtype or in the other sizes.
    """
    kinds = {(part.dtype, part.shape[1:], part.num_rows / count) for part, count in zip(parts, counts, strict=True)}
    group = sum(counts)
    groups = parts[0].num_rows // counts[0]
    if len(kinds) != 1 or groups * counts[0] != parts[0].num_rows:
        raise ValueError(f"cannot interleave {[part.shape for part in parts]} by {list(counts)} rows")

    def load(start: int, stop: int) -> Array:
        low, high = start // group, -(-stop // group)
        pieces = [
            part.rows(low * count, high * count).reshape(high - low, count, *part.shape[1:])
            for part, count in zip(parts, counts, strict=True)
        ]
        rows = np.concatenate(pieces, axis=1).reshape((high - low) * group, *parts[0].shape[1:])
        return np.ascontiguousarray(rows[start - low * group : stop - low * group])

    return LazyTensor(parts[0].dtype, (groups * group, *parts[0].shape[1:]), load)
