"""Graphs of llmconv as onnxruntime's own quantizers take them, and what those make of them."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
from onnxruntime.quantization import QuantFormat, QuantType, quantize_dynamic
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from onnxruntime.quantization.onnx_model import ONNXModel

logging.getLogger("onnxruntime.quantization.matmul_nbits_quantizer").setLevel(logging.WARNING)

Quantize = Callable[[Path, Path], Path]
"""Makes the second file of the first."""


def quantizable(path: Path, target: Path) -> Path:
    """A copy with its weights inside and `MatMul` for `Gemm`; a head that is the embedding gets a copy of it."""
    model = onnx.load(path)
    uses = Counter(name for node in model.graph.node for name in node.input)
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Gemm" and uses[node.input[1]] > 1:
            copy = model.graph.initializer.add()
            copy.CopyFrom(tensors[node.input[1]])
            node.input[1] = copy.name = f"{node.input[1]}.head"
    del model.graph.value_info[:]
    wrapped = ONNXModel(model)
    wrapped.replace_gemm_with_matmul()
    onnx.save(wrapped.model, target)
    return target


def save_tokenizer(folder: Path) -> None:
    """Sixteen words."""
    words = {f"t{token}": token for token in range(16)}
    kinds = ("truncation", "padding", "normalizer", "post_processor", "decoder")
    content: dict[str, object] = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "t0"},
        **dict.fromkeys(kinds),
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def nbits(**options: Any) -> Quantize:
    """`MatMulNBitsQuantizer` in blocks of 32."""

    def make(path: Path, target: Path) -> Path:
        quantizer = MatMulNBitsQuantizer(onnx.load(path), block_size=32, **options)
        quantizer.process()
        quantizer.model.save_model_to_file(str(target))
        return target

    return make


def dynamic(**options: Any) -> Quantize:
    """`quantize_dynamic`, of products and lookups."""

    def make(path: Path, target: Path) -> Path:
        extra = {"DefaultTensorType": onnx.TensorProto.FLOAT}
        quantize_dynamic(path, target, op_types_to_quantize=["MatMul", "Gather"], extra_options=extra, **options)
        return target

    return make


QUANTIZERS: dict[str, Quantize] = {
    "4 bits": nbits(bits=4, is_symmetric=True),
    "4 bits with zero points": nbits(bits=4, is_symmetric=False),
    "8 bits": nbits(bits=8, is_symmetric=True),
    "8 bits with zero points": nbits(bits=8, is_symmetric=False),
    "4 bits, QDQ": nbits(bits=4, is_symmetric=False, quant_format=QuantFormat.QDQ),
    "4 bits, accuracy level 4": nbits(bits=4, is_symmetric=False, accuracy_level=4),
    "4 bits, the embedding too": nbits(bits=4, is_symmetric=False, op_types_to_quantize=("MatMul", "Gather")),
    "dynamic int8": dynamic(weight_type=QuantType.QInt8),
    "dynamic uint8 per channel": dynamic(weight_type=QuantType.QUInt8, per_channel=True),
}
