"""Which quantized weights are multiplied with one activation, as q, k and v: their codes are stored side by side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import onnx_ir as ir

from llmconv.export.node_editor import producer, rank
from llmconv.export.quantization.block_format import BlockFormat
from llmconv.export.quantization.selection import QuantizedWeight, product_layout
from llmconv.export.traced_graph import TracedGraph
from llmconv.export.weights.parameter_sources import StoredRows, WeightSource


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
    """Names of two weights or more, each used once."""
    alike = defaultdict[tuple[object, ...], list[str]](list)
    for parameter, match in matches.items():
        uses = list(traced.weights[parameter].uses())
        if len(uses) != 1 or product_layout(uses[0].node) is None or not isinstance(match, StoredRows):
            continue
        weight = weights.get(match.name)
        if weight and match.is_whole and isinstance(weight.form, BlockFormat) and not weight.is_reordered:
            has_bias = len(uses[0].node.inputs) > 2
            alike[activation(uses[0].node), weight.form, weight.dtype, has_bias].append(match.name)
    for names in alike.values():
        if len(set(names)) == len(names) > 1:
            yield tuple(names)


def activation(node: ir.Node) -> ir.Value:
    """The first factor of a product, before it is reshaped to a matrix."""
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
