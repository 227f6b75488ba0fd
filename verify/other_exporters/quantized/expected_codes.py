"""ExpectedCodes: what is known of the codes in a folder that llmconv wrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from llmconv.tensors import Array, DType
from llmconv.verify.other_exporters.quantized.stacked_matrices import stack_of

EXACT = 1e-6
"""Maximum relative difference of values that are the same product in float32, in another order."""


@dataclass(frozen=True)
class ExpectedCodes:
    """What the codes of quantized weights must be.

    Attributes:
        nearest: every code is the nearest one, given its scale and zero point, and these are what an export chooses.
        plain: scales of 4 bits come from extreme values alone, as those of 8 bits always do.
        weighted: scales of 4 bits suit the columns that matter on a text; values of others may be far beyond the codes.
        feedback: codes of 4 bits are those of GPTQ, which are the nearest to other values.
        kept: weights whose values are those of the reference, with the dtype of its scales; by name.
    """

    nearest: bool = False
    plain: bool = False
    weighted: bool = False
    feedback: bool = False
    kept: Mapping[str, DType] = field(default_factory=dict)

    def scales_of(self, name: str) -> DType | None:
        """The dtype of the reference's scales for a tensor whose codes are kept; else None."""
        return self.kept.get(stack_of(name))


ANY_ROUNDING = ExpectedCodes()


def other_values(values: Array, original: Array, codes: Array, scales: np.dtype, stored: DType, first: int) -> str:
    """Describes the first value that is not the original one, up to the rounding of its scale.

    Args:
        values: of the graph, float32 [rows, columns].
        original: of the reference.
        codes: of the graph, minus their zero point.
        scales: dtype of the graph's scales; others than `stored` are rounded.
        stored: dtype of the reference's scales.
        first: number of the first row.
    """
    limits = None if scales in (np.dtype(np.float32), stored.numpy) else ml_dtypes.finfo(scales)
    relative = EXACT if limits is None else float(limits.eps) / 2 + EXACT
    smallest = 0.0 if limits is None else float(limits.smallest_subnormal) / 2
    odd = np.argwhere(~(np.abs(values - original) <= relative * np.abs(original) + smallest * np.abs(codes)))
    if not len(odd):
        return ""
    row, column = (int(at) for at in odd[0])
    more = f" and {len(odd) - 1:,} more" if len(odd) > 1 else ""
    found, wanted = float(values[row, column]), float(original[row, column])
    place = f"row {first + row}, column {column}{more}"
    return f"the value at {place} is {found:.6g}; in the quantized model it is {wanted:.6g}"
