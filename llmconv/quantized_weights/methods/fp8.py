"""Fine-grained FP8, as DeepSeek and Qwen publish: float8 with a scale per block, or one per tensor.

Layout: `transformers/integrations/finegrained_fp8.py` (`Fp8Dequantize`): `X.weight` and `X.weight_scale_inv`, by which
the code is multiplied; blocks of `weight_block_size` (rows, columns), those at the edges partial (DeepSeek-V3
`inference/kernel.py`, `weight_dequant`). Scales may be exponents of two (`scale_fmt`), and have other names
(`quantizer_finegrained_fp8.py`: DeepSeek-V4's `X.scale`, Mistral's `X.qscale_weight`). Experts of FP4 (`expert_dtype`)
are int8 of out×(in/2), the first of two e2m1 codes in the low half, with a scale per 32 columns.
"""

from __future__ import annotations

from collections.abc import Mapping

from llmconv.checkpoint import Checkpoint
from llmconv.quantized_weights.float4 import GROUPS, MX, Float4Weight
from llmconv.quantized_weights.packed_weight import PackedWeight, block_size, open_scaled, part, refuse, require
from llmconv.quantized_weights.quantized_checkpoint import QuantizationMethod
from llmconv.tensors import LazyTensor

WEIGHT = ".weight"
SCALES = ("_scale_inv", "_scale", ".scale", ".qscale_weight")  # after the weight's name, or with a dot the module's
ACTIVATIONS = ("activation_scale", "input_scale", "k_scale", "v_scale", "q_scale", "output_scale", "qscale_act")
BLOCKS = {"fp8": (128, 128), "mxfp8": (1, GROUPS[MX])}  # where the settings have no `weight_block_size`


def open_fp8(checkpoint: Checkpoint) -> Mapping[str, PackedWeight]:
    """The float8 and FP4 tensors of a checkpoint; raises MalformedInput unless all scales fit them, one for one."""
    settings = checkpoint.config["quantization_config"]
    block = block_size(settings.get("weight_block_size", BLOCKS.get(settings.get("quant_method"))))
    weights: dict[str, PackedWeight] = {}
    for name, tensor in checkpoint.items():
        if tensor.dtype.name in ("float8_e4m3fn", "float8_e5m2"):
            weights[name] = open_scaled(checkpoint, name, _scales_of(name, checkpoint), block)
        elif tensor.dtype.name == "int8" and name.endswith(WEIGHT):
            weights[name] = _open_pairs(checkpoint, name)
    known = {part for weight in weights.values() for part in weight.parts}
    for name in checkpoint:
        if name.endswith((".weight_scale_inv", ".weight_scale", ".qscale_weight")) and name not in known:
            refuse(name, "is a scale of no float8 weight")
    return weights


def _scales_of(name: str, tensors: Mapping[str, LazyTensor]) -> str:
    stem = name.removesuffix(WEIGHT)
    names = [(stem if end.startswith(".") else name) + end for end in SCALES]
    return next((one for one in names if one in tensors), names[0])


def _open_pairs(tensors: Mapping[str, LazyTensor], name: str) -> Float4Weight:
    scales, stem, size = _scales_of(name, tensors), name.removesuffix(WEIGHT), GROUPS[MX]
    codes, grid = tensors[name], part(tensors, scales, name)
    if len(codes.shape) != 2 or 0 in codes.shape or codes.shape[1] * 2 % size:
        refuse(name, f"is int8 of shape {list(codes.shape)}, which is no matrix of FP4 in groups of {size} columns")
    shape = codes.shape[0], codes.shape[1] * 2
    require(grid, scales, (shape[0], shape[1] // size), ("uint8", "float8_e8m0fnu"))
    return Float4Weight(name, {name: codes, scales: grid}, shape, stem, size, (WEIGHT, scales.removeprefix(stem), ""))


METHOD = QuantizationMethod("fp8", open_fp8, ACTIVATIONS)
