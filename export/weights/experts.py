"""Multiplication by the stacked weights of experts: one Gemm per expert, on the rows that a checkpoint stores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import onnx_ir as ir

from llmconv.export.node_editor import NodeEditor
from llmconv.export.weights.parameter_sources import Concatenation, Transposition, WeightSource, element


class Multiply(Protocol):
    """Inserts the product of rows with a stored matrix, which is transposed if `transB`, in a dtype."""

    def __call__(
        self, editor: NodeEditor, left: ir.Value, matrix: WeightSource, transB: int, dtype: ir.DataType
    ) -> ir.Value:
        """The product."""


DOMAIN, GROUPED = "llmconv", "GroupedMatMul"


def expand_experts(model: ir.Model, stacks: Mapping[ir.Value, WeightSource], multiply: Multiply) -> None:
    """Replaces every `GroupedMatMul`, in place, with products that `multiply` inserts on the stored stacks."""
    for node in list(model.graph):
        if (node.domain, node.op_type) == (DOMAIN, GROUPED):
            weight = node.inputs[1]
            assert weight is not None
            _expand(model.graph, node, stacks[weight], partial(multiply, dtype=dtype_of(weight)))
    model.opset_imports.pop(DOMAIN, None)


def dtype_of(weight: ir.Value) -> ir.DataType:
    """The dtype in which a graph reads a weight."""
    return weight.dtype or ir.DataType.FLOAT


def _expand(graph: ir.Graph, node: ir.Node, stack: WeightSource, multiply: Callable[..., ir.Value]) -> None:
    """Replaces a node by Split, one product per expert (and per stored part of it), Concat."""
    rows, _, counts = node.inputs
    experts = range(stack.shape[0])
    transposed = not node.attributes["transB"].as_int()
    editor = NodeEditor(graph, node, scope=node.name or "")
    groups = editor.add("Split", [rows, counts], {"axis": 0}, outputs=len(experts)) if len(experts) > 1 else [rows]
    parts = [output_parts(element(stack, expert), transposed) for expert in experts]
    columns = []
    for column in range(len(parts[0])):
        products: list[ir.Value] = []
        for group, matrices in zip(groups, parts, strict=True):
            matrix, transB = matrices[column]
            products.append(multiply(editor, group, matrix, transB))
        columns.append(editor.one("Concat", products, {"axis": 0}))
    result = columns[0] if len(columns) == 1 else editor.one("Concat", columns, {"axis": 1})
    node.outputs[0].replace_all_uses_with(result)
    graph.remove(node, safe=True)


def output_parts(matrix: WeightSource, transposed: bool) -> list[tuple[WeightSource, int]]:
    """The stored parts of a matrix along its output features, each with the `transB` of its Gemm."""
    if isinstance(matrix, Transposition) and set(matrix.axes) == {0, 1}:
        return output_parts(matrix.whole, not transposed)
    if isinstance(matrix, Concatenation) and not matrix.stack and matrix.axis == int(transposed):
        return [part for each in matrix.parts for part in output_parts(each, transposed)]
    return [(matrix, int(not transposed))]
