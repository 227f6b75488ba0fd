"""Tensors made of lines of other tensors: what is left of joining, splitting, stacking, permuting and transposing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from llmconv.tensors import Array, DType, LazyTensor, cast


@dataclass(frozen=True)
class Lines:
    """A tensor seen as lines: the vectors along its last dimension, in order; of more than three, all but the first.

    With `swapped` they are along the last dimension but one, as if the last two were exchanged.
    """

    shape: tuple[int, ...]
    swapped: bool = False

    @property
    def width(self) -> int:
        """Numbers in a line; 1 for a vector, each of whose numbers is one."""
        return prod(self.shape) // max(1, self.count)

    @property
    def count(self) -> int:
        """Number of lines."""
        return prod(self._outer) if self._outer else 1

    @property
    def _outer(self) -> tuple[int, ...]:
        if self.swapped:
            return (*self.shape[:-2], self.shape[-1])
        return self.shape[:1] if len(self.shape) == 1 or len(self.shape) > 3 else self.shape[:-1]

    @property
    def _whole(self) -> bool:
        """Whether every row of the tensor has a part of every line."""
        return self.swapped and len(self.shape) == 2

    def of_rows(self, start: int, stop: int) -> tuple[int, int]:
        """The lines that rows `start:stop` of the tensor consist of, or have parts of."""
        per = prod(self._outer[1:])
        return (0, self.count) if self._whole else (start * per, stop * per)

    def as_rows(self, lines: Array, start: int, stop: int) -> Array:
        """Rows `start:stop` of the tensor from the lines [lines, width] of `of_rows`."""
        if self._whole:
            return np.ascontiguousarray(lines.T[start:stop])
        if self.swapped:
            stacked = lines.reshape(stop - start, self.shape[-1], self.shape[-2])
            return np.ascontiguousarray(stacked.swapaxes(1, 2))
        return lines.reshape(stop - start, *self.shape[1:])

    def read(self, tensor: LazyTensor, wanted: Array) -> Array:
        """Lines [lines, width] by index of a tensor of this shape; reads all rows from the first to the last."""
        low, high = int(wanted.min()), int(wanted.max()) + 1
        if self._whole:
            return np.ascontiguousarray(tensor.read().T[wanted])
        per = prod(self._outer[1:])
        first, last = low // per, -(-high // per)
        rows = tensor.rows(first, last)
        rows = rows.swapaxes(1, 2) if self.swapped else rows
        found: Array = rows.reshape(-1, self.width)[wanted - first * per]
        return found


@dataclass(frozen=True)
class Origin:
    """The tensor and line that each line of a tensor comes from.

    `owner` has for each line the position of its tensor in `sources` (names), `line` its index there.
    """

    lines: Lines
    sources: tuple[str, ...]
    owner: Any
    line: Any


def gathered(origin: Origin, sources: Sequence[LazyTensor], layouts: Sequence[Lines], dtype: DType) -> LazyTensor:
    """The lazy tensor whose lines come from `sources` (in the order of `origin.sources`), each seen as in `layouts`."""
    typed = [cast(source, dtype) for source in sources]

    def load(start: int, stop: int) -> Array:
        first, last = origin.lines.of_rows(start, stop)
        owner, line = origin.owner[first:last], origin.line[first:last]
        result = np.empty((last - first, origin.lines.width), dtype.numpy)
        for number in np.unique(owner):
            mine = owner == number
            result[mine] = layouts[number].read(typed[number], line[mine])
        return origin.lines.as_rows(result, start, stop)

    return LazyTensor(dtype, origin.lines.shape, load, lambda other: gathered(origin, sources, layouts, other))
