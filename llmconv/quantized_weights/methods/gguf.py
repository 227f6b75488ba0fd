"""Blocks of a GGUF file as codes, scales and offsets: value = scale * code + offset.

Only llmconv has such tensors, between a file and the graphs that are exported from it: `X.codes` int8 [out, in],
`X.scales` and, of types that have them, `X.offsets` float32 [out, groups]. `types` of the config has llama.cpp's name
of the type of each matrix.
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
)
from llmconv.quantized_weights.quantized_checkpoint import QuantizationMethod
from llmconv.tensors import Array, LazyTensor

CODES, SCALES, OFFSETS = ".codes", ".scales", ".offsets"
SMALL = ("Q4_0", "Q4_1", "Q2_K", "Q3_K", "Q4_K", "TQ1_0", "TQ2_0")  # types with codes of 4 bits; others have 8
MIDDLE_CODE = {"Q4_1": 8, "Q5_1": 16, "Q2_K": 2, "Q4_K": 8, "Q5_K": 16}
"""Of the types with offsets: codes count from it in graphs, so that what is added to a product is small."""


@dataclass(frozen=True, eq=False)
class BlockWeight(PackedWeight):
    """A matrix of blocks; those of a row have the same number of elements."""

    type: str  # llama.cpp's name

    def values(self, start: int, stop: int) -> Array:
        scales, offsets = self._scales(start, stop), self._offsets
        values = scales[:, :, None] * self._codes.rows(start, stop).astype(np.float32).reshape(*scales.shape, -1)
        if offsets is not None:
            values += finite(offsets.rows(start, stop), self.name + OFFSETS)[:, :, None]
        return values.reshape(stop - start, *self.shape[1:])

    @property
    def integers(self) -> IntegerCodes:
        bits, middle, offsets = 4 if self.type in SMALL else 8, MIDDLE_CODE.get(self.type, 0), self._offsets
        zero = 1 << bits - 1

        def codes(start: int, stop: int) -> Array:
            found = self._codes.rows(start, stop)
            if found.min(initial=0) < middle - zero or found.max(initial=0) >= middle + zero:
                refuse(self.name + CODES, f"has codes of more than {bits} bits")
            return found.view(np.uint8) + np.uint8((zero - middle) % 256)

        def shifted() -> Array:
            assert offsets is not None
            scales = self._scales(0, self.shape[0])
            return finite(offsets.read(), self.name + OFFSETS) + np.float32(middle) * scales

        size = self.shape[1] // self.parts[self.name + SCALES].shape[1]
        groups = np.arange(self.shape[1]) // size
        added = None if offsets is None else shifted
        return IntegerCodes(self.shape, bits, groups, codes, self._scales, None, FLOAT32, offsets=added)

    def requantized(self, weight: LazyTensor) -> Self:
        """Raises UnsupportedInput: such weights are not written."""
        raise UnsupportedInput(
            f"`{self.name}` has the codes of a GGUF file, which stay as they are", hint="give the model in floats"
        )

    @property
    def _codes(self) -> LazyTensor:
        return self.parts[self.name + CODES]

    @property
    def _offsets(self) -> LazyTensor | None:
        return self.parts.get(self.name + OFFSETS)

    def _scales(self, start: int, stop: int) -> Array:
        scales = finite(self.parts[self.name + SCALES].rows(start, stop), self.name + SCALES)
        return bounded(scales, 128, self.name)


def open_blocks(checkpoint: Checkpoint) -> Mapping[str, BlockWeight]:
    """The matrices of blocks; raises MalformedInput for parts that do not fit together."""
    types = checkpoint.config["quantization_config"].get("types")
    weights: dict[str, BlockWeight] = {}
    for name, codes in checkpoint.items():
        if not name.endswith(CODES):
            continue
        stem = name.removesuffix(CODES)
        scales = part(checkpoint, stem + SCALES, name)
        kind = types.get(stem) if isinstance(types, Mapping) else None
        if len(codes.shape) != 2 or codes.dtype.name != "int8" or 0 in codes.shape or not isinstance(kind, str):
            refuse(name, f"is {codes.dtype.name} {list(codes.shape)}, not int8 codes of a matrix with a known type")
        groups = scales.shape[-1] if len(scales.shape) == 2 else 0
        if not groups or codes.shape[1] % groups:
            refuse(stem + SCALES, f"has shape {list(scales.shape)}, and the codes {list(codes.shape)}")
        if (kind in MIDDLE_CODE) != (stem + OFFSETS in checkpoint):
            refuse(name, f"has the type {kind[:20]}, and offsets that do not fit it")
        own = {stem + end: checkpoint[stem + end] for end in (CODES, SCALES, OFFSETS) if stem + end in checkpoint}
        for end in {*own} - {name}:
            require(own[end], end, (codes.shape[0], groups), ("float32",))
        weights[stem] = BlockWeight(stem, own, codes.shape, kind)
    refuse_strays(checkpoint, (CODES, SCALES, OFFSETS), weights)
    return weights


METHOD = QuantizationMethod("gguf", open_blocks)
