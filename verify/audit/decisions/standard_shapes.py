"""A copy of a graph for shape inference: operators of onnxruntime become standard ones with outputs of the same shapes.

ONNX's shape inference stops at operators that it does not know, and nothing after them would have known axes.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from onnx import helper

from llmconv.verify.audit.decisions.operators import attribute

SKIPPING = {"SkipLayerNormalization", "SkipSimplifiedLayerNormalization"}
"""Norms of a sum, whose outputs 0 and 3 have the shape of the first input."""


def in_standard_operators(graph: onnx.GraphProto) -> None:
    """Replaces the nodes in place; their values are not those of the graph any more, their shapes are."""
    matrices = {tensor.name for tensor in graph.initializer if len(tensor.dims) == 2}
    nodes = [made for node in graph.node for made in _replaced(node, matrices)]
    del graph.node[:]
    graph.node.extend(nodes)


def _replaced(node: onnx.NodeProto, matrices: set[str]) -> Iterator[onnx.NodeProto]:
    if node.domain == "com.microsoft" and node.op_type in SKIPPING:
        for name in (node.output[at] for at in (0, 3) if at < len(node.output) and node.output[at]):
            yield helper.make_node("Identity", node.input[:1], [name])
    elif node.domain == "com.microsoft" and node.op_type == "FusedMatMul" and _is_of_matrix(node, matrices):
        right = node.input[1]
        if attribute(node, "transB", 0):
            right = f"{node.output[0]} transposed"
            yield helper.make_node("Transpose", [node.input[1]], [right])
        yield helper.make_node("MatMul", [node.input[0], right], list(node.output))
    else:
        yield node


def _is_of_matrix(node: onnx.NodeProto, matrices: set[str]) -> bool:
    """Whether a product is one with a matrix of weights, in which at most the matrix is transposed."""
    others = ("transA", "transBatchA", "transBatchB")
    return node.input[1] in matrices and not any(attribute(node, name, 0) for name in others)
