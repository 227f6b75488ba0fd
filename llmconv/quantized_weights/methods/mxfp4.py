"""MXFP4, as gpt-oss is published: fused experts of 4-bit floats, with an exponent per 32 inputs.

Layout (`transformers/integrations/mxfp4.py`, `convert_moe_packed_tensors`): `X_blocks` uint8 experts×out×(in/32)×16,
two codes per byte, the first in the lower half; `X_scales` uint8 experts×out×(in/32), value = code · 2^(scale - 127).
The plain weight `X` is experts×in×out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from llmconv.checkpoint import Checkpoint
from llmconv.quantized_weights.float4 import BIAS, BOUNDS, SIZES, TABLE
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

BLOCKS, SCALES = "_blocks", "_scales"
DOUBLED = (2 * TABLE + 128).astype(np.uint8)  # twice the values of the codes, as integers above 128
LARGEST = 12  # twice the largest value of a code
BLOCK = 32


@dataclass(frozen=True, eq=False)
class Mxfp4Experts(PackedWeight):
    """value = code · 2^exponent of its block; rows are experts."""

    def values(self, start: int, stop: int) -> Array:
        """See `PackedWeight`; exact."""
        packed = self.parts[self.name + BLOCKS].rows(start, stop)
        codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:3], BLOCK)
        exponents = self._exponents(start, stop)
        values = np.ldexp(TABLE[codes], exponents[..., np.newaxis])
        return np.ascontiguousarray(values.reshape(*values.shape[:2], -1).swapaxes(1, 2))

    @property
    def integers(self) -> IntegerCodes:
        """See `PackedWeight`: twice the value of a code is an integer of magnitude up to 12."""

        def codes(start: int, stop: int) -> Array:
            packed = self.parts[self.name + BLOCKS].rows(start, stop)
            pairs = np.stack([packed & 15, packed >> 4], axis=-1)
            return DOUBLED[pairs].reshape(*packed.shape[:2], -1)

        def scales(start: int, stop: int) -> Array:
            found = finite(np.ldexp(np.float32(0.5), self._exponents(start, stop)), self.name + SCALES)
            return bounded(found, LARGEST, self.name)

        experts, inputs, outputs = self.shape
        groups = np.arange(inputs) // BLOCK
        return IntegerCodes((experts, outputs, inputs), 8, groups, codes, scales, None, FLOAT32, turned=True)

    def requantized(self, weight: LazyTensor) -> Self:
        """See `PackedWeight`. A block keeps its exponent where its largest value fits and uses half of the range."""
        blocks, scales = self.parts[self.name + BLOCKS], self.parts[self.name + SCALES]

        def exponents(start: int, stop: int, values: Array) -> Array:
            peaks, old = np.abs(values).max(axis=-1), self._exponents(start, stop)
            share = np.ldexp(peaks, -old)
            new = np.ceil(np.log2(np.maximum(peaks, np.float32(1e-37)) / SIZES[-1])).astype(np.int32)
            kept = (share <= SIZES[-1]) & (share > SIZES[-1] / 2) | (peaks == 0)
            return np.clip(np.where(kept, old, new), -BIAS, BIAS)

        def new_scales(start: int, stop: int) -> Array:
            return (exponents(start, stop, self._grouped(weight, start, stop)) + BIAS).astype(np.uint8)

        def new_blocks(start: int, stop: int) -> Array:
            values = self._grouped(weight, start, stop)
            shares = np.ldexp(values, -exponents(start, stop, values)[..., np.newaxis])
            codes = np.searchsorted(BOUNDS, np.abs(shares)).astype(np.uint8) | np.signbit(shares).view(np.uint8) << 3
            return codes[..., 0::2] | codes[..., 1::2] << 4

        parts = {
            self.name + BLOCKS: LazyTensor(blocks.dtype, blocks.shape, new_blocks),
            self.name + SCALES: LazyTensor(scales.dtype, scales.shape, new_scales),
        }
        return replace(self, parts={**self.parts, **parts})

    def _exponents(self, start: int, stop: int) -> Array:
        return self.parts[self.name + SCALES].rows(start, stop).astype(np.int32) - BIAS

    def _grouped(self, weight: LazyTensor, start: int, stop: int) -> Array:
        rows = weight.rows(start, stop).astype(np.float32).swapaxes(1, 2)
        return np.ascontiguousarray(rows).reshape(stop - start, self.shape[2], -1, BLOCK)


def open_mxfp4(checkpoint: Checkpoint) -> Mapping[str, Mxfp4Experts]:
    """The quantized experts of a checkpoint; raises MalformedInput for missing, unexpected or mismatched parts."""
    weights = {}
    for blocks in (name for name in checkpoint if name.endswith(BLOCKS)):
        name = blocks.removesuffix(BLOCKS)
        codes, scales = checkpoint[blocks], part(checkpoint, name + SCALES, blocks)
        if len(codes.shape) != 4 or 0 in codes.shape:
            refuse(blocks, f"has shape {list(codes.shape)}, not that of experts")
        require(codes, blocks, (*codes.shape[:3], BLOCK // 2), ("uint8",))
        require(scales, name + SCALES, codes.shape[:3], ("uint8",))
        shape = (codes.shape[0], codes.shape[2] * BLOCK, codes.shape[1])
        weights[name] = Mxfp4Experts(name, {blocks: codes, name + SCALES: scales}, shape)
    refuse_strays(checkpoint, SCALES, weights)
    return weights


METHOD = QuantizationMethod("mxfp4", open_mxfp4)
