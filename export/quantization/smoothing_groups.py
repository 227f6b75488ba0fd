"""Which norms can be divided by factors that the matrices behind them are multiplied with, without another result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from llmconv.export.node_editor import MICROSOFT
from llmconv.export.quantization.selection import product_layout
from llmconv.export.traced_graph import TracedGraph
from llmconv.export.weights.experts import output_parts
from llmconv.export.weights.parameter_sources import StoredRows, WeightSource, leaves

NORMS = {
    ("", "RMSNormalization"): slice(1, 2),
    ("", "LayerNormalization"): slice(1, 3),
    (MICROSOFT, "SkipSimplifiedLayerNormalization"): slice(2, 3),
}
"""Operators whose first result is proportional to vectors, and which inputs these are: weight, and bias after it."""

Graphs = Sequence[tuple[TracedGraph, Mapping[str, WeightSource]]]
"""Graphs, their weights still inputs, and the stored tensors of each weight."""


@dataclass(frozen=True)
class SmoothingGroup:
    """A norm, and all matrices that its result is multiplied with.

    `norms` names the stored vectors [K] of the norm: its weight, and its bias if it has one. `matrices` are names of
    stored matrices, and whether each is [K, N] and not [N, K].
    """

    norms: tuple[str, ...]
    matrices: tuple[tuple[str, bool], ...]

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return {*self.norms, *(name for name, _ in self.matrices)}


def smoothing_groups(graphs: Graphs, coded: Container[str]) -> list[SmoothingGroup]:
    """The norms whose result has no other use than products with `coded` matrices, which can take factors.

    A norm that adds 1 to its weight (Gemma) is not among them: the quotient minus 1 would be rounded.
    """
    found = [(set(_groups(traced, matches, coded)), _names(matches)) for traced, matches in graphs]
    every = dict.fromkeys(group for traced, matches in graphs for group in _groups(traced, matches, coded))
    return [group for group in every if all(group in own or not group.names & names.keys() for own, names in found)]


def _names(matches: Mapping[str, WeightSource]) -> Counter[str]:
    """How many weights of a graph contain each stored tensor."""
    return Counter(name for match in matches.values() for name in {leaf.name for leaf in leaves(match)})


def _groups(traced: TracedGraph, matches: Mapping[str, WeightSource], coded: Container[str]) -> list[SmoothingGroup]:
    sources = {traced.weights[parameter]: match for parameter, match in matches.items()}
    counts = _names(matches)
    found = []
    for node in traced.model.graph:
        group = _group(node, sources, coded) if (node.domain, node.op_type) in NORMS else None
        if group and all(counts[name] == 1 for name in group.names):
            found.append(group)
    return found


def _group(node: ir.Node, sources: Mapping[ir.Value, WeightSource], coded: Container[str]) -> SmoothingGroup | None:
    vectors = [value for value in node.inputs[NORMS[node.domain, node.op_type]] if value is not None]
    stored = [_only_use(value, sources) for value in vectors]
    products = _products(node.outputs[0])
    if not products or not all(isinstance(one, StoredRows) and one.is_whole for one in stored):
        return None
    norms = [one for one in stored if isinstance(one, StoredRows)]
    matrices: list[tuple[str, bool]] = []
    for product in products:
        match, layout = _only_use(product.inputs[1], sources), product_layout(product)
        if match is None or layout is None:
            return None
        for rows, transB in output_parts(match, layout):
            if not _is_coded(rows, coded) or [rows.shape[-1 if transB else 0]] != list(norms[0].shape):
                return None
            matrices.append((next(leaves(rows)).name, not transB))
    return SmoothingGroup(tuple(one.name for one in norms), tuple(matrices))


def _only_use(value: ir.Value | None, sources: Mapping[ir.Value, WeightSource]) -> WeightSource | None:
    """The stored tensors of a weight that one node reads; None for another value."""
    return sources.get(value) if value is not None and len(value.uses()) == 1 else None


def _is_coded(rows: WeightSource, coded: Container[str]) -> bool:
    """Whether a product reads a whole matrix that can be multiplied with factors."""
    return isinstance(rows, StoredRows) and rows.is_whole and len(rows.shape) == 2 and rows.name in coded


def _products(value: ir.Value) -> list[ir.Node]:
    """The products that a value is the first factor of, reshaped or not; none if it has another use."""
    found: list[ir.Node] = []
    waiting = [value]
    while waiting:
        current = waiting.pop()
        if current.is_graph_output():
            return []
        for node, index in current.uses():
            if index == 0 and node.op_type == "Reshape" and not node.domain:
                waiting.append(node.outputs[0])
            elif index == 0 and node.domain in ("", MICROSOFT) and product_layout(node) is not None:
                found.append(node)
            else:
                return []
    return found
