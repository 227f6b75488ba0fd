"""`com.microsoft.FusedMatMul(transB=1)`, which takes `[batch, sequence, in]` without reshapes.

    Reshape(Gemm(Reshape(x), W, b))  ->  FusedMatMul(x, W) + b

This removes twelve nodes per layer of a Llama; the weights stay mapped as stored.
Source: onnxruntime docs/ContribOperators.md.
"""

from __future__ import annotations

import onnx_ir as ir

from llmconv.export.node_editor import MICROSOFT, NodeEditor, producer, rank, remove_unused, replace_value
from llmconv.export.traced_graph import TracedGraph


def fuse_linear_layers(traced: TracedGraph) -> None:
    """Rewrites every `Gemm` between two reshapes, in place."""
    found = [match for node in traced.model.graph if (match := _between_reshapes(node)) is not None]
    for source, gemm, last in found:
        editor = NodeEditor(traced.model.graph, last, module_of=gemm)
        attributes = {"transA": 0, "transB": 1, "alpha": 1.0}
        result = editor.one("FusedMatMul", [source, gemm.inputs[1]], attributes, domain=MICROSOFT)
        if len(gemm.inputs) > 2:
            result = editor.one("Add", [result, gemm.inputs[2]])
        replace_value(last.outputs[0], result)
    if found:
        traced.model.opset_imports[MICROSOFT] = 1
        remove_unused(traced.model)


def _between_reshapes(gemm: ir.Node) -> tuple[ir.Value, ir.Node, ir.Node] | None:
    """The left operand before it is flattened, the `Gemm`, and the `Reshape` that restores the axes of the product."""
    before = producer(gemm.inputs[0], "Reshape") if gemm.op_type == "Gemm" else None
    if before is None or gemm.attributes.get_int("transB", 0) != 1:
        return None
    source, uses = before.inputs[0], list(gemm.outputs[0].uses())
    if source is None or len(uses) != 1 or uses[0].node.op_type != "Reshape":
        return None
    last = uses[0].node
    return (source, gemm, last) if rank(source) == rank(last.outputs[0]) != 0 else None
