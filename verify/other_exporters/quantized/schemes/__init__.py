"""How graphs store quantized weights: one file per scheme in this folder, found by listing it."""

from __future__ import annotations

from functools import cache

import onnx

from llmconv.errors import UnsupportedInput
from llmconv.plugins import plugins
from llmconv.runtime.onnxruntime.guard import nodes
from llmconv.verify.other_exporters.quantized.constants import Constants
from llmconv.verify.other_exporters.quantized.quantized_matrix import QuantizationScheme, QuantizedMatrix

UNSUPPORTED = {"MatMulBnb4", "QMoE", "MoE", "QLinearMatMul", "QGemm", "QAttention", "ConvInteger", "QLinearConv"}
"""Operators with quantized weights in layouts that are not supported."""


@cache
def schemes() -> dict[str, QuantizationScheme]:
    """The schemes of this folder by operator."""
    found = plugins(__name__, "SCHEME", QuantizationScheme).values()
    return {operator: scheme for scheme in found for operator in scheme.operators}


def quantized_operators(model: onnx.ModelProto) -> list[str]:
    """Operators of a graph with quantized weights, each once."""
    found = dict.fromkeys(node.op_type for node in nodes(model))
    return [name for name in found if name in schemes() or name in UNSUPPORTED]


def quantized_matrices(model: onnx.ModelProto, constants: Constants) -> list[QuantizedMatrix]:
    """Every quantized matrix of a graph, each once; UnsupportedInput if its format is not supported."""
    found: dict[str, QuantizedMatrix] = {}
    for node in nodes(model):
        if node.op_type in UNSUPPORTED:
            raise UnsupportedInput(
                f"`{node.op_type}` stores its weights in an unsupported format",
                hint="verify the graph without quantization",
            )
        stored = schemes()[node.op_type].matrix(node, constants) if node.op_type in schemes() else None
        if stored:
            found[f"{stored.name} {stored.looked_up}"] = stored
    return list(found.values())
