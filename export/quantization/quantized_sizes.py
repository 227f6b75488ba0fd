"""QuantizedSizes: how many weights of a model became codes, and what that saves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmconv.export.quantization.column_factors import SMOOTHING
from llmconv.export.quantization.column_format import ColumnFormat, WeightFormat
from llmconv.export.quantization.quantized_tensor import CODES, ORDER, SCALES, ZEROS
from llmconv.export.quantization.selection import QuantizedWeight
from llmconv.quantized_export import described
from llmconv.tensors import LazyTensor


@dataclass(frozen=True)
class QuantizedSizes:
    """Numbers of weights and bytes of a quantized export.

    Attributes:
        matrices: number of quantized tensors by bits and size of a block, which is 0 for one scale per column.
        before: bytes of these tensors in the model.
        after: bytes of their codes, scales and zero points.
        plain: number of tensors that are stored as they are.
        factors: bytes of factors of columns, which no graph reads: `verify` does.
    """

    matrices: Mapping[tuple[int, int], int]
    before: int
    after: int
    plain: int
    factors: int

    @classmethod
    def of(
        cls,
        quantized: Mapping[str, QuantizedWeight],
        before: Mapping[str, LazyTensor],
        after: Mapping[str, LazyTensor],
    ) -> QuantizedSizes:
        """The sizes of an export, by the tensors of the model (`before`) and those stored instead (`after`)."""
        parts = [name + suffix for name in quantized for suffix in (CODES, ZEROS, SCALES, ORDER)]
        return cls(
            dict(Counter(_kind(weight.form) for weight in quantized.values()).most_common()),
            sum(before[name].nbytes for name in quantized),
            sum(after[name].nbytes for name in parts if name in after),
            len(before.keys() - quantized.keys()),
            sum(tensor.nbytes for name, tensor in after.items() if name.endswith(SMOOTHING)),
        )

    @property
    def line(self) -> str:
        """Everything in one line."""
        sizes = f"{described(self.matrices)}, {self.after:,} bytes instead of {self.before:,}"
        plain = f"{self.plain:,} tensor{'s' * (self.plain != 1)} as {'they are' if self.plain != 1 else 'it is'}"
        factors = f"; {self.factors:,} bytes of factors, which only `verify` reads" if self.factors else ""
        return f"quantized: {sizes}; {plain}{factors}"

    def fields(self) -> dict[str, Any]:
        """Fields of `export --json`."""
        kinds = [{"bits": bits, "block": size, "count": count} for (bits, size), count in self.matrices.items()]
        sizes = {"bytes_before": self.before, "bytes": self.after, "factor_bytes": self.factors}
        return {"matrices": kinds, **sizes, "plain": self.plain}


def _kind(form: WeightFormat) -> tuple[int, int]:
    return form.bits, 0 if isinstance(form, ColumnFormat) else form.size
