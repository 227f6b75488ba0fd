"""`com.microsoft.FusedMatMul(transB=1)` for onnxruntime: it takes `[batch, sequence, in]` as it is.

    Reshape(Gemm(Reshape(x), W, b))  ->  FusedMatMul(x, W) + b

A Llama's layer has twelve nodes less to dispatch, and the rows of a weight stay where they lie.
Source: onnxruntime docs/ContribOperators.md.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from llmconv.export.traced_graph import TracedGraph

DOMAIN = "com.microsoft"


def fuse_linear_layers(traced: TracedGraph) -> None:
    """Rewrites every `Gemm` between two reshapes, in place."""
    found = [place for node in traced.model.graph if (place := _flattened(node)) is not None]
    for source, gemm, last in found:
        _rewrite(traced.model.graph, source, gemm, last)
    if found:
        traced.model.opset_imports[DOMAIN] = 1
        RemoveUnusedNodesPass()(traced.model)
        traced.model.graph.sort()


def _flattened(gemm: ir.Node) -> tuple[ir.Value, ir.Node, ir.Node] | None:
    """What is multiplied, the `Gemm`, and the `Reshape` that gives the product its axes back."""
    before = gemm.inputs[0].producer() if gemm.op_type == "Gemm" and gemm.inputs[0] is not None else None
    if before is None or before.op_type != "Reshape" or gemm.attributes.get_int("transB", 0) != 1:
        return None
    source, uses = before.inputs[0], list(gemm.outputs[0].uses())
    if source is None or len(uses) != 1 or uses[0].node.op_type != "Reshape":
        return None
    last = uses[0].node
    return (source, gemm, last) if _axes(source) == _axes(last.outputs[0]) != 0 else None


def _rewrite(graph: ir.Graph, source: ir.Value, gemm: ir.Node, last: ir.Node) -> None:
    weight, bias = gemm.inputs[1], gemm.inputs[2] if len(gemm.inputs) > 2 else None
    attributes = ir.convenience.convert_attributes({"transA": 0, "transB": 1, "alpha": 1.0})
    nodes = [ir.Node(DOMAIN, "FusedMatMul", [source, weight], attributes)]
    if bias is not None:
        nodes.append(ir.node("Add", [nodes[0].outputs[0], bias]))
    for node in nodes:
        node.metadata_props.update(gemm.metadata_props)
    graph.insert_before(last, nodes)
    old, new = last.outputs[0], nodes[-1].outputs[0]
    new.shape, new.type, new.name, old.name = old.shape, old.type, old.name, None
    old.replace_all_uses_with(new, replace_graph_outputs=True)


def _axes(value: ir.Value) -> int:
    """Rank; 0 where the trace does not tell."""
    return 0 if value.shape is None else len(value.shape)
