"""int8 with a scale per row, as stored by LLM.int8 of bitsandbytes.

Layout: `X.weight` int8 of out×in, `X.SCB` float32 of out, `X.weight_format` 0 (row by row). Formulas:
`bitsandbytes/backends/default/ops.py` (`int8_vectorwise_quant`), `functional.py` (`int8_vectorwise_dequant`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import numpy as np

from llmconv.errors import UnsupportedInput
from llmconv.quantized_weights.integer_codes import IntegerCodes
from llmconv.quantized_weights.packed_weight import (
    FLOAT32,
    PackedWeight,
    bounded,
    finite,
    part,
    peaks_of,
    refuse,
    require,
    tiled,
    unsigned,
)
from llmconv.tensors import Array, LazyTensor

STEP = np.float32(7.874015718698502e-3)
"""1/127, as bitsandbytes writes it."""


@dataclass(frozen=True, eq=False)
class Int8Rows(PackedWeight):
    """value = code · scale of its row / 127.

    Attributes:
        scales: name of the tensor of scales.
    """

    scales: str

    def values(self, start: int, stop: int) -> Array:
        """See `PackedWeight`."""
        scales = finite(self.parts[self.scales].rows(start, stop), self.scales)
        wide = self.parts[self.name].rows(start, stop).astype(np.float32)
        wide *= scales[:, np.newaxis]
        wide *= STEP
        return wide

    @property
    def integers(self) -> IntegerCodes:
        """See `PackedWeight`."""

        def scales(start: int, stop: int) -> Array:
            stored = finite(self.parts[self.scales].rows(start, stop), self.scales)
            return (bounded(stored, 128, self.name) * STEP)[:, np.newaxis]  # codes come first in `values`

        codes = unsigned(self.parts[self.name])
        return IntegerCodes(self.shape, 8, np.zeros(self.shape[1], np.int64), codes.rows, scales, None, FLOAT32)

    def requantized(self, weight: LazyTensor) -> Self:
        """See `PackedWeight`; a row's scale is its largest absolute value."""

        def codes(start: int, stop: int) -> Array:
            largest = peaks_of(weight, start, stop)
            steps = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
            return np.rint(weight.rows(start, stop).astype(np.float32) * steps[:, np.newaxis]).astype(np.int8)

        stored, columns = self.parts[self.name], self.shape[1]
        parts = {
            self.name: tiled(LazyTensor(stored.dtype, stored.shape, codes), columns),
            self.scales: tiled(LazyTensor(FLOAT32, stored.shape[:1], partial(peaks_of, weight)), columns),
        }
        return replace(self, parts={**self.parts, **parts})


def open_int8(tensors: Mapping[str, LazyTensor], name: str) -> Int8Rows:
    """The weight `name`.

    Raises:
        MalformedInput: missing or mismatched scales.
        UnsupportedInput: the codes are in the order of a GPU kernel.
    """
    stem = name.removesuffix("weight")
    codes, scales = tensors[name], part(tensors, f"{stem}SCB", name)
    if len(codes.shape) != 2:
        refuse(name, f"is int8 of shape {list(codes.shape)}, not a matrix")
    parts = {name: codes, f"{stem}SCB": require(scales, f"{stem}SCB", codes.shape[:1], ("float32",))}
    order = f"{stem}weight_format"
    if order in tensors:
        parts[order] = require(tensors[order], order, tensors[order].shape[:1] and (1,), ("uint8",))
        if parts[order].read().any():
            raise UnsupportedInput(
                f"`{name}` is int8 in the order of one kind of GPU",
                hint="load and save it with bitsandbytes 0.43 or later, which stores rows",
            )
    return Int8Rows(name, parts, codes.shape, f"{stem}SCB")
