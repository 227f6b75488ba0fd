"""bitsandbytes: 4-bit codes (nf4, fp4) with a scale per block, or int8 with a scale per row (LLM.int8)."""

from __future__ import annotations

from collections.abc import Mapping

from llmconv.checkpoint import Checkpoint
from llmconv.quantized_weights.four_bit import STATE, open_four_bit
from llmconv.quantized_weights.int8_rows import open_int8
from llmconv.quantized_weights.methods import QuantizationMethod
from llmconv.quantized_weights.packed_weight import PackedWeight, refuse

PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".SCB", ".weight_format")


def open_bitsandbytes(checkpoint: Checkpoint) -> Mapping[str, PackedWeight]:
    """The quantized weights of a checkpoint that `save_pretrained` wrote.

    Raises:
        MalformedInput: missing, unexpected or mismatched parts.
        UnsupportedInput: int8 in the order of a GPU kernel.
    """
    weights: dict[str, PackedWeight] = {}
    for name, tensor in checkpoint.items():
        if STATE in name:
            weight = name[: name.index(STATE)]
            weights[weight] = open_four_bit(checkpoint, weight, name)
        elif tensor.dtype.name == "int8" and name.endswith(".weight"):
            weights[name] = open_int8(checkpoint, name)
    known = {part for weight in weights.values() for part in weight.parts}
    for name in checkpoint:
        if name.endswith(PARTS) and name not in known:
            refuse(name, "does not belong to a quantized weight")
    return weights


METHOD = QuantizationMethod("bitsandbytes", open_bitsandbytes)
