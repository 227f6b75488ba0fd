"""Linear layers as `Gemm(transB=1)` on the (out, in) rows that a checkpoint stores.

The exporter writes `MatMul(x, Transpose(W))`; a runtime folds that transpose into a copy of every weight. Gemm reads
the rows where they lie. It takes matrices only, so `x` is flattened before and given its shape back afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from llmconv.export.traced_graph import TracedGraph, static_shape


def bind_linear_layers(traced: TracedGraph) -> None:
    """Rewrites every linear layer of the graph in place."""
    rewriter = _Rewriter(traced)
    for node in list(traced.model.graph):
        weight = rewriter.transposed_weight(node)
        if weight is not None:
            rewriter.rewrite(node, weight)
    RemoveUnusedNodesPass()(traced.model)
    traced.model.graph.sort()


class _Rewriter:
    """One pass over a graph; what layers can share (flattened inputs, full shapes) is made once."""

    def __init__(self, traced: TracedGraph) -> None:
        self._graph = traced.model.graph
        self._weights = set(traced.weights.values())
        self._token_axes = traced.token_axes
        self._flattened: dict[ir.Value, ir.Value] = {}
        self._shapes: dict[int, ir.Value] = {}

    def transposed_weight(self, node: ir.Node) -> ir.Value | None:
        """W, where `node` is `MatMul(x, Transpose(W))`."""
        transpose = node.inputs[1].producer() if node.op_type == "MatMul" and node.inputs[1] is not None else None
        if transpose is None or transpose.op_type != "Transpose":
            return None
        return self._weight_of_rank(transpose.inputs[0], 2)

    def rewrite(self, matmul: ir.Node, weight: ir.Value) -> None:
        """Puts Reshape, Gemm, Reshape in the place of a MatMul and of the Add of a bias after it."""
        out_features, in_features = static_shape(weight)
        is_matrix = self._axes(matmul) == 2
        source = matmul.inputs[0]
        assert source is not None
        operands = [source if is_matrix else self._flat(matmul, in_features), weight]
        replaced = matmul.outputs[0]
        add, bias = self._bias(matmul)
        if add is not None and bias is not None:
            operands.append(bias)
            replaced = add.outputs[0]
        product = self._insert(matmul, "Gemm", operands, {"transB": 1})
        result = product
        if not is_matrix:
            result = self._insert(matmul, "Reshape", [product, self._full_shape(matmul, out_features)])
        result.name, result.shape, result.type = replaced.name, replaced.shape, replaced.type
        replaced.name = None
        replaced.replace_all_uses_with(result, replace_graph_outputs=True)

    def _flat(self, matmul: ir.Node, features: int) -> ir.Value:
        """The input of a MatMul as a matrix `[batch_size * sequence_length, features]`."""
        source = matmul.inputs[0]
        assert source is not None
        if source not in self._flattened:
            shape = self._constant(f"flat_{features}", [-1, features])
            self._flattened[source] = self._insert(matmul, "Reshape", [source, shape])
        return self._flattened[source]

    def _axes(self, matmul: ir.Node) -> int:
        """Rank of what is multiplied; 0 where the trace does not tell."""
        source = matmul.inputs[0]
        return 0 if source is None or source.shape is None else len(source.shape)

    def _full_shape(self, matmul: ir.Node, features: int) -> ir.Value:
        """The product's shape; `[batch_size, sequence_length, features]` is computed once for all of that width."""
        source = matmul.inputs[0]
        assert source is not None
        if source.shape is not None and source.shape[:-1] and all(isinstance(axis, int) for axis in source.shape[:-1]):
            sizes = [int(axis) for axis in source.shape[:-1]]  # type: ignore[arg-type]
            return self._constant("full_" + "_".join(map(str, [*sizes, features])), [*sizes, features])
        if source.shape is None or tuple(str(axis) for axis in source.shape[:-1]) != self._token_axes:
            start = self._insert(matmul, "Shape", [source], {"start": 0, "end": -1})
            return self._insert(matmul, "Concat", [start, self._constant(f"width_{features}", [features])], {"axis": 0})
        if features not in self._shapes:
            first = self._graph[0]
            shape = self._insert(first, "Shape", [self._graph.inputs[0]], {"end": 2}, of_module=False)
            width = self._constant(f"width_{features}", [features])
            self._shapes[features] = self._insert(first, "Concat", [shape, width], {"axis": 0}, of_module=False)
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

    def _constant(self, name: str, content: list[int]) -> ir.Value:
        if name not in self._graph.initializers:
            tensor = ir.tensor(np.array(content, dtype=np.int64), name=name)
            kind = ir.TensorType(ir.DataType.INT64)
            self._graph.initializers[name] = ir.Value(name=name, type=kind, const_value=tensor)
        return self._graph.initializers[name]

    def _insert(
        self,
        place: ir.Node,
        op_type: str,
        inputs: Sequence[ir.Value],
        attributes: dict[str, int] | None = None,
        of_module: bool = True,
    ) -> ir.Value:
        """A node before `place`, of the same module unless it serves all of them."""
        node = ir.node(op_type, inputs, attributes=attributes)
        if of_module:
            node.metadata_props.update(place.metadata_props)
        self._graph.insert_before(place, node)
        return node.outputs[0]
