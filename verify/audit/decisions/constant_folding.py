"""Constant folding with the reference implementation of ONNX, within limits of work and memory."""

from __future__ import annotations

from math import prod

import numpy as np
import onnx

from llmconv.tensors import Array
from llmconv.verify.audit.decisions.operators import attribute

FOLDED = 1 << 22
"""Maximum number of elements of the inputs, and of the result."""

DIMENSIONS = 8
"""Maximum number of axes of an input."""

ELEMENTWISE = frozenset([
    "Abs", "Add", "And", "Cast", "Ceil", "Cos", "Div", "Equal", "Erf", "Exp", "Floor", "Greater", "GreaterOrEqual",
    "Identity", "IsInf", "IsNaN", "Less", "LessOrEqual", "Log", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or",
    "Pow", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sin", "Softplus", "Sqrt", "Sub", "Sum", "Tanh",
    "Where", "Xor",
])  # fmt: skip
"""Operators whose result has the broadcast shape of their inputs."""

SHRINKING = frozenset([
    "ArgMax", "ArgMin", "CumSum", "Flatten", "Range", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum",
    "Reshape", "Shape", "Size", "Slice", "Split", "Squeeze", "Transpose", "Trilu", "Unsqueeze", "ScatterElements",
    "ScatterND", "Concat",
])  # fmt: skip
"""Operators whose result is not larger than their inputs together; Range is handled separately."""


def fold(node: onnx.NodeProto, arrays: list[Array]) -> Array | None:
    """The first output of a node with constant inputs; None if it is not computed.

    Args:
        node: the node.
        arrays: its inputs, without omitted ones.
    """
    if node.domain not in ("", "ai.onnx"):
        return None
    if sum(array.size for array in arrays) > FOLDED or any(array.ndim > DIMENSIONS for array in arrays):
        return None
    try:
        size = _size(node, arrays)
        if size is None or size > FOLDED:
            return None
        with np.errstate(all="ignore"):
            return _evaluated(node, arrays)
    except Exception:  # invalid inputs; onnxruntime reports them
        return None


def _size(node: onnx.NodeProto, arrays: list[Array]) -> int | None:  # noqa: C901 - a row for each operator
    """Upper limit of the elements of the result; None for an operator that is not computed."""
    op = node.op_type
    if any(array.dtype.kind not in "fiub" for array in arrays):
        return None
    if op in ELEMENTWISE:
        return prod(np.broadcast_shapes(*(array.shape for array in arrays)))
    if op == "Range":
        start, stop, step = (float(array.reshape(())) for array in arrays)
        return max(0, int((stop - start) / step) + 1)
    if op in SHRINKING:
        return sum(array.size for array in arrays)
    if op == "ConstantOfShape":
        return _product(arrays[0])
    if op == "Expand":
        return prod(np.broadcast_shapes(arrays[0].shape, tuple(arrays[1].tolist())))
    if op == "Tile":
        return arrays[0].size * _product(arrays[1])
    if op == "Gather":
        axis = attribute(node, "axis", 0)
        return int(arrays[1].size * (arrays[0].size // max(1, arrays[0].shape[axis])))
    if op == "GatherElements":
        return arrays[1].size
    if op == "GatherND" and not attribute(node, "batch_dims", 0):
        depth = arrays[1].shape[-1]
        return prod(arrays[1].shape[:-1]) * prod(arrays[0].shape[depth:])
    return None


def _product(sizes: Array) -> int:
    """Product of sizes, without overflow."""
    if sizes.size > DIMENSIONS:
        raise ValueError(f"{sizes.size} axes")
    return prod(int(size) for size in sizes.ravel())


def _evaluated(node: onnx.NodeProto, arrays: list[Array]) -> Array:
    from onnx.reference import ReferenceEvaluator  # noqa: PLC0415 - not needed by most graphs

    feeds = dict(zip([name for name in node.input if name], arrays, strict=True))
    ports = [
        onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feeds.items()
    ]
    graph = onnx.helper.make_graph([node], "constant", ports, [onnx.ValueInfoProto(name=node.output[0])])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)])
    found = ReferenceEvaluator(model).run([node.output[0]], feeds)
    return np.asarray(list(found)[0])
