"""MLX's affine codes, as mlx-lm's `convert -q` and `fuse` write them: value = code · scale + bias of its group.

Layout (mlx `mlx/ops.cpp`, `affine_quantize`; mlx-lm `utils.py`, `quantize_model`): `X.weight` uint32
out×(in·bits/32), a stream of bits with the first code in the lowest; `X.scales` and `X.biases` out×(in/group), in the
type of the plain weight. The config's `quantization` has `bits` and `group_size`, and those of single modules by path.
MLX's products compute a value in float32, as here; its `dequantize` rounds product and sum to the type of the scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from llmconv.checkpoint import STACKED_BY_MLX, Checkpoint
from llmconv.errors import UnsupportedInput, short
from llmconv.quantized_weights.packed_weight import (
    IntegerCodes,
    PackedWeight,
    bounded,
    finite,
    part,
    refuse,
    refuse_strays,
    require,
    tiled,
)
from llmconv.quantized_weights.quantized_checkpoint import FIELD, QuantizationMethod
from llmconv.tensors import Array, LazyTensor

WEIGHT, SCALES, BIASES = ".weight", ".scales", ".biases"
WIDTHS = (2, 3, 4, 5, 6, 8)
FLOATS = ("float16", "bfloat16", "float32")
SAME_WEIGHTS = (  # model types whose weights mlx-lm stores under the names and with the values of transformers
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "olmo2", "olmo3"),
    *("stablelm", "starcoder2", "granite", "cohere", "cohere2", "smollm3", "internlm2", "glm4", "exaone4"),
    *("ernie4_5", "gpt_bigcode", "helium", "hunyuan_v1_dense", "nemotron", "seed_oss"),
)
FLOATS_AGAIN = "take the model it was quantized from, or write it in floats with `mlx_lm.convert --dequantize`"


@dataclass(frozen=True, eq=False)
class AffineWeight(PackedWeight):
    """A matrix with codes of `bits` bits; the groups of a row have the same size."""

    bits: int
    stem: str  # the name without `.weight`

    def values(self, start: int, stop: int) -> Array:
        """See `PackedWeight`."""
        scales, biases = self._part(SCALES, start, stop), self._part(BIASES, start, stop)
        values = self._codes(start, stop).astype(np.float32).reshape(*scales.shape, -1)
        values *= scales[:, :, None]
        values += biases[:, :, None]
        return values.reshape(stop - start, -1)

    @property
    def integers(self) -> IntegerCodes:
        """See `PackedWeight`. Codes count from their middle, so that what is added to a product is small."""
        stored = 4 if self.bits <= 4 else 8
        more, middle = (1 << stored - 1) - (1 << self.bits - 1), 1 << self.bits - 1

        def offsets() -> Array:
            whole = self.shape[0]
            return self._part(BIASES, 0, whole) + np.float32(middle) * self._part(SCALES, 0, whole)

        return IntegerCodes(
            self.shape,
            stored,
            np.arange(self.shape[1]) // self._group,
            lambda start, stop: self._codes(start, stop) + np.uint8(more),
            lambda start, stop: bounded(self._part(SCALES, start, stop), 1 << self.bits, self.name),
            None,
            self.parts[self.stem + SCALES].dtype,
            offsets=offsets,
        )

    def requantized(self, weight: LazyTensor) -> Self:
        """See `PackedWeight`; scales and biases stay, so values change by whole steps."""
        words = self.parts[self.name]

        def load(start: int, stop: int) -> Array:
            scales, biases = (np.repeat(self._part(end, start, stop), self._group, 1) for end in (SCALES, BIASES))
            rows = weight.rows(start, stop).astype(np.float32) - biases
            steps = np.divide(rows, scales, out=np.zeros_like(rows), where=scales != 0)
            codes = np.clip(np.rint(steps), 0, (1 << self.bits) - 1).astype(np.uint8)
            digits = np.unpackbits(codes[..., None], axis=2, count=self.bits, bitorder="little")
            packed = np.packbits(digits.reshape(stop - start, -1), axis=1, bitorder="little")
            return packed.view("<u4")

        new = tiled(LazyTensor(words.dtype, words.shape, load), self.shape[1])
        return replace(self, parts={**self.parts, self.name: new})

    @property
    def _group(self) -> int:
        return self.shape[1] // self.parts[self.stem + SCALES].shape[1]

    def _codes(self, start: int, stop: int) -> Array:
        raw = np.ascontiguousarray(self.parts[self.name].rows(start, stop)).view(np.uint8)
        if self.bits == 8:
            return raw
        if 8 % self.bits == 0:
            shifts = np.arange(0, 8, self.bits, dtype=np.uint8)
            return (raw[:, :, None] >> shifts & np.uint8((1 << self.bits) - 1)).reshape(len(raw), -1)
        digits = np.unpackbits(raw, axis=1, bitorder="little").reshape(len(raw), -1, self.bits)
        return np.packbits(digits, axis=2, bitorder="little")[..., 0]

    def _part(self, end: str, start: int, stop: int) -> Array:
        return finite(self.parts[self.stem + end].rows(start, stop), self.stem + end)


def open_mlx(checkpoint: Checkpoint) -> Mapping[str, AffineWeight]:
    """The quantized matrices; UnsupportedInput: another mode or family; MalformedInput: parts that do not fit."""
    config, kind = checkpoint.config[FIELD], checkpoint.config.get("model_type")
    if kind not in (*SAME_WEIGHTS, *STACKED_BY_MLX):
        raise UnsupportedInput(
            f"the model is a {short(kind)} with codes of `mlx`, which may store this family in a form of its own",
            hint=f"take the model it was quantized from; supported are {', '.join((*SAME_WEIGHTS, *STACKED_BY_MLX))}",
        )
    found = [name.removesuffix(SCALES) for name in checkpoint if name.endswith(SCALES)]
    weights = {stem + WEIGHT: _open_matrix(checkpoint, stem, config) for stem in found}
    refuse_strays(checkpoint, (SCALES, BIASES), weights)
    return weights


def _open_matrix(checkpoint: Checkpoint, stem: str, config: Mapping[str, Any]) -> AffineWeight:
    given = config.get(stem)
    own = given if isinstance(given, Mapping) else config
    bits, group, mode = own.get("bits"), own.get("group_size"), own.get("mode", config.get("mode", "affine"))
    if mode != "affine" or type(bits) is not int or bits not in WIDTHS or type(group) is not int or group < 1:
        raise UnsupportedInput(
            f"`{stem}` has codes of `mlx` in the mode {short(mode, 20)!r}, of {short(bits, 20)} bits in groups of "
            f"{short(group, 20)}, which are not supported",
            hint=FLOATS_AGAIN,
        )
    name = stem + WEIGHT
    words, scales, biases = (part(checkpoint, stem + end, stem + SCALES) for end in (WEIGHT, SCALES, BIASES))
    if len(words.shape) != 2 or len(scales.shape) != 2 or 0 in words.shape or 0 in scales.shape:
        refuse(name, f"has shape {list(words.shape)} and scales of {list(scales.shape)}, which are not matrices")
    rows, inputs = scales.shape[0], scales.shape[1] * group
    if inputs * bits % 32:
        refuse(name, f"has rows of {inputs} codes of {bits} bits, which fill no whole words")
    require(words, name, (rows, inputs * bits // 32), ("uint32",))
    require(scales, stem + SCALES, scales.shape, FLOATS)
    require(biases, stem + BIASES, scales.shape, (scales.dtype.name,))
    parts = {name: words, stem + SCALES: scales, stem + BIASES: biases}
    return AffineWeight(name, parts, (rows, inputs), bits, stem)


METHOD = QuantizationMethod("mlx", open_mlx)
