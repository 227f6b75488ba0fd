"""The stacked weights of experts in a graph: one Gemm per expert, on the rows that a checkpoint stores."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx_ir as ir

from llmconv.export.weights.parameter_sources import Expression, Joined, Swapped, element

DOMAIN, OP_TYPE = "llmconv", "GroupedMatMul"


def expand_experts(
    model: ir.Model,
    parts: Mapping[ir.Value, Expression],
    value_of: Callable[[Expression], ir.Value],
) -> None:
    """Replaces every `GroupedMatMul` of the graph.

    Args:
        model: changed in place.
        parts: what the stacked weights are made of.
        value_of: the graph's value of an expression.
    """
    for node in list(model.graph):
        if (node.domain, node.op_type) == (DOMAIN, OP_TYPE):
            weight = node.inputs[1]
            assert weight is not None
            _expand(model.graph, node, parts[weight], value_of)
    model.opset_imports.pop(DOMAIN, None)


def _expand(graph: ir.Graph, node: ir.Node, stack: Expression, value_of: Callable[[Expression], ir.Value]) -> None:
    """Split, one Gemm per expert (and per stored part of it), Concat, in the place of one node."""
    rows, _, counts = node.inputs
    number = 0
    experts = range(stack.shape[0])
    transposed = not node.attributes["transB"].as_int()

    def insert(op_type: str, inputs: list[ir.Value | None], attributes: dict[str, int], outputs: int = 1) -> ir.Node:
        nonlocal number
        number += 1
        name = f"{node.name}/{op_type}_{number}"
        made = ir.node(op_type, inputs, attributes=attributes, num_outputs=outputs, name=name)
        for index, output in enumerate(made.outputs):
            output.name = f"{name}:{index}"
        graph.insert_before(node, made)
        return made

    groups = list(insert("Split", [rows, counts], {"axis": 0}, len(experts)).outputs) if len(experts) > 1 else [rows]
    parts = [_parts(element(stack, expert), transposed) for expert in experts]
    columns = []
    for column in range(len(parts[0])):
        products: list[ir.Value | None] = []
        for group, matrices in zip(groups, parts, strict=True):
            matrix, transB = matrices[column]
            products.append(insert("Gemm", [group, value_of(matrix)], {"transB": transB}).outputs[0])
        columns.append(insert("Concat", products, {"axis": 0}).outputs[0])
    result = columns[0] if len(columns) == 1 else insert("Concat", [*columns], {"axis": 1}).outputs[0]
    node.outputs[0].replace_all_uses_with(result)
    graph.remove(node, safe=True)


def _parts(matrix: Expression, transposed: bool) -> list[tuple[Expression, int]]:
    """A matrix cut along its output features into what is stored, each with Gemm's `transB`."""
    if isinstance(matrix, Swapped) and set(matrix.axes) == {0, 1}:
        return _parts(matrix.whole, not transposed)
    if isinstance(matrix, Joined) and not matrix.stack and matrix.axis == int(transposed):
        return [part for each in matrix.parts for part in _parts(each, transposed)]
    return [(matrix, int(not transposed))]
