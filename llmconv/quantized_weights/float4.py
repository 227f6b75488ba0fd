"""Float4Weight: pairs of 4-bit floats (e2m1) with a scale per group of columns, as compressed-tensors stores them.

ModelOpt has other names, and a global scale that is multiplied (`methods/modelopt.py`).

Layout (`compressed_tensors/compressors/nvfp4`, `mxfp4`): `X.weight_packed` uint8 out×(in/2), the first of two codes in
the low half, with `X.weight_scale` out×(in/size): float8_e4m3fn, divided by `X.weight_global_scale` float32 [1]
(NVFP4), or exponents of two, biased by 127 (MXFP4; by 125 up to 0.13.0, `exponent_bias`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from llmconv.quantized_weights.packed_weight import EXPONENTS, PackedWeight, finite, part, refuse, require
from llmconv.tensors import Array, LazyTensor

PACKED, SCALE, GLOBAL = ".weight_packed", ".weight_scale", ".weight_global_scale"
NV, MX = "nvfp4-pack-quantized", "mxfp4-pack-quantized"
GROUPS = {NV: 16, MX: 32}
# the values of the codes without their sign bit (E2M1, OCP Microscaling)
SIZES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
BOUNDS = (SIZES[:-1] + SIZES[1:]) / 2
TABLE = np.concatenate([SIZES, -SIZES])
BIAS = 127  # of exponents
LAST_OLD_BIAS = (0, 13, 0)  # the last release of compressed-tensors that stored exponents of MXFP4 2 too small
ROUNDED_UP = np.float32(1 + 1e-6)  # by which a scale that is computed of its own values may be too large
E4M3 = np.arange(0x7F, dtype=np.uint8)  # the codes of the numbers from 0 to 448


@dataclass(frozen=True, eq=False)
class Float4Weight(PackedWeight):
    """value = code · scale of its group."""

    stem: str
    size: int  # columns of a group
    ends: tuple[str, str, str] = (PACKED, SCALE, GLOBAL)  # of the names of codes, scales and what all scales share
    multiplied: bool = False  # scales are multiplied by what they share (ModelOpt), not divided
    bias: int = BIAS  # of exponents

    @cached_property
    def whole(self) -> np.float32:
        """What all scales are divided by, or multiplied with."""
        name = self.stem + self.ends[2]
        if name not in self.parts:
            return np.float32(1)
        found = np.float32(finite(self.parts[name].read(), name).reshape(-1)[0])
        if found <= 0:
            refuse(name, f"is {found}, and scales are {'multiplied' if self.multiplied else 'divided'} by it")
        return found

    def scales(self, start: int, stop: int) -> Array:
        """Scales of rows, float32 [rows, groups], finite."""
        name = self.stem + self.ends[1]
        stored = self.parts[name].rows(start, stop)
        if stored.dtype == np.uint8:
            return finite(np.ldexp(np.float32(1), stored.astype(np.int32) - self.bias), name)
        scales = finite(stored, name)
        found: Array = scales * self.whole if self.multiplied else scales / self.whole
        return found

    def codes(self, start: int, stop: int) -> Array:
        """uint8 [rows, columns]."""
        pairs = self.parts[self.stem + self.ends[0]].rows(start, stop).view(np.uint8)
        return np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(stop - start, -1)

    def values(self, start: int, stop: int) -> Array:
        """See `PackedWeight`."""
        codes = self.codes(start, stop).reshape(stop - start, -1, self.size)
        found: Array = (TABLE[codes] * self.scales(start, stop)[..., None]).reshape(stop - start, -1)
        return found

    def requantized(self, weight: LazyTensor) -> Self:
        """See `PackedWeight`. A group keeps its scale where its largest value fits and uses half of the range."""
        of_codes, of_scales = (self.stem + end for end in self.ends[:2])
        packed, scale = self.parts[of_codes], self.parts[of_scales]

        def grouped(start: int, stop: int) -> Array:
            return weight.rows(start, stop).astype(np.float32).reshape(stop - start, -1, self.size)

        def chosen(start: int, stop: int, values: Array) -> Array:
            peaks, old = np.abs(values).max(axis=-1), self.scales(start, stop)
            wanted = peaks / SIZES[-1]
            kept = (wanted <= old * ROUNDED_UP) & (wanted > old / 2) | (peaks == 0)
            return np.where(kept, scale.rows(start, stop), self._stored(wanted).view(scale.dtype.numpy))

        def new_packed(start: int, stop: int) -> Array:
            values = grouped(start, stop)
            trial = replace(self, parts={**self.parts, of_scales: _given(scale, chosen(start, stop, values))})
            scales = trial.scales(0, stop - start)[..., None]
            shares = np.divide(values, scales, out=np.zeros_like(values), where=scales != 0)
            codes = np.searchsorted(BOUNDS, np.abs(shares)).astype(np.uint8) | np.signbit(shares).view(np.uint8) << 3
            flat = codes.reshape(stop - start, -1)
            made: Array = flat[:, 0::2] | flat[:, 1::2] << 4
            return made.view(packed.dtype.numpy)

        parts = {
            of_codes: LazyTensor(packed.dtype, packed.shape, new_packed),
            of_scales: LazyTensor(
                scale.dtype, scale.shape, lambda start, stop: chosen(start, stop, grouped(start, stop))
            ),
        }
        return replace(self, parts={**self.parts, **parts})

    def _stored(self, scales: Array) -> Array:
        """The least scale in the file's form that is no smaller, or the largest; bytes."""
        scale = self.parts[self.stem + self.ends[1]]
        if scale.dtype.name in EXPONENTS:
            exponents = np.ceil(np.log2(np.maximum(scales, np.finfo(np.float32).tiny))) + self.bias
            fitting: Array = np.clip(exponents, 0, 254)
            return fitting.astype(np.uint8)
        steps = E4M3.view(scale.dtype.numpy).astype(np.float32)
        wanted = (scales / self.whole if self.multiplied else scales * self.whole) / ROUNDED_UP
        places: Array = np.clip(np.searchsorted(steps, wanted), 1, len(steps) - 1)
        return places.astype(np.uint8)


def _given(tensor: LazyTensor, rows: Array) -> LazyTensor:
    return LazyTensor(tensor.dtype, rows.shape, lambda start, stop: rows[start:stop])


def exponent_bias(settings: Mapping[str, Any]) -> int:
    """The bias of MXFP4's exponents under a `quantization_config` of compressed-tensors.

    Releases up to 0.13.0 subtracted 2 from exponents that were right already (`MXFP4PackedCompressor.compress_scale`;
    vllm-project/compressed-tensors 538). Other programs in whose settings that release is found name themselves.
    """
    release = re.match(r"(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?", str(settings.get("version") or ""))
    if not release or settings.get("provider"):
        return BIAS
    return BIAS - 2 if tuple(int(number or 0) for number in release.groups()) <= LAST_OLD_BIAS else BIAS


def has_small_exponents(settings: Any) -> bool:
    """Whether a `quantization_config` is of MXFP4 with such exponents, which transformers and vLLM read as they are."""
    return isinstance(settings, Mapping) and MX in str(settings) and exponent_bias(settings) != BIAS


def open_float4(
    tensors: Mapping[str, LazyTensor], stem: str, kind: str, size: int | None, bias: int = BIAS
) -> Float4Weight:
    """The weight of the module `stem` in the format `kind`; MalformedInput for missing or mismatched parts."""
    packed, scale = tensors[stem + PACKED], part(tensors, stem + SCALE, stem + PACKED)
    if len(packed.shape) != 2 or 0 in packed.shape:
        refuse(stem + PACKED, f"has shape {list(packed.shape)}, which is not a matrix")
    shape = packed.shape[0], packed.shape[1] * 2
    if size != GROUPS[kind] or shape[1] % size:
        refuse(stem + PACKED, f"has {shape[1]} columns in groups of {size}, and `{kind}` has groups of {GROUPS[kind]}")
    require(packed, stem + PACKED, packed.shape, ("uint8",))
    of_scales = ("float8_e4m3fn",) if kind == NV else ("uint8",)
    require(scale, stem + SCALE, (shape[0], shape[1] // size), of_scales)
    parts = {stem + PACKED: packed, stem + SCALE: scale}
    if kind == NV:
        whole = require(part(tensors, stem + GLOBAL, stem + PACKED), stem + GLOBAL, (1,), ("float32",))
        parts[stem + GLOBAL] = whole
    return Float4Weight(f"{stem}.weight", parts, shape, stem, size, bias=bias)
