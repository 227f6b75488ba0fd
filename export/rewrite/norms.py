"""RMS norms as one `RMSNormalization` node each (opset 23), and linear layers as `Gemm(transB=1)` on the stored rows.

    x * Reciprocal(Sqrt(ReduceMean(x ** 2) + epsilon)) * weight

In half precision models compute this in float32, as `stash_type` 1 does: with casts around the factors before the
weight, the node takes and returns half precision; with casts around all of it, the node computes in float32 (onnx
docs/Operators.md). The exporter writes `MatMul(x, Transpose(W))`, and a runtime folds the transpose into a copy of
every weight. Gemm reads the stored rows; it takes matrices only, so `x` is flattened before and gets its shape back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from llmconv.export.traced_graph import (
    NodeEditor,
    TracedGraph,
    constant,
    integers,
    number_of,
    producer,
    rank,
    remove_unused,
    replace_value,
    static_shape,
)


def fuse_norms(traced: TracedGraph) -> None:
    """Rewrites every RMS norm of the graph in place, those without a weight last."""
    graph = traced.model.graph
    for find in (_weighted, _unweighted):
        norms = [norm for node in list(graph) if (norm := find(node)) is not None]
        for norm in norms:
            editor = NodeEditor(graph, norm.last, module_of=norm.last)
            weight = norm.weight
            if weight is None:
                assert norm.x.dtype is not None
                ones = np.ones(_width(norm.x) or 0, norm.x.dtype.numpy())
                weight = constant(graph, f"{norm.x.dtype.name.lower()}_ones_{len(ones)}", ones)
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
        if found is None or weight is None or rank(weight) != 1 or weight.dtype != found.x.dtype:
            continue
        if _width(weight) == _width(found.x) is not None:  # one factor per element of the last axis
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
    power, reciprocal = producer(factor, "Pow"), producer(factor, "Reciprocal")  # `t ** -0.5`, or 1 / its root
    root = producer(reciprocal.inputs[0], "Sqrt") if reciprocal else None
    if power is not None:
        root = power if number_of(power.inputs[1]) == -0.5 else None
    total = producer(root.inputs[0], "Add") if root else None
    mean = producer(total.inputs[0], "ReduceMean") if total else None
    if total is None or mean is None or not _is_over_last_axis(mean, x):
        return None
    square = producer(mean.inputs[0])
    is_square = square is not None and (
        (square.op_type == "Pow" and square.inputs[0] is x and number_of(square.inputs[1]) == 2)
        or (square.op_type == "Mul" and square.inputs[0] is x and square.inputs[1] is x)
    )
    return number_of(total.inputs[1]) if is_square else None


def _is_over_last_axis(mean: ir.Node, x: ir.Value | None) -> bool:
    """Whether a `ReduceMean` keeps its axis, the last one of `x`."""
    axis = number_of(mean.inputs[1]) if len(mean.inputs) > 1 else None
    return x is not None and mean.attributes.get_int("keepdims", 1) == 1 and axis in (-1, rank(x) - 1)


def _width(value: ir.Value) -> int | None:
    """Size of the last axis; None if it is not a number."""
    size = value.shape[-1] if value.shape is not None and rank(value) else None
    return size if isinstance(size, int) else None


def rewrite_linear_layers(traced: TracedGraph) -> None:
    """Rewrites every `MatMul(x, Transpose(W))`, in place."""
    rewriter = _LinearRewriter(traced)
    for node in list(traced.model.graph):
        transpose = producer(node.inputs[1], "Transpose") if node.op_type == "MatMul" else None
        weight = rewriter.weight_of_rank(transpose.inputs[0], 2) if transpose else None
        if weight is not None:
            rewriter.rewrite(node, weight)
    remove_unused(traced.model)


class _LinearRewriter:
    """One pass over a graph; flattened inputs and full shapes are created once and shared by layers."""

    def __init__(self, traced: TracedGraph) -> None:
        self._graph = traced.model.graph
        self._weights = set(traced.weights.values())
        self._token_axes = traced.token_axes
        self._flattened: dict[ir.Value, ir.Value] = {}
        self._shapes: dict[int, ir.Value] = {}

    def rewrite(self, matmul: ir.Node, weight: ir.Value) -> None:
        """Replaces a MatMul, and the Add of a bias after it, by Reshape, Gemm, Reshape."""
        out_features, in_features = static_shape(weight)
        source = matmul.inputs[0]
        assert source is not None
        editor = NodeEditor(self._graph, matmul, module_of=matmul)
        is_matrix = rank(source) == 2
        if not is_matrix and source not in self._flattened:  # `[batch_size * sequence_length, features]`
            self._flattened[source] = editor.one("Reshape", [source, integers(self._graph, -1, in_features)])
        operands = [source if is_matrix else self._flattened[source], weight]
        replaced, uses = matmul.outputs[0], list(matmul.outputs[0].uses())
        if len(uses) == 1 and uses[0].node.op_type == "Add":
            bias = self.weight_of_rank(uses[0].node.inputs[1 - uses[0].idx], 1)
            if bias is not None:
                operands.append(bias)
                replaced = uses[0].node.outputs[0]
        result = editor.one("Gemm", operands, {"transB": 1})
        if not is_matrix:
            result = editor.one("Reshape", [result, self._full_shape(editor, source, out_features)])
        replace_value(replaced, result)

    def _full_shape(self, editor: NodeEditor, source: ir.Value, features: int) -> ir.Value:
        """The product's shape; `[batch_size, sequence_length, features]` is computed once per number of features."""
        axes = source.shape[:-1] if source.shape is not None else ()
        sizes = [axis for axis in axes if isinstance(axis, int)]
        if axes and len(sizes) == len(axes):
            return integers(self._graph, *sizes, features)
        width = integers(self._graph, features)
        if tuple(str(axis) for axis in axes) != self._token_axes:
            start = editor.one("Shape", [source], {"start": 0, "end": -1})
            return editor.one("Concat", [start, width], {"axis": 0})
        if features not in self._shapes:
            shared = NodeEditor(self._graph, self._graph[0])
            shape = shared.one("Shape", [self._graph.inputs[0]], {"end": 2})
            self._shapes[features] = shared.one("Concat", [shape, width], {"axis": 0})
        return self._shapes[features]

    def weight_of_rank(self, value: ir.Value | None, rank: int) -> ir.Value | None:
        return value if value in self._weights and len(static_shape(value)) == rank else None
