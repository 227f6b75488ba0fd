"""GroupedWeight: low-bit integers in int32 words, with a scale and a zero point per group of inputs and per output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Self

import numpy as np

from llmconv.quantized_weights.packed_weight import PackedWeight, finite, tiled
from llmconv.tensors import Array, LazyTensor
from llmconv.transpose import transposed


@dataclass(frozen=True)
class Packing:
    """The layout of codes in the words of a weight.

    Attributes:
        outputs: number of outputs per row of words, after transposing.
        unpack: words (rows×columns) to codes (rows·outputs×inputs), uint8.
        pack: the reverse.
        inputs_first: the file has inputs in rows, so the words are transposed.
    """

    outputs: int
    unpack: Callable[[Array], Array]
    pack: Callable[[Array], Array]
    inputs_first: bool = True

    def by_outputs(self, words: LazyTensor) -> LazyTensor:
        """The words in the file transposed to outputs in rows, or the reverse."""
        return transposed(words) if self.inputs_first else words


@dataclass(frozen=True, eq=False)
class GroupedWeight(PackedWeight):
    """value = (code - zero point of its group) · scale of its group.

    Attributes:
        words: name of the tensor of codes.
        scales: name of the tensor of scales.
        read_grid: reads scales and zero points as stored, both out×groups.
        groups: the group of every input.
        packing: layout of the codes in the words.
        levels: number of values of a code.
    """

    words: str
    scales: str
    read_grid: Callable[[], tuple[Array, Array]]
    groups: Array
    packing: Packing
    levels: int
    by_rows: LazyTensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_rows", self.packing.by_outputs(self.parts[self.words]))

    def values(self, start: int, stop: int) -> Array:
        """See `PackedWeight`; exact where scales are of 16 bits."""
        size = self.packing.outputs
        codes = self.packing.unpack(self.by_rows.rows(start // size, -(-stop // size)))
        scales, zeros = self._spread(start, stop)
        wide = codes[start % size :][: stop - start, : self.shape[1]].astype(np.float32)
        wide -= zeros
        wide *= scales
        return wide

    def requantized(self, weight: LazyTensor) -> Self:
        """See `PackedWeight`; scales and zero points stay, so values change by whole steps."""
        words, size = self.parts[self.words], self.packing.outputs

        def load(start: int, stop: int) -> Array:
            first, last = start * size, min(stop * size, self.shape[0])
            scales, zeros = self._spread(first, last)
            rows = weight.rows(first, last).astype(np.float32)
            steps = np.divide(rows, scales, out=np.zeros_like(rows), where=scales != 0)
            codes = np.clip(np.rint(steps + zeros), 0, self.levels - 1).astype(np.uint8)
            return self.packing.pack(codes)

        by_rows = tiled(LazyTensor(words.dtype, self.by_rows.shape, load), size * self.shape[1])
        new = replace(self, parts={**self.parts, self.words: self.packing.by_outputs(by_rows)})
        object.__setattr__(new, "by_rows", by_rows)  # without transposing twice
        return new

    def _spread(self, start: int, stop: int) -> tuple[Array, Array]:
        """Scale and zero point of every element of rows `start:stop`, float32."""
        scales, zeros = _grid(self.read_grid)
        wide = finite(scales[start:stop], self.scales)
        return np.take(wide, self.groups, axis=1), np.take(zeros[start:stop], self.groups, axis=1).astype(np.float32)


@lru_cache(maxsize=4)
def _grid(read: Callable[[], tuple[Array, Array]]) -> tuple[Array, Array]:
    """Scales and zero points of one weight; those of the last few are cached."""
    return read()
