"""Replaces products and lookups of quantized weights by onnxruntime's operators, which read the codes.

Source: onnxruntime docs/ContribOperators.md, `com.microsoft.MatMulNBits`, `com.microsoft.GatherBlockQuantized` and
`com.microsoft.DynamicQuantizeMatMul`. Where the range of an activation is known, by standard operators instead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import NameFixPass

from llmconv.export.quantization.block_rounding import BlockFormat, ColumnFormat
from llmconv.export.quantization.quantized_tensor import CODES, OFFSETS, ORDER, SCALES, ZEROS
from llmconv.export.quantization.selection import QuantizedWeight, product_layout
from llmconv.export.traced_graph import (
    MICROSOFT,
    NodeEditor,
    TracedGraph,
    integers,
    producer,
    rank,
    remove_unused,
    replace_value,
    static_shape,
)
from llmconv.export.weights import StoredRows, StoredValues, WeightSource, output_parts
from llmconv.tensors import lists_by_key

ACCURACY = 4
"""`accuracy_level`: activations are rounded to int8 by blocks; without it onnxruntime's CPU takes ten times as long."""

WITHOUT_BIAS = ("ort-dml",)
"""Targets that refuse a graph whose `MatMulNBits` has a bias (DirectML's `DmlOperatorMatMulNBits.cpp`, onnxruntime)."""


@dataclass(frozen=True)
class QuantizedProducts:
    """Writes products with quantized weights, by name, into a graph for a target; None for any runtime."""

    weights: Mapping[str, QuantizedWeight]
    target: str | None = None
    # sums over blocks of the activations that several matrices with offsets are multiplied with
    _sums: dict[tuple[ir.Value, int], ir.Value] = field(default_factory=dict)

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
        if weight.activation:  # two dequantized factors, which runtimes fuse
            factor = weight.activation.rounded(editor, left, rows.label)
            product = editor.one("MatMul", [factor, editor.one("DequantizeLinear", [codes, scales], {"axis": 1})])
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
        if weight.has_offsets:
            product = editor.one("Add", [product, self._of_offsets(editor, left, rows, values)])
        return product if bias is fused else editor.one("Add", [product, bias])

    def _of_offsets(self, editor: NodeEditor, left: ir.Value, rows: StoredRows, values: StoredValues) -> ir.Value:
        """The sums of `left` [..., K] over the columns of each block, times the offsets: [..., N].

        onnxruntime's CPU takes seven times as long for `MatMulNBits` with zero points of floats (1.31, 2048 x 2048).
        """
        weight, graph = self.weights[rows.name], editor.graph
        assert isinstance(weight.form, BlockFormat)
        offsets = StoredRows(rows.name + OFFSETS, values.shape(rows.name + OFFSETS))
        key = left, weight.form.size
        if key not in self._sums:
            if axes := rank(left):
                inner = integers(graph, *[0] * (axes - 1), -1, weight.form.size)
            else:
                dims = editor.one("Shape", [left], {"end": -1})
                inner = editor.one("Concat", [dims, integers(graph, -1, weight.form.size)], {"axis": 0})
            blocks = editor.one("Reshape", [left, inner])
            self._sums[key] = editor.one("ReduceSum", [blocks, integers(graph, -1)], {"keepdims": 0})
        factor = values.value(offsets, weight.dtype)
        if not rows.is_whole:
            ends = [integers(graph, number) for number in (rows.first, rows.first + rows.count, 1)]
            factor = editor.one("Slice", [factor, *ends])
        return editor.one("MatMul", [self._sums[key], factor])

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
        editor = NodeEditor(graph, node, (node.name or "").rpartition("/")[0], module_of=node)
        if weight.form.symmetric:
            # without zero points some releases of CUDA's kernel take 0 for the middle code (onnxruntime issue 31692)
            size = weight.form.zero_bytes(codes.stored[1] * weight.form.size)
            middle = ir.tensor(np.array([MIDDLE[weight.form.bits]], np.uint8))
            inputs.append(editor.one("ConstantOfShape", [integers(graph, codes.stored[0], size)], {"value": middle}))
        else:
            inputs.append(values.stored(_part(match, ZEROS, values)))
        axes = {"gather_axis": 0, "quantize_axis": 1, "block_size": weight.form.size, "bits": weight.form.bits}
        found = editor.one("GatherBlockQuantized", inputs, axes, domain=MICROSOFT)
        if weight.has_offsets:
            offsets = values.value(StoredRows(match.name + OFFSETS, values.shape(match.name + OFFSETS)), weight.dtype)
            own = editor.one("Gather", [editor.one("Transpose", [offsets], {"perm": [1, 0]}), node.inputs[1]])
            own = editor.one("Unsqueeze", [own, integers(graph, -1)])
            dims = editor.one("Shape", [own], {"end": -1})
            apart = editor.one("Concat", [dims, integers(graph, weight.form.size)], {"axis": 0})
            flat = editor.one("Shape", [found])
            found = editor.one("Add", [found, editor.one("Reshape", [editor.one("Expand", [own, apart]), flat])])
        replace_value(node.outputs[0], found)


def _given(*inputs: ir.Value | None) -> list[ir.Value | None]:
    """The inputs of a node without optional ones at the end."""
    count = max(at for at, value in enumerate(inputs) if value is not None)
    return list(inputs[: count + 1])


def _part(rows: StoredRows, suffix: str, values: StoredValues) -> StoredRows:
    """The same rows of the codes, scales or zero points of a tensor."""
    name = rows.name + suffix
    return replace(rows, name=name, stored=values.shape(name))


MIDDLE = {4: 0x88, 8: 0x80}  # the middle code, of 4 bits twice in a byte
LEFT, BIAS = 0, 5  # indices of inputs of `MatMulNBits`; between them are codes, scales and zero points

Stored = TypeVar("Stored")


def side_by_side(tensors: Mapping[str, Stored], groups: Sequence[Sequence[str]]) -> dict[str, Stored]:
    """The tensors of a file, ordered so that each group's codes are adjacent, then its zero points, then its scales.

    A group is the names of weights that are multiplied with one activation.
    """
    block_of = {name: [one for one in block if one in tensors] for block in parts_of(groups) for name in block}
    order = dict.fromkeys(one for name in tensors for one in block_of.get(name, [name]))
    return {name: tensors[name] for name in order}


def parts_of(groups: Sequence[Sequence[str]]) -> list[list[str]]:
    """The names of codes, zero points and scales of each group, in the order of the file."""
    return [[name + suffix for suffix in (CODES, ZEROS, SCALES) for name in group] for group in groups]


def join_products(graph: ir.Graph) -> None:
    """Joins `MatMulNBits` of one activation and format whose codes, scales and zero points are adjacent, in place.

    The replaced nodes remain, unused.
    """
    products = (node for node in graph if (node.domain, node.op_type) == (MICROSOFT, "MatMulNBits") and _tensors(node))
    for nodes in lists_by_key((_format(node), node) for node in products).values():
        for run in _adjacent_runs(nodes):
            if len(run) > 1:
                _join(graph, run)


def _format(node: ir.Node) -> tuple[object, ...]:
    sizes = {name: found.value for name, found in node.attributes.items() if name != "N"}
    kinds = [(tensor.dtype, tuple(tensor.shape[1:])) for tensor in _tensors(node)]
    return node.inputs[LEFT], tuple(sorted(sizes.items())), tuple(kinds), _input(node, BIAS) is None


def _tensors(node: ir.Node) -> list[ir.ExternalTensor]:
    """Codes, scales and zero points; empty if one is not mapped from a file, or is of a module that layers share."""
    values = [value for value in node.inputs[LEFT + 1 : BIAS] if value is not None]
    found = [value.const_value for value in values if len(value.uses()) == 1]
    mapped = [tensor for tensor in found if isinstance(tensor, ir.ExternalTensor)]
    return mapped if len(mapped) == len(values) else []


def _input(node: ir.Node, index: int) -> ir.Value | None:
    """None for an optional input that is left out, at the end of the list as within it."""
    return node.inputs[index] if len(node.inputs) > index else None


def _adjacent_runs(nodes: Sequence[ir.Node]) -> Iterator[list[ir.Node]]:
    """The products in the order of their codes, cut where the next one's are elsewhere."""
    run: list[ir.Node] = []
    for node in sorted(nodes, key=lambda node: (str(_tensors(node)[0].location), _tensors(node)[0].offset or 0)):
        pairs = list(zip(_tensors(run[-1]), _tensors(node), strict=True)) if run else []
        if not all(a.location == b.location and (a.offset or 0) + a.nbytes == b.offset for a, b in pairs):
            yield run
            run = []
        run.append(node)
    yield run


def _join(graph: ir.Graph, run: Sequence[ir.Node]) -> None:
    """One product for the rows of all, and a `Split` of its result."""
    first = next(node for node in graph if node in run)
    editor = NodeEditor(graph, first, (run[0].name or "").rpartition("/")[0] + "/joined", module_of=run[0])
    counts = [node.attributes.get_int("N", 0) for node in run]
    inputs = [run[0].inputs[LEFT], *(_joined(graph, [_input(node, at) for node in run]) for at in (1, 2, 3))]
    biases = [bias for node in run if (bias := _input(node, BIAS)) is not None]
    if biases:
        inputs += [None, editor.one("Concat", biases, {"axis": 0})]
    fields = {name: found.value for name, found in run[0].attributes.items()} | {"N": sum(counts)}
    product, results = editor.one("MatMulNBits", _given(*inputs), fields, domain=MICROSOFT), [n.outputs[0] for n in run]
    if sums := [both for node in run if (both := _sum(node))]:  # all have offsets, or none
        offsets = editor.one("Concat", [factor.inputs[1] for _, factor in sums], {"axis": 1})
        product = editor.one("Add", [product, editor.one("MatMul", [sums[0][1].inputs[0], offsets])])
        results = [total.outputs[0] for total, _ in sums]
    parts = editor.add("Split", [product, integers(graph, *counts)], {"axis": -1}, outputs=len(run))
    for result, part in zip(results, parts, strict=True):
        replace_value(result, part)


def _sum(product: ir.Node) -> tuple[ir.Node, ir.Node] | None:
    """The node that adds the part of offsets to a product, and that part; None for a product without offsets."""
    users = [node for node, _ in product.outputs[0].uses()]
    part = producer(users[0].inputs[1], "MatMul") if len(users) == 1 and users[0].op_type == "Add" else None
    return (users[0], part) if part and str(part.inputs[1] and part.inputs[1].name).endswith(OFFSETS) else None


def _joined(graph: ir.Graph, values: Sequence[ir.Value | None]) -> ir.Value | None:
    """One initializer over adjacent bytes; None for an input that all products leave out."""
    tensors = [value.const_value for value in values if value is not None]
    mapped = [tensor for tensor in tensors if isinstance(tensor, ir.ExternalTensor)]
    if not mapped:
        return None
    name = "+".join(str(tensor.name) for tensor in mapped)
    shape = ir.Shape((sum(tensor.shape.numpy()[0] for tensor in mapped), *mapped[0].shape[1:]))
    place = mapped[0].location, mapped[0].offset, sum(tensor.nbytes for tensor in mapped)
    content = ir.ExternalTensor(*place, mapped[0].dtype, shape=shape, name=name)
    graph.initializers[name] = ir.val(name, mapped[0].dtype, shape, const_value=content)
    return graph.initializers[name]


def grouped(
    graphs: Sequence[tuple[TracedGraph, Mapping[str, WeightSource]]], weights: Mapping[str, QuantizedWeight]
) -> dict[str, QuantizedWeight]:
    """The quantized weights, each with the group of weights of the same activation and format."""
    found = dict(weights)
    for traced, matches in graphs:
        for names in _groups(traced, matches, weights):
            if not any(found[name].group for name in names):
                found |= {name: replace(found[name], group=names) for name in names}
    return found


def _groups(
    traced: TracedGraph, matches: Mapping[str, WeightSource], weights: Mapping[str, QuantizedWeight]
) -> Iterator[tuple[str, ...]]:
    alike = defaultdict[tuple[object, ...], list[str]](list)
    for parameter, match in matches.items():
        uses = list(traced.weights[parameter].uses())
        if len(uses) != 1 or product_layout(uses[0].node) is None or not isinstance(match, StoredRows):
            continue
        weight = weights.get(match.name)
        if weight and match.is_whole and isinstance(weight.form, BlockFormat) and not weight.is_reordered:
            has_bias = len(uses[0].node.inputs) > 2
            alike[activation(uses[0].node), weight.form, weight.dtype, has_bias, weight.has_offsets].append(match.name)
    for names in alike.values():
        if len(set(names)) == len(names) > 1:
            yield tuple(names)


def activation(node: ir.Node) -> ir.Value:
    before, _ = reshapes(node)
    found = before.inputs[0] if before else node.inputs[0]
    assert found is not None
    return found


def reshapes(node: ir.Node) -> tuple[ir.Node | None, ir.Node | None]:
    """The `Reshape` of the left factor to a matrix, and that of the result back, if there are both."""
    before, uses = producer(node.inputs[0], "Reshape"), list(node.outputs[0].uses())
    if before is None or len(uses) != 1 or uses[0].node.op_type != "Reshape" or node.op_type != "Gemm":
        return None, None
    after = uses[0].node
    same = rank(before.inputs[0]) == rank(after.outputs[0]) != 0
    return (before, after) if same else (None, None)
