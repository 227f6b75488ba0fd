"""Replaces products and lookups of quantized weights by onnxruntime's operators, which read the codes.

Source: onnxruntime docs/ContribOperators.md, `com.microsoft.MatMulNBits`, `com.microsoft.GatherBlockQuantized` and
`com.microsoft.DynamicQuantizeMatMul`. Where the range of an activation is known, by standard operators instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir
from onnx_ir.passes.common import NameFixPass

from llmconv.export.node_editor import MICROSOFT, NodeEditor, remove_unused, replace_value
from llmconv.export.quantization.activation_range import ActivationRange
from llmconv.export.quantization.block_format import BlockFormat
from llmconv.export.quantization.column_format import ColumnFormat
from llmconv.export.quantization.joined_products import join_products
from llmconv.export.quantization.product_groups import activation, reshapes
from llmconv.export.quantization.quantized_tensor import CODES, ORDER, SCALES, ZEROS
from llmconv.export.quantization.selection import QuantizedWeight, product_layout
from llmconv.export.traced_graph import TracedGraph, static_shape
from llmconv.export.weights.experts import output_parts
from llmconv.export.weights.parameter_sources import StoredRows, WeightSource
from llmconv.export.weights.stored_values import StoredValues

ACCURACY = 4
"""`accuracy_level`: activations are rounded to int8 by blocks; without it onnxruntime's CPU takes ten times as long."""

WITHOUT_BIAS = ("ort-dml",)
"""Targets that refuse a graph whose `MatMulNBits` has a bias (DirectML's `DmlOperatorMatMulNBits.cpp`, onnxruntime)."""


@dataclass(frozen=True)
class QuantizedProducts:
    """Writes products with quantized weights, by name, into a graph for a target; None for any runtime."""

    weights: Mapping[str, QuantizedWeight]
    target: str | None = None

    def __contains__(self, source: WeightSource) -> bool:
        return isinstance(source, StoredRows) and source.name in self.weights

    def multiply(
        self, editor: NodeEditor, left: ir.Value, rows: StoredRows, values: StoredValues, bias: ir.Value | None = None
    ) -> ir.Value:
        """`left` [..., K] times the quantized matrix, plus `bias` [N]: [..., N]; `values` creates the initializers."""
        weight = self.weights[rows.name]
        if weight.is_reordered:
            order = values.stored(StoredRows(rows.name + ORDER, values.shape(rows.name + ORDER)))
            left = editor.one("Gather", [left, order], {"axis": -1})
        codes = values.stored(_part(rows, CODES, values))
        scales = values.value(_part(rows, SCALES, values), weight.dtype)
        if weight.activation:
            product = _rounded_product(editor, left, codes, scales, weight.activation, rows.label)
            return product if bias is None else editor.one("Add", [product, bias])
        if isinstance(weight.form, ColumnFormat):
            return editor.one("DynamicQuantizeMatMul", _given(left, codes, scales, None, bias), domain=MICROSOFT)
        count, blocks, _ = static_shape(codes)
        columns = rows.shape[0 if weight.transposed else 1]
        zeros = None if weight.form.symmetric else values.stored(_part(rows, ZEROS, values))
        sizes = {"K": columns, "N": count, "bits": weight.form.bits, "block_size": weight.form.size}
        assert blocks == weight.form.blocks(columns)
        fused = None if self.target in WITHOUT_BIAS else bias
        inputs = _given(left, codes, scales, zeros, None, fused)
        product = editor.one("MatMulNBits", inputs, {**sizes, "accuracy_level": ACCURACY}, domain=MICROSOFT)
        return product if bias is fused else editor.one("Add", [product, bias])

    def rewrite(self, traced: TracedGraph, matches: Mapping[str, WeightSource], values: StoredValues) -> None:
        """Replaces every product and lookup of quantized weights, except those of experts, in an unbound graph."""
        for parameter, match in matches.items():
            for node, index in list(traced.weights[parameter].uses()):
                if node.op_type == "Gather" and index == 0 and match in self:
                    self._look_up(traced.model.graph, node, match, values)
                elif index == 1 and (layout := product_layout(node)) is not None and node.domain in ("", MICROSOFT):
                    parts = [part for part, _ in output_parts(match, layout)]
                    if all(part in self for part in parts):
                        self._replace(traced.model.graph, node, parts, values)
        join_products(traced.model.graph)
        traced.model.opset_imports[MICROSOFT] = 1
        remove_unused(traced.model)
        NameFixPass()(traced.model)  # a module that is called twice has two products of one name

    def _replace(self, graph: ir.Graph, node: ir.Node, parts: list[WeightSource], values: StoredValues) -> None:
        """Replaces a product; reshapes that only make its factor a matrix go, too."""
        left, last = activation(node), reshapes(node)[1] or node
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        editor = NodeEditor(graph, last, (node.name or "").rpartition("/")[0], module_of=node)
        inner = bias if len(parts) == 1 else None
        results = [self.multiply(editor, left, part, values, inner) for part in parts if isinstance(part, StoredRows)]
        result = results[0] if len(results) == 1 else editor.one("Concat", results, {"axis": -1})
        if bias is not None and inner is None:
            result = editor.one("Add", [result, bias])
        replace_value(last.outputs[0], result)

    def _look_up(self, graph: ir.Graph, node: ir.Node, match: WeightSource, values: StoredValues) -> None:
        """Rows of a tied embedding, from the same bytes as the codes of the head."""
        assert isinstance(match, StoredRows)
        weight = self.weights[match.name]
        assert isinstance(weight.form, BlockFormat)
        codes = _part(match, CODES, values)
        table = values.stored(codes, (codes.stored[0], codes.stored[1] * codes.stored[2]))
        inputs = [table, node.inputs[1], values.value(_part(match, SCALES, values), weight.dtype)]
        if not weight.form.symmetric:
            inputs.append(values.stored(_part(match, ZEROS, values)))
        editor = NodeEditor(graph, node, (node.name or "").rpartition("/")[0], module_of=node)
        axes = {"gather_axis": 0, "quantize_axis": 1, "block_size": weight.form.size, "bits": weight.form.bits}
        replace_value(node.outputs[0], editor.one("GatherBlockQuantized", inputs, axes, domain=MICROSOFT))


def _rounded_product(
    editor: NodeEditor, left: ir.Value, codes: ir.Value, scales: ir.Value, activation: ActivationRange, name: str
) -> ir.Value:
    """A product of two dequantized factors, which runtimes fuse."""
    factor = activation.rounded(editor, left, name)
    return editor.one("MatMul", [factor, editor.one("DequantizeLinear", [codes, scales], {"axis": 1})])


def _given(*inputs: ir.Value | None) -> list[ir.Value | None]:
    """The inputs of a node without optional ones at the end."""
    count = max(at for at, value in enumerate(inputs) if value is not None)
    return list(inputs[: count + 1])


def _part(rows: StoredRows, suffix: str, values: StoredValues) -> StoredRows:
    """The same rows of the codes, scales or zero points of a tensor."""
    name = rows.name + suffix
    return replace(rows, name=name, stored=values.shape(name))
