"""The transpose of a quantized weight: GPT-2's `Conv1D` is stored in×out, every quantization stores out×in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from llmconv.quantized_weights.integer_codes import IntegerCodes
from llmconv.quantized_weights.packed_weight import PackedWeight
from llmconv.tensors import Array, LazyTensor
from llmconv.transpose import transposed


@dataclass(frozen=True, eq=False)
class TransposedWeight(PackedWeight):
    """The transpose of another weight.

    Attributes:
        stored: the weight as stored in the files.
    """

    stored: PackedWeight

    @property
    def plain(self) -> LazyTensor:
        """See `PackedWeight`."""
        return transposed(self.stored.plain)

    def values(self, start: int, stop: int) -> Array:
        """See `PackedWeight`."""
        return self.plain.rows(start, stop)

    @property
    def integers(self) -> IntegerCodes | None:
        """See `PackedWeight`."""
        found = self.stored.integers
        return replace(found, turned=True) if found else None

    def requantized(self, weight: LazyTensor) -> Self:
        """See `PackedWeight`."""
        stored = self.stored.requantized(transposed(weight))
        return replace(self, parts=stored.parts, stored=stored)


def transposed_weight(weight: PackedWeight) -> PackedWeight:
    """`weight` transposed."""
    return TransposedWeight(weight.name, weight.parts, weight.shape[::-1], weight)
