"""Linear layers as `Gemm(transB=1)` on the (out, in) rows that a checkpoint stores.

The exporter writes `MatMul(x, Transpose(W))`, and a runtime folds the transpose into a copy of every weight. Gemm reads
the stored rows. It takes matrices only, so `x` is flattened before and gets its shape back afterwards.
"""

from __future__ import annotations

import onnx_ir as ir

from llmconv.export.node_editor import NodeEditor, integers, producer, rank, remove_unused, replace_value
from llmconv.export.traced_graph import TracedGraph, static_shape


def rewrite_linear_layers(traced: TracedGraph) -> None:
    """Rewrites every linear layer of the graph in place."""
    rewriter = _LinearRewriter(traced)
    for node in list(traced.model.graph):
        weight = rewriter.transposed_weight(node)
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

    def transposed_weight(self, node: ir.Node) -> ir.Value | None:
        """W, if `node` is `MatMul(x, Transpose(W))`."""
        transpose = producer(node.inputs[1], "Transpose") if node.op_type == "MatMul" else None
        return self._weight_of_rank(transpose.inputs[0], 2) if transpose else None

    def rewrite(self, matmul: ir.Node, weight: ir.Value) -> None:
        """Replaces a MatMul, and the Add of a bias after it, by Reshape, Gemm, Reshape."""
        out_features, in_features = static_shape(weight)
        source = matmul.inputs[0]
        assert source is not None
        editor = NodeEditor(self._graph, matmul, module_of=matmul)
        is_matrix = rank(source) == 2
        operands = [source if is_matrix else self._flat(editor, source, in_features), weight]
        replaced = matmul.outputs[0]
        add, bias = self._bias(matmul)
        if add is not None and bias is not None:
            operands.append(bias)
            replaced = add.outputs[0]
        result = editor.one("Gemm", operands, {"transB": 1})
        if not is_matrix:
            result = editor.one("Reshape", [result, self._full_shape(editor, source, out_features)])
        replace_value(replaced, result)

    def _flat(self, editor: NodeEditor, source: ir.Value, features: int) -> ir.Value:
        """A value as a matrix `[batch_size * sequence_length, features]`."""
        if source not in self._flattened:
            self._flattened[source] = editor.one("Reshape", [source, integers(self._graph, -1, features)])
        return self._flattened[source]

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

    def _bias(self, matmul: ir.Node) -> tuple[ir.Node, ir.Value] | tuple[None, None]:
        """The `Add` of a bias that follows, and the bias."""
        uses = list(matmul.outputs[0].uses())
        if len(uses) == 1 and uses[0].node.op_type == "Add":
            bias = self._weight_of_rank(uses[0].node.inputs[1 - uses[0].idx], 1)
            if bias is not None:
                return uses[0].node, bias
        return None, None

    def _weight_of_rank(self, value: ir.Value | None, rank: int) -> ir.Value | None:
        return value if value in self._weights and len(static_shape(value)) == rank else None
