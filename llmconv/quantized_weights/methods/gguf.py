"""Blocks of a GGUF file as codes, scales and offsets: value = scale * code + offset.

Only llmconv has such tensors, between a file and the graphs that are exported from it: `X.codes` [out, in], uint8 for 4
bits (8 more than the code where there are no offsets) and int8 for 8 bits; `X.scales` and, of types that have them,
`X.offsets` float32 [out, groups].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from llmconv.checkpoint import Checkpoint
from llmconv.errors import UnsupportedInput
from llmconv.quantized_weights.packed_weight import (
    FLOAT32,
    IntegerCodes,
    PackedWeight,
    bounded,
    finite,
    part,
    refuse,
    refuse_strays,
    require,
    unsigned,
)
from llmconv.quantized_weights.quantized_checkpoint import QuantizationMethod
from llmconv.tensors import Array, LazyTensor

CODES, SCALES, OFFSETS = ".codes", ".scales", ".offsets"
MIDDLE = 8  # of codes of 4 bits
MOST = {"uint8": 15, "int8": 128}


@dataclass(frozen=True, eq=False)
class BlockWeight(PackedWeight):
    """A matrix of blocks; those of a row have the same number of elements."""

    def values(self, start: int, stop: int) -> Array:
        codes, scales, offsets = self._codes(start, stop).astype(np.float32), self._scales(start, stop), self._offsets()
        if self._is_small and offsets is None:
            codes -= MIDDLE
        values = scales[:, :, None] * codes.reshape(*scales.shape, -1)
        if offsets is not None:
            values += finite(offsets.rows(start, stop), self.name + OFFSETS)[:, :, None]
        return values.reshape(stop - start, *self.shape[1:])

    @property
    def integers(self) -> IntegerCodes:
        codes, scales, offsets = self.parts[self.name + CODES], self.parts[self.name + SCALES], self._offsets()
        size = self.shape[1] // scales.shape[1]

        def shifted() -> Array:
            """The offsets where the middle of the codes is 0."""
            assert offsets is not None
            found = finite(offsets.read(), self.name + OFFSETS)
            return found + np.float32(MIDDLE) * self._scales(0, self.shape[0]) if self._is_small else found

        return IntegerCodes(
            self.shape,
            4 if self._is_small else 8,
            np.arange(self.shape[1]) // size,
            self._codes if self._is_small else unsigned(codes).rows,
            self._scales,
            None,
            FLOAT32,
            offsets=None if offsets is None else shifted,
        )

    def requantized(self, weight: LazyTensor) -> Self:
        """Raises UnsupportedInput: such weights are not written."""
        raise UnsupportedInput(
            f"`{self.name}` has the codes of a GGUF file, which stay as they are", hint="give the model in floats"
        )

    @property
    def _is_small(self) -> bool:
        return self.parts[self.name + CODES].dtype.name == "uint8"

    def _offsets(self) -> LazyTensor | None:
        return self.parts.get(self.name + OFFSETS)

    def _codes(self, start: int, stop: int) -> Array:
        codes = self.parts[self.name + CODES].rows(start, stop)
        if self._is_small and codes.max(initial=0) > MOST["uint8"]:
            refuse(self.name + CODES, "has codes of more than 4 bits")
        return codes

    def _scales(self, start: int, stop: int) -> Array:
        scales = finite(self.parts[self.name + SCALES].rows(start, stop), self.name + SCALES)
        return bounded(scales, MOST[self.parts[self.name + CODES].dtype.name], self.name)


def open_blocks(checkpoint: Checkpoint) -> Mapping[str, BlockWeight]:
    """The matrices of blocks; raises MalformedInput for parts that do not fit together."""
    weights: dict[str, BlockWeight] = {}
    for name, codes in checkpoint.items():
        if not name.endswith(CODES):
            continue
        stem = name.removesuffix(CODES)
        scales = part(checkpoint, stem + SCALES, name)
        if len(codes.shape) != 2 or codes.dtype.name not in MOST or 0 in codes.shape:
            refuse(name, f"is {codes.dtype.name} {list(codes.shape)}, which are no codes of a matrix")
        groups = scales.shape[-1] if len(scales.shape) == 2 else 0
        if not groups or codes.shape[1] % groups:
            refuse(stem + SCALES, f"has shape {list(scales.shape)}, and the codes {list(codes.shape)}")
        own = {stem + end: checkpoint[stem + end] for end in (CODES, SCALES, OFFSETS) if stem + end in checkpoint}
        for end in {*own} - {name}:
            require(own[end], end, (codes.shape[0], groups), ("float32",))
        weights[stem] = BlockWeight(stem, own, codes.shape)
    refuse_strays(checkpoint, (CODES, SCALES, OFFSETS), weights)
    return weights


METHOD = QuantizationMethod("gguf", open_blocks)
