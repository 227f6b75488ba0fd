"""RMS norms as one node each, for onnxruntime: it fuses neither what the exporter writes nor the sum in front of it.

    x * Reciprocal(Sqrt(ReduceMean(x ** 2) + epsilon)) * weight   ->  RMSNormalization (opset 23)
    the same of x = residual + y                                  ->  com.microsoft.SkipSimplifiedLayerNormalization

Source: onnx docs/Operators.md, onnxruntime docs/ContribOperators.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from llmconv.export.traced_graph import TracedGraph

DOMAIN = "com.microsoft"
SUM = 3
"""Which output of `SkipSimplifiedLayerNormalization` is the sum; a mean and a variance, unused, stand before it."""


def fuse_norms(traced: TracedGraph) -> None:
    """Rewrites every RMS norm of the graph in place."""
    graph = traced.model.graph
    norms = [norm for node in list(graph) if (norm := _norm(node)) is not None]
    for norm in norms:
        skip = _skip(norm)
        if skip is None:
            _insert(graph, norm, ir.node("RMSNormalization", [norm.x, norm.weight], {"epsilon": norm.epsilon}))
        else:
            _fuse_sum(graph, norm, skip)
            traced.model.opset_imports[DOMAIN] = 1
    if norms:
        RemoveUnusedNodesPass()(traced.model)
        graph.sort()


@dataclass(frozen=True)
class _Norm:
    """One RMS norm: `last` multiplies by the weight."""

    last: ir.Node
    x: ir.Value
    weight: ir.Value
    epsilon: float


def _norm(last: ir.Node) -> _Norm | None:
    """The norm that ends with a node, whichever way round its products are."""
    if last.op_type != "Mul":
        return None
    for at, scaled in enumerate(last.inputs):
        weight, product = last.inputs[1 - at], scaled.producer() if scaled is not None else None
        if product is not None and product.op_type == "Mul" and weight is not None and _rank(weight) == 1:
            found = _scaled(product)
            if found is not None:
                return _Norm(last, found[0], weight, found[1])
    return None


def _scaled(product: ir.Node) -> tuple[ir.Value, float] | None:
    """x and epsilon of `x * Reciprocal(Sqrt(ReduceMean(x ** 2) + epsilon))`."""
    for at, x in enumerate(product.inputs):
        total = _through(product.inputs[1 - at], ("Reciprocal", "Sqrt"))
        if x is None or total is None or total.op_type != "Add":
            continue
        mean, epsilon = total.inputs[0], _number(total.inputs[1])
        power = _through(mean, ("ReduceMean",))
        if epsilon is not None and power is not None and _is_square(power, x):
            return x, epsilon
    return None


def _through(value: ir.Value | None, op_types: tuple[str, ...]) -> ir.Node | None:
    """The node before a row of nodes of one input that matters each."""
    node = value.producer() if value is not None else None
    for op_type in op_types:
        if node is None or node.op_type != op_type or node.inputs[0] is None:
            return None
        node = node.inputs[0].producer()
    return node


def _is_square(node: ir.Node, x: ir.Value) -> bool:
    return node.op_type == "Pow" and node.inputs[0] is x and _number(node.inputs[1]) == 2


def _number(value: ir.Value | None) -> float | None:
    content = value.const_value if value is not None else None
    return float(content.numpy().ravel()[0]) if content is not None and content.size == 1 else None


def _rank(value: ir.Value) -> int | None:
    return len(value.shape) if value.shape is not None else None


def _skip(norm: _Norm) -> ir.Node | None:
    """The sum in front of a norm of whole hidden states."""
    node = norm.x.producer()
    if node is None or node.op_type != "Add" or any(value is None or _rank(value) != 3 for value in node.inputs):
        return None
    return node


def _fuse_sum(graph: ir.Graph, norm: _Norm, add: ir.Node) -> None:
    """One node in the place of the norm and of the sum, which the residual goes on with."""
    inputs = [*add.inputs, norm.weight]
    attributes = ir.convenience.convert_attributes({"epsilon": norm.epsilon})
    node = ir.Node(DOMAIN, "SkipSimplifiedLayerNormalization", inputs, attributes, num_outputs=SUM + 1)
    _insert(graph, norm, node)
    total = node.outputs[SUM]
    total.shape, total.type = norm.x.shape, norm.x.type
    norm.x.replace_all_uses_with(total)
    for index, value in enumerate(add.inputs):
        node.replace_input_with(index, value)


def _insert(graph: ir.Graph, norm: _Norm, node: ir.Node) -> None:
    """`node` where the norm ends; its first output takes the place of the norm's."""
    node.metadata_props.update(norm.last.metadata_props)
    graph.insert_before(norm.last, node)
    old, new = norm.last.outputs[0], node.outputs[0]
    new.shape, new.type = old.shape, old.type
    old.replace_all_uses_with(new)
