"""Folding: constants made of constants, by the reference implementation of ONNX, within bounds of work and memory."""

from __future__ import annotations

from math import prod

import numpy as np
import onnx

from llmconv.tensors import Array
from llmconv.verify.audit.decisions.operators import attribute

FOLDED = 1 << 22
"""Elements of constants that are computed with, and of what is made of them."""

DIMENSIONS = 8
"""Axes of a constant that is computed with."""

ELEMENTWISE = frozenset(
    [
        "Abs",
        "Add",
        "And",
        "Cast",
        "Ceil",
        "Cos",
        "Div",
        "Equal",
        "Erf",
        "Exp",
        "Floor",
        "Greater",
        "GreaterOrEqual",
        "Identity",
        "IsInf",
        "IsNaN",
        "Less",
        "LessOrEqual",
        "Log",
        "Max",
        "Min",
        "Mod",
        "Mul",
        "Neg",
        "Not",
        "Or",
        "Pow",
        "Reciprocal",
        "Relu",
        "Round",
        "Sigmoid",
        "Sign",
        "Sin",
        "Softplus",
        "Sqrt",
        "Sub",
        "Sum",
        "Tanh",
        "Where",
        "Xor",
    ]
)
"""Operators whose result has the shape that their inputs are broadcast to."""

SHRINKING = frozenset(
    [
        "ArgMax",
        "ArgMin",
        "CumSum",
        "Flatten",
        "Range",
        "ReduceMax",
        "ReduceMean",
        "ReduceMin",
        "ReduceSum",
        "Reshape",
        "Shape",
        "Size",
        "Slice",
        "Split",
        "Squeeze",
        "Transpose",
        "Trilu",
        "Unsqueeze",
        "ScatterElements",
        "ScatterND",
        "Concat",
    ]
)
"""Operators whose result is no larger than their inputs together; Range is told apart."""


def fold(node: onnx.NodeProto, arrays: list[Array]) -> Array | None:
    """The node's first result on constants; None where it is not computed.

    Args:
        arrays: its inputs, those that are left out not among them.
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
    except Exception:  # a node that does not fit its inputs; onnxruntime will say so
        return None


def _size(node: onnx.NodeProto, arrays: list[Array]) -> int | None:  # noqa: C901 - a row for each operator
    """Elements of the result at most; None of an operator that is not computed."""
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
    """Of sizes, without overflow."""
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
