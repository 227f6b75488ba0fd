"""RMS norms as one `RMSNormalization` node each (opset 23) instead of six or seven.

    x * Reciprocal(Sqrt(ReduceMean(x ** 2) + epsilon)) * weight

In half precision models compute this in float32, as `stash_type` 1 does: with casts around the factors before the
weight, the node takes and returns half precision; with casts around all of it, the node computes in float32.
Source: onnx docs/Operators.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from llmconv.export.node_editor import NodeEditor, constant, number_of, producer, rank, remove_unused, replace_value
from llmconv.export.traced_graph import TracedGraph


def fuse_norms(traced: TracedGraph) -> None:
    """Rewrites every RMS norm of the graph in place, those without a weight last."""
    graph = traced.model.graph
    for find in (_weighted, _unweighted):
        norms = [norm for node in list(graph) if (norm := find(node)) is not None]
        for norm in norms:
            editor = NodeEditor(graph, norm.last, module_of=norm.last)
            weight = _ones(graph, norm.x) if norm.weight is None else norm.weight
            result = editor.one("RMSNormalization", [norm.x, weight], {"epsilon": norm.epsilon})
            replace_value(norm.last.outputs[0], result)
        remove_unused(traced.model)


@dataclass(frozen=True)
class _RmsNorm:
    """One RMS norm of `x`; the node `last` returns its result."""

    last: ir.Node
    x: ir.Value
    epsilon: float
    weight: ir.Value | None = None


def _weighted(last: ir.Node) -> _RmsNorm | None:
    """The norm that ends with a product with a weight, with the factors of its products in any order."""
    if last.op_type != "Mul":
        return None
    for at, factor in enumerate(last.inputs):
        weight = last.inputs[1 - at]
        found = _normalized(factor)
        if found is not None and weight is not None and _fits(weight, found.x):
            return _RmsNorm(last, found.x, found.epsilon, weight)
    return None


def _unweighted(last: ir.Node) -> _RmsNorm | None:
    """The norm that ends with a node, without a weight."""
    found = _normalized(last.outputs[0]) if last.op_type == "Mul" else None
    return found if found and isinstance(_width(found.x), int) else None


def _normalized(value: ir.Value | None) -> _RmsNorm | None:
    """`x * Reciprocal(Sqrt(ReduceMean(x ** 2) + epsilon))`, perhaps computed in float32 and cast back."""
    cast = producer(value, "Cast")
    product = producer(cast.inputs[0] if cast else value, "Mul")
    for at, x in enumerate(product.inputs if product else ()):
        assert product is not None
        epsilon = _epsilon(x, product.inputs[1 - at])
        if x is None or epsilon is None:
            continue
        if cast is None:
            return _RmsNorm(product, x, epsilon)
        widened = producer(x, "Cast")
        narrow = widened.inputs[0] if widened else None
        if narrow is not None and narrow.dtype is not None and narrow.dtype == cast.attributes.get_int("to"):
            return _RmsNorm(cast, narrow, epsilon)
    return None


def _epsilon(x: ir.Value | None, factor: ir.Value | None) -> float | None:
    """The epsilon of `factor`, the reciprocal root of the mean square of `x`; None if it is something else."""
    total = producer(_squared_reciprocal(factor), "Add")
    mean = producer(total.inputs[0], "ReduceMean") if total else None
    if total is None or mean is None or not _is_over_last_axis(mean, x):
        return None
    square = producer(mean.inputs[0])
    is_square = square is not None and (
        (square.op_type == "Pow" and square.inputs[0] is x and number_of(square.inputs[1]) == 2)
        or (square.op_type == "Mul" and square.inputs[0] is x and square.inputs[1] is x)
    )
    return number_of(total.inputs[1]) if is_square else None


def _squared_reciprocal(factor: ir.Value | None) -> ir.Value | None:
    """t, if `factor` is `Reciprocal(Sqrt(t))` or `t ** -0.5`."""
    power = producer(factor, "Pow")
    if power is not None:
        return power.inputs[0] if number_of(power.inputs[1]) == -0.5 else None
    reciprocal = producer(factor, "Reciprocal")
    root = producer(reciprocal.inputs[0], "Sqrt") if reciprocal else None
    return root.inputs[0] if root else None


def _is_over_last_axis(mean: ir.Node, x: ir.Value | None) -> bool:
    """Whether a `ReduceMean` keeps its axis, the last one of `x`."""
    axis = number_of(mean.inputs[1]) if len(mean.inputs) > 1 else None
    return x is not None and mean.attributes.get_int("keepdims", 1) == 1 and axis in (-1, rank(x) - 1)


def _fits(weight: ir.Value, x: ir.Value) -> bool:
    """Whether a value may be the scale of `x`: one factor per element of the last axis, of the same dtype."""
    return rank(weight) == 1 and _width(weight) == _width(x) is not None and weight.dtype == x.dtype


def _width(value: ir.Value) -> int | None:
    """Size of the last axis; None if it is not a number."""
    size = value.shape[-1] if value.shape is not None and rank(value) else None
    return size if isinstance(size, int) else None


def _ones(graph: ir.Graph, x: ir.Value) -> ir.Value:
    """The scale of a norm without a weight."""
    assert x.dtype is not None
    width, dtype = _width(x) or 0, x.dtype
    return constant(graph, f"{dtype.name.lower()}_ones_{width}", np.ones(width, dtype.numpy()))
