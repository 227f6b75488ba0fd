"""Operators that onnxruntime must pack the weights of."""

from __future__ import annotations

import onnx

from llmconv.runtime.onnxruntime.guard import nodes

PACKED_ONLY = {"MatMulNBits", "QMoE", "DynamicQuantizeMatMul", "QuantizeLinear"}
"""Operators that dequantize the whole matrix at every call unless onnxruntime packs it when the graph is opened."""


def is_packed(model: onnx.ModelProto) -> bool:
    """Whether sessions of a graph pack its weights, whatever the settings are."""
    return bool(PACKED_ONLY & {node.op_type for node in nodes(model)})
