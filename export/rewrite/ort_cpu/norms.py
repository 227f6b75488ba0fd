"""An RMS norm and the sum in front of it as one node; onnxruntime does not fuse them in exported graphs.

    RMSNormalization(residual + y)   ->  com.microsoft.SkipSimplifiedLayerNormalization

Source: onnxruntime docs/ContribOperators.md.
"""

from __future__ import annotations

import onnx_ir as ir

from llmconv.export.node_editor import MICROSOFT, NodeEditor, producer, rank, remove_unused, replace_value
from llmconv.export.traced_graph import TracedGraph

SUM = 3
"""Index of the sum among the outputs of `SkipSimplifiedLayerNormalization`, after an unused mean and variance."""


def fuse_sums_before_norms(traced: TracedGraph) -> None:
    """Rewrites every norm of a sum in place."""
    graph = traced.model.graph
    norms = [(node, add) for node in list(graph) if (add := _sum_before(node)) is not None]
    for norm, add in norms:
        _fuse(NodeEditor(graph, norm, module_of=norm), norm, add)
    if norms:
        traced.model.opset_imports[MICROSOFT] = 1
        remove_unused(traced.model)


def _sum_before(norm: ir.Node) -> ir.Node | None:
    """The sum in front of a norm of whole hidden states."""
    node = producer(norm.inputs[0], "Add") if norm.op_type == "RMSNormalization" else None
    return node if node and all(rank(value) == 3 for value in node.inputs) else None


def _fuse(editor: NodeEditor, norm: ir.Node, add: ir.Node) -> None:
    """One node instead of the norm and of the sum, which later layers also read."""
    x, weight = norm.inputs[:2]
    assert x is not None
    attributes = {"epsilon": norm.attributes.get_float("epsilon", 0.0)}
    inputs = [*add.inputs, weight]
    outputs = editor.add("SkipSimplifiedLayerNormalization", inputs, attributes, SUM + 1, MICROSOFT)
    replace_value(norm.outputs[0], outputs[0])
    total = outputs[SUM]
    total.shape, total.type = x.shape, x.type
    x.replace_all_uses_with(total)
    fused = outputs[0].producer()
    assert fused is not None
    for index, value in enumerate(inputs[:2]):
        fused.replace_input_with(index, value)
