"""NVIDIA ModelOpt's FP8 and NVFP4, in folders of its `export_hf_checkpoint`.

Layout (`modelopt/torch/export/quant_utils.py`, `unified_export_hf.py`): `X.weight` float8_e4m3fn with `X.weight_scale`
float32 of one or of a row; or uint8 out×(in/2), the first of two e2m1 codes in the low half, with `X.weight_scale`
float8_e4m3fn out×(in/16) that is multiplied with `X.weight_scale_2` float32 (`qtensor/nvfp4_tensor.py`, `dequantize`).
`X.input_scale` and the scales of keys and values are of activations. `X.pre_quant_scale` (AWQ) divides a weight by
columns, and multiplies its input: such models are refused.

`quant_algo` names the format; with `MIXED_PRECISION` the parts of each weight do. The settings are in `config.json`, of
older releases in `hf_quant_config.json` alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from llmconv.checkpoint import Checkpoint
from llmconv.errors import UnsupportedInput
from llmconv.quantized_weights.float4 import Float4Weight
from llmconv.quantized_weights.methods.fp8 import ACTIVATIONS
from llmconv.quantized_weights.packed_weight import PackedWeight, open_scaled, part, refuse, require
from llmconv.quantized_weights.quantized_checkpoint import QuantizationMethod
from llmconv.tensors import LazyTensor

READ = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8", "MIXED_PRECISION")
CODES, SCALE, SHARED, BY_COLUMN = ".weight", ".weight_scale", ".weight_scale_2", ".pre_quant_scale"
GROUP = 16


def open_modelopt(checkpoint: Checkpoint) -> Mapping[str, PackedWeight]:
    """The quantized weights; MalformedInput for mismatched parts, UnsupportedInput for another format of ModelOpt."""
    algorithm = str(checkpoint.config["quantization_config"].get("quant_algo"))
    scaled = next((name for name in checkpoint if name.endswith(BY_COLUMN)), "")
    if algorithm not in READ or scaled:
        what = f"with inputs that are scaled by columns (`{scaled}`)" if scaled else f"as `{algorithm[:40]}`"
        raise UnsupportedInput(
            f"the model is quantized by ModelOpt {what}, which is not supported",
            hint=f"supported are {', '.join(READ)} without them; take the model it was quantized from",
        )
    weights: dict[str, PackedWeight] = {}
    for name, tensor in checkpoint.items():
        stem = name.removesuffix(CODES)
        if name.endswith(CODES) and tensor.dtype.name == "uint8":
            weights[name] = _open_float4(checkpoint, stem)
        elif name.endswith(CODES) and tensor.dtype.name == "float8_e4m3fn":
            weights[name] = open_scaled(checkpoint, name, stem + SCALE, None)
    for name in checkpoint:
        if name.endswith((SCALE, SHARED)) and f"{name.rpartition('.')[0]}{CODES}" not in weights:
            refuse(name, "is a scale of no quantized weight")
    return weights


def _open_float4(tensors: Mapping[str, LazyTensor], stem: str) -> Float4Weight:
    names = [stem + end for end in (CODES, SCALE, SHARED)]
    codes, scale, shared = (part(tensors, name, names[0]) for name in names)
    if len(codes.shape) != 2 or 0 in codes.shape or codes.shape[1] * 2 % GROUP:
        refuse(names[0], f"has shape {list(codes.shape)}, which is not a matrix in groups of {GROUP} columns")
    shape = codes.shape[0], codes.shape[1] * 2
    require(scale, names[1], (shape[0], shape[1] // GROUP), ("float8_e4m3fn",))
    require(shared, names[2], () if not shared.shape else (1,), ("float32",))
    parts = dict(zip(names, (codes, scale, shared), strict=True))
    return Float4Weight(names[0], parts, shape, stem, GROUP, (CODES, SCALE, SHARED), multiplied=True)


METHOD = QuantizationMethod("modelopt", open_modelopt, ACTIVATIONS)
