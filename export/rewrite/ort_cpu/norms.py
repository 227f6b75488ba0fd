"""RMS norms as one node each, together with the sum in front of them; onnxruntime fuses neither in exported graphs.

    x * Reciprocal(Sqrt(ReduceMean(x ** 2) + epsilon)) * weight   ->  RMSNormalization (opset 23)
    the same of x = residual + y                                  ->  com.microsoft.SkipSimplifiedLayerNormalization

Source: onnx docs/Operators.md, onnxruntime docs/ContribOperators.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from llmconv.export.node_editor import (
    MICROSOFT,
    NodeEditor,
    number_of,
    producer,
    rank,
    remove_unused,
    replace_value,
)
from llmconv.export.traced_graph import TracedGraph

SUM = 3
"""Index of the sum among the outputs of `SkipSimplifiedLayerNormalization`, after an unused mean and variance."""


def fuse_norms(traced: TracedGraph) -> None:
    """Rewrites every RMS norm of the graph in place."""
    graph = traced.model.graph
    norms = [norm for node in list(graph) if (norm := _norm(node)) is not None]
    for norm in norms:
        editor = NodeEditor(graph, norm.last, module_of=norm.last)
        add = _sum_before(norm)
        if add is None:
            result = editor.one("RMSNormalization", [norm.x, norm.weight], {"epsilon": norm.epsilon})
        else:
            result = _fuse_sum(editor, norm, add)
            traced.model.opset_imports[MICROSOFT] = 1
        replace_value(norm.last.outputs[0], result)
    if norms:
        remove_unused(traced.model)


@dataclass(frozen=True)
class _RmsNorm:
    """One RMS norm of `x`; the node `last` multiplies by the weight."""

    last: ir.Node
    x: ir.Value
    weight: ir.Value
    epsilon: float


def _norm(last: ir.Node) -> _RmsNorm | None:
    """The norm that ends with a node, with the factors of its products in any order."""
    if last.op_type != "Mul":
        return None
    for at, scaled in enumerate(last.inputs):
        weight, product = last.inputs[1 - at], producer(scaled, "Mul")
        if product is not None and weight is not None and rank(weight) == 1:
            found = _scaled(product)
            if found is not None:
                return _RmsNorm(last, found[0], weight, found[1])
    return None


def _scaled(product: ir.Node) -> tuple[ir.Value, float] | None:
    """x and epsilon of `x * Reciprocal(Sqrt(ReduceMean(x ** 2) + epsilon))`."""
    for at, x in enumerate(product.inputs):
        reciprocal = producer(product.inputs[1 - at], "Reciprocal")
        root = producer(reciprocal.inputs[0], "Sqrt") if reciprocal else None
        total = producer(root.inputs[0], "Add") if root else None
        mean = producer(total.inputs[0], "ReduceMean") if total else None
        power = producer(mean.inputs[0], "Pow") if mean else None
        epsilon = number_of(total.inputs[1]) if total else None
        is_square = power is not None and power.inputs[0] is x and number_of(power.inputs[1]) == 2
        if x is not None and epsilon is not None and is_square:
            return x, epsilon
    return None


def _sum_before(norm: _RmsNorm) -> ir.Node | None:
    """The sum in front of a norm of whole hidden states."""
    node = producer(norm.x, "Add")
    return node if node and all(rank(value) == 3 for value in node.inputs) else None


def _fuse_sum(editor: NodeEditor, norm: _RmsNorm, add: ir.Node) -> ir.Value:
    """One node instead of the norm and of the sum, which later layers also read."""
    inputs = [*add.inputs, norm.weight]
    attributes = {"epsilon": norm.epsilon}
    outputs = editor.add("SkipSimplifiedLayerNormalization", inputs, attributes, SUM + 1, MICROSOFT)
    total = outputs[SUM]
    total.shape, total.type = norm.x.shape, norm.x.type
    norm.x.replace_all_uses_with(total)
    fused = outputs[0].producer()
    assert fused is not None
    for index, value in enumerate(add.inputs):
        fused.replace_input_with(index, value)
    return outputs[0]
