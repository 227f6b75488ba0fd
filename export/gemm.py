"""Linear layers as `Gemm(transB=1)` on the (out, in) rows that a checkpoint stores.

The exporter writes `MatMul(x, Transpose(W))`; a runtime folds that transpose into a copy of every weight. Gemm reads the
rows where they lie. It takes matrices only, so `x` is flattened before and given its shape back afterwards.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from llmconv.export.trace import TracedGraph


def bind_linear_layers(traced: TracedGraph) -> None:
    """Rewrites every linear layer of the graph in place."""
    graph = traced.model.graph
    weights = set(traced.weights.values())
    shapes: dict[int, ir.Value] = {}
    flattened: dict[ir.Value, ir.Value] = {}
    for node in list(graph):
        weight = _transposed_weight(node, weights)
        if weight is not None:
            _rewrite(graph, node, weight, weights, shapes, flattened)
    RemoveUnusedNodesPass()(traced.model)
    graph.sort()


def _transposed_weight(node: ir.Node, weights: set[ir.Value]) -> ir.Value | None:
    """W, where `node` is `MatMul(x, Transpose(W))`."""
    if node.op_type != "MatMul" or node.inputs[1] is None:
        return None
    transpose = node.inputs[1].producer()
    if transpose is None or transpose.op_type != "Transpose":
        return None
    weight = transpose.inputs[0]
    return weight if weight in weights and weight.shape is not None and len(weight.shape) == 2 else None


def _rewrite(
    graph: ir.Graph,
    matmul: ir.Node,
    weight: ir.Value,
    weights: set[ir.Value],
    shapes: dict[int, ir.Value],
    flattened: dict[ir.Value, ir.Value],
) -> None:
    assert weight.shape is not None
    out_features, in_features = int(weight.shape[0]), int(weight.shape[1])  # type: ignore[arg-type]
    source = matmul.inputs[0]
    assert source is not None
    if source not in flattened:
        flat_shape = _constant(graph, f"flat_{in_features}", [-1, in_features])
        flattened[source] = _insert(graph, matmul, "Reshape", [source, flat_shape])
    operands = [flattened[source], weight]
    last = matmul
    bias = _bias_add(matmul, weights)
    if bias is not None:
        last, bias_value = bias
        operands.append(bias_value)
    product = _insert(graph, matmul, "Gemm", operands, {"transB": 1})
    if out_features not in shapes:
        shapes[out_features] = _full_shape(graph, out_features)
    result = _insert(graph, matmul, "Reshape", [product, shapes[out_features]])
    replaced = last.outputs[0]
    result.name, result.shape, result.type = replaced.name, replaced.shape, replaced.type
    replaced.name = None
    replaced.replace_all_uses_with(result, replace_graph_outputs=True)


def _bias_add(matmul: ir.Node, weights: set[ir.Value]) -> tuple[ir.Node, ir.Value] | None:
    """The `Add` of a bias that follows, and the bias."""
    uses = matmul.outputs[0].uses()
    if len(uses) != 1 or uses[0].node.op_type != "Add":
        return None
    add = uses[0].node
    bias = add.inputs[1 - uses[0].idx]
    return (add, bias) if bias in weights and bias.shape is not None and len(bias.shape) == 1 else None


def _full_shape(graph: ir.Graph, features: int) -> ir.Value:
    """`[batch_size, sequence_length, features]`, computed once for all layers of that width."""
    first = graph[0]
    tokens = _insert(graph, first, "Shape", [graph.inputs[0]], before_scopes=False)
    return _insert(graph, first, "Concat", [tokens, _constant(graph, f"width_{features}", [features])], {"axis": 0}, False)


def _constant(graph: ir.Graph, name: str, content: list[int]) -> ir.Value:
    if name not in graph.initializers:
        tensor = ir.tensor(np.array(content, dtype=np.int64), name=name)
        graph.register_initializer(ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=tensor.shape, const_value=tensor))
    return graph.initializers[name]


def _insert(
    graph: ir.Graph,
    place: ir.Node,
    op_type: str,
    inputs: list[ir.Value],
    attributes: dict[str, int] | None = None,
    before_scopes: bool = True,
) -> ir.Value:
    """A node before `place`; it belongs to the same module unless `before_scopes` is false."""
    node = ir.node(op_type, inputs, attributes=attributes)
    if before_scopes:
        node.metadata_props.update(place.metadata_props)
    graph.insert_before(place, node)
    return node.outputs[0]
