"""GroupedWeight: low-bit integers in int32 words, with a scale and a zero point per group of inputs and per output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Self

import numpy as np

from llmconv.convert.algebra.transpose import transposed
from llmconv.convert.quantization.packed_weight import PackedWeight, finite, tiled
from llmconv.tensors import Array, LazyTensor


@dataclass(frozen=True)
class Packing:
    """How codes lie in the words of a weight.

    Attributes:
        outputs: outputs in a row of words, once that holds whole outputs.
        unpack: words (rows×columns) to codes (rows·outputs×inputs), uint8.
        pack: the way back.
        inputs_first: the words lie in the file by inputs, so they are turned for that.
    """

    outputs: int
    unpack: Callable[[Array], Array]
    pack: Callable[[Array], Array]
    inputs_first: bool = True

    def by_outputs(self, words: LazyTensor) -> LazyTensor:
        """The words as they lie in the file with outputs in rows, or the way back."""
        return transposed(words) if self.inputs_first else words


@dataclass(frozen=True, eq=False)
class GroupedWeight(PackedWeight):
    """value = (code - zero point of its group) · scale of its group.

    Attributes:
        words: name of the tensor of codes.
        scales: name of the tensor of scales.
        read_grid: scales and zero points as they are, both out×groups.
        groups: the group of every input.
        packing: how the codes lie in the words.
        levels: how many values a code has.
    """

    words: str
    scales: str
    read_grid: Callable[[], tuple[Array, Array]]
    groups: Array
    packing: Packing
    levels: int
    turned: LazyTensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "turned", self.packing.by_outputs(self.parts[self.words]))

    def values(self, start: int, stop: int) -> Array:
        """See `PackedWeight`; exact where scales are of 16 bits."""
        size = self.packing.outputs
        codes = self.packing.unpack(self.turned.rows(start // size, -(-stop // size)))
        scales, zeros = self._spread(start, stop)
        wide = codes[start % size :][: stop - start, : self.shape[1]].astype(np.float32)
        wide -= zeros
        wide *= scales
        return wide

    def requantized(self, weight: LazyTensor) -> Self:
        """See `PackedWeight`; scales and zero points stay, so a value moves by whole steps of its grid."""
        words, size = self.parts[self.words], self.packing.outputs

        def load(start: int, stop: int) -> Array:
            first, last = start * size, min(stop * size, self.shape[0])
            scales, zeros = self._spread(first, last)
            rows = weight.rows(first, last).astype(np.float32)
            steps = np.divide(rows, scales, out=np.zeros_like(rows), where=scales != 0)
            codes = np.clip(np.rint(steps + zeros), 0, self.levels - 1).astype(np.uint8)
            return self.packing.pack(codes)

        turned = tiled(LazyTensor(words.dtype, self.turned.shape, load), size * self.shape[1])
        new = replace(self, parts={**self.parts, self.words: self.packing.by_outputs(turned)})
        object.__setattr__(new, "turned", turned)  # not the words turned twice
        return new

    def _spread(self, start: int, stop: int) -> tuple[Array, Array]:
        """Scale and zero point of every element of rows `start:stop`, float32."""
        scales, zeros = _grid(self.read_grid)
        wide = finite(scales[start:stop], self.scales)
        return np.take(wide, self.groups, axis=1), np.take(zeros[start:stop], self.groups, axis=1).astype(np.float32)


@lru_cache(maxsize=4)
def _grid(read: Callable[[], tuple[Array, Array]]) -> tuple[Array, Array]:
    """Scales and zero points of one weight; those of the last few are kept."""
    return read()
