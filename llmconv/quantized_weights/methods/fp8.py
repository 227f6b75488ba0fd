"""Fine-grained FP8, as DeepSeek and Qwen publish: float8 with a scale per block, or one per tensor.

Layout: `transformers/integrations/finegrained_fp8.py` (`Fp8Dequantize`): `X.weight` and `X.weight_scale_inv`, by which
the code is multiplied; blocks of `weight_block_size` (rows, columns), those at the edges partial (DeepSeek-V3
`inference/kernel.py`, `weight_dequant`).
"""

from __future__ import annotations

from collections.abc import Mapping

from llmconv.checkpoint import Checkpoint
from llmconv.quantized_weights.packed_weight import ScaledWeight, block_size, open_scaled, refuse
from llmconv.quantized_weights.quantized_checkpoint import QuantizationMethod

SCALES = ("_scale_inv", "_scale")
ACTIVATIONS = ("activation_scale", "input_scale", "k_scale", "v_scale", "q_scale", "output_scale")


def open_fp8(checkpoint: Checkpoint) -> Mapping[str, ScaledWeight]:
    """The float8 tensors of a checkpoint; raises MalformedInput unless all scales fit them, one for one."""
    block = block_size(checkpoint.config["quantization_config"].get("weight_block_size"))
    weights: dict[str, ScaledWeight] = {}
    for name, tensor in checkpoint.items():
        if tensor.dtype.name in ("float8_e4m3fn", "float8_e5m2"):
            scales = next((name + end for end in SCALES if name + end in checkpoint), name + SCALES[0])
            weights[name] = open_scaled(checkpoint, name, scales, block)
    for name in checkpoint:
        if name.endswith((".weight_scale_inv", ".weight_scale")) and name.rpartition("_scale")[0] not in weights:
            refuse(name, "is a scale of no float8 weight")
    return weights


METHOD = QuantizationMethod("fp8", open_fp8, ACTIVATIONS)
