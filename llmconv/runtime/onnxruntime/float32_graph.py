"""Rewrites a half-precision graph in memory so that it computes in float32, with the same weights.

onnxruntime's CPU provider has almost no bfloat16 kernels, and `verify` compares half-precision graphs in float32, too.
Weights in external files stay as stored; a Cast follows each, which onnxruntime folds when it opens the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from llmconv.runtime.onnxruntime.guard import graphs, is_external
from llmconv.tensors import Array

HALF_PRECISION: Mapping[str, int] = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}

EXACT = "llmconv.exact"
"""Metadata of a half-precision constant: the number of which it is the rounding."""

TYPE_ATTRIBUTES = {"to", "dtype", "stash_type", "output_dtype", "softmax_precision"}
"""Attributes that contain an element type."""


def exact_number(tensor: onnx.TensorProto) -> Array | None:
    """The recorded number behind a half-precision scalar; None without one, or if the scalar is not its rounding."""
    stored: Array = numpy_helper.to_array(tensor)
    for entry in tensor.metadata_props:
        if entry.key == EXACT and stored.size == 1:
            number = np.full(stored.shape, _number(entry.value), np.float32)
            return number if np.array_equal(number.astype(stored.dtype), stored) else None
    return None


def _number(text: str) -> float:
    """NaN, which equals no constant, for a text that is not a number in the range of float32."""
    try:
        number = float(text)
    except ValueError:
        return float("nan")
    return number if abs(number) <= np.finfo(np.float32).max else float("nan")


def half_precision(model: onnx.ModelProto) -> str:
    """The half-precision dtype of a graph's inputs and outputs, `float16` or `bfloat16`; empty if they have none."""
    kinds = {port.type.tensor_type.elem_type for port in (*model.graph.input, *model.graph.output)}
    return next((name for name, kind in HALF_PRECISION.items() if kind in kinds), "")


def compute_in_float32(
    model: onnx.ModelProto, half: int, constant: Callable[[onnx.TensorProto], Array] = numpy_helper.to_array
) -> None:
    """Replaces the half-precision element type `half` by float32, in place; another half-precision type stays.

    External weights may be left out. `constant` gives the values of an inline tensor of that type.
    """
    for graph in graphs(model.graph):
        del graph.value_info[:]
        for info in [*graph.input, *graph.output]:
            kind = info.type.tensor_type
            kind.elem_type = TensorProto.FLOAT if kind.elem_type == half else kind.elem_type
        _widen_weights(graph, half)
        for tensor in graph.initializer:
            _widen_tensor(tensor, half, constant)
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.INT and attribute.name in TYPE_ATTRIBUTES:
                    attribute.i = TensorProto.FLOAT if attribute.i == half else attribute.i
                elif attribute.type == onnx.AttributeProto.TENSOR:
                    _widen_tensor(attribute.t, half, constant)


def _widen_tensor(tensor: onnx.TensorProto, half: int, constant: Callable[[onnx.TensorProto], Array]) -> None:
    if tensor.data_type == half and not is_external(tensor):
        values = constant(tensor).astype("float32")
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


def _widen_weights(graph: onnx.GraphProto, half: int) -> None:
    """Adds a Cast after every external weight."""
    weights = [tensor for tensor in graph.initializer if tensor.data_type == half and is_external(tensor)]
    casts = []
    for tensor in weights:
        name, tensor.name = tensor.name, f"{tensor.name}:stored"
        casts.append(helper.make_node("Cast", [tensor.name], [name], name=f"{name}:wide", to=TensorProto.FLOAT))
    if casts:
        nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in (*casts, *graph.node)]
        del graph.node[:]
        graph.node.extend(nodes)
