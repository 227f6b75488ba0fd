"""Turned: a quantized weight that the plain model holds the other way round."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from llmconv.convert.algebra.transpose import transposed
from llmconv.convert.quantization.packed_weight import PackedWeight
from llmconv.tensors import Array, LazyTensor


@dataclass(frozen=True, eq=False)
class Turned(PackedWeight):
    """The transpose of another weight; GPT-2's `Conv1D` is in×out, every quantization stores out×in.

    Attributes:
        stored: as it lies in the files.
    """

    stored: PackedWeight

    @property
    def plain(self) -> LazyTensor:
        """See `PackedWeight`."""
        return transposed(self.stored.plain)

    def values(self, start: int, stop: int) -> Array:
        """See `PackedWeight`."""
        return self.plain.rows(start, stop)

    def requantized(self, weight: LazyTensor) -> Self:
        """See `PackedWeight`."""
        stored = self.stored.requantized(transposed(weight))
        return replace(self, parts=stored.parts, stored=stored)


def turned(weight: PackedWeight) -> PackedWeight:
    """`weight` the other way round."""
    return Turned(weight.name, weight.parts, weight.shape[::-1], weight)
