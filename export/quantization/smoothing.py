"""Smoothing: factors that move the range of activations into the weights they are multiplied with (`--calibrate`).

A channel with outliers makes the one scale of an activation coarse for all others. So the norm that makes it is divided
by a factor per channel, and the columns of the matrices behind it are multiplied with the same one:
`s = max|x| ** 0.5 / max|w| ** 0.5` (SmoothQuant, Xiao et al., arXiv:2211.10438, equation 4, alpha 0.5), rounded to a
power of two, so that both are exact in floating point and the model stays the same function.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from llmconv.export.quantization.block_rounding import ColumnFormat, WeightFormat
from llmconv.export.quantization.calibration import TextRun, largest_of, require_finite
from llmconv.export.quantization.quantized_tensor import FLOAT32, stored_factors
from llmconv.export.quantization.selection import QuantizedWeight, product_layout
from llmconv.export.traced_graph import MICROSOFT, NodeEditor, TracedGraph, integers
from llmconv.export.weights import StoredRows, WeightSource, leaves, output_parts
from llmconv.progress import warn
from llmconv.tensors import Array, DType, LazyTensor, in_memory

LARGEST = 24  # the largest exponent of a factor, positive or negative


@dataclass(frozen=True)
class Smoothing:
    """Powers of two by names of stored tensors, float32, which broadcast over them."""

    # multiply matrices before they are rounded: [K], or [K, 1] for one that is stored as [K, N]
    matrices: Mapping[str, Array] = field(default_factory=dict)
    norms: Mapping[str, Array] = field(default_factory=dict)  # divide norms: [K]
    # multiply outputs of matrices, by the reciprocals: [N, 1], or [N] for one that is stored as [K, N]
    outputs: Mapping[str, Array] = field(default_factory=dict)

    @classmethod
    def of(cls, found: Iterable[tuple[SmoothingGroup, Array]]) -> Smoothing:
        matrices: dict[str, Array] = {}
        norms: dict[str, Array] = {}
        outputs: dict[str, Array] = {}
        for group, factors in found:
            matrices |= {name: factors[:, None] if turned else factors for name, turned in group.matrices}
            norms |= dict.fromkeys(group.norms, factors)
            outputs |= {name: 1 / (factors if turned else factors[:, None]) for name, turned in group.outputs}
        return cls(matrices, norms, outputs)

    def norm(self, name: str, tensor: LazyTensor) -> dict[str, LazyTensor]:
        """The quotient of a vector and its factors in float32, and the factors, by name."""
        factors = self.norms[name]
        quotient = (tensor.read().astype(np.float32) / factors).astype(np.float32)
        return {name: in_memory(quotient, FLOAT32), **stored_factors(name, factors)}


def coded(quantized: Mapping[str, QuantizedWeight], form: type[WeightFormat]) -> set[str]:
    """The names of the weights of a format whose codes are made anew."""
    return {name for name, weight in quantized.items() if isinstance(weight.form, form) and weight.kept is None}


def measure_smoothing(graphs: Graphs, quantized: Mapping[str, QuantizedWeight], run: TextRun) -> Smoothing:
    """Factors of weights whose activations are rounded with one scale, and of the norms before them.

    Reads their weights once. InputRefused if activations are not finite.
    """
    if not (columns := coded(quantized, ColumnFormat)):
        return Smoothing()
    if not (groups := smoothing_groups(graphs, columns)):
        warn("SmoothQuant does not fit this model (no norm can be divided): `--calibrate` has no effect on `a8w8`")
    names = {group: group.matrices[0][0] for group in groups}
    largest = largest_of(run.reduced(_largest, set(names.values()))) if names else {}
    measured = [(group, name) for group, name in names.items() if name in largest]
    return Smoothing.of((group, _factors(largest[name], group, run.tensors)) for group, name in measured)


def _largest(editor: NodeEditor, values: ir.Value) -> ir.Value:
    return editor.one("ReduceMax", [editor.one("Abs", [values]), integers(editor.graph, 0)], {"keepdims": 0})


def _factors(inputs: Array, group: SmoothingGroup, tensors: Mapping[str, LazyTensor]) -> Array:
    """Powers of two float32 [K]; 1 where a channel is zero, or the norm's quotient would be rounded."""
    require_finite(group.matrices[0][0], inputs)
    weights = np.zeros(inputs.shape, np.float32)
    for name, turned in group.matrices:
        tensor = tensors[name]
        for start, stop in tensor.blocks():
            rows = np.abs(tensor.rows(start, stop).astype(np.float32))
            part = weights[start:stop] if turned else weights
            np.maximum(part, rows.max(axis=1 if turned else 0), out=part)
    with np.errstate(divide="ignore", invalid="ignore"):
        exponents = (np.log2(inputs) - np.log2(weights)) / 2
    return exact_factors(exponents, group, tensors, FLOAT32)


def exact_factors(exponents: Array, group: SmoothingGroup, tensors: Mapping[str, LazyTensor], dtype: DType) -> Array:
    """Powers of two float32 [K]; 1 where the exponent is not finite, or the norm's quotient would be rounded.

    Exponents [K] are rounded to the nearest integers; the graphs have the group's norm in `dtype`.
    """
    whole = np.clip(np.rint(exponents), -LARGEST, LARGEST)
    factors = np.ldexp(np.float32(1), np.where(np.isfinite(whole), whole, 0).astype(np.int32))
    for name in group.norms:
        values = tensors[name].read().astype(np.float32)
        for kind in (FLOAT32, dtype):
            with np.errstate(all="ignore"):
                quotients = (values / factors).astype(kind.numpy).astype(np.float32)
                is_exact = quotients * factors == values.astype(kind.numpy).astype(np.float32)
            factors = np.where(is_exact, factors, np.float32(1))
    return factors.astype(np.float32)


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
    """A norm, and all matrices that its result is multiplied with; or instead of a norm the matrix of a gated unit."""

    norms: tuple[str, ...]  # names of the stored vectors [K] of the norm: its weight, and its bias if it has one
    matrices: tuple[tuple[str, bool], ...]  # names of stored matrices, and whether each is [K, N] and not [N, K]
    outputs: tuple[tuple[str, bool], ...] = ()  # the same of the matrix whose output is divided, without a norm

    @property
    def names(self) -> set[str]:
        return {*self.norms, *(name for name, _ in (*self.matrices, *self.outputs))}


def smoothing_groups(graphs: Graphs, coded: Container[str], *, gated: bool = False) -> list[SmoothingGroup]:
    """The norms whose result has no other use than products with `coded` matrices, which can take factors.

    A norm that adds 1 to its weight (Gemma) is not among them: the quotient minus 1 would be rounded. `gated`: also
    `coded` matrices without a bias, whose output is gated and then has no other use (`down(f(gate(x)) * up(x))`).
    """
    found = [(set(_groups(traced, matches, coded, gated)), _names(matches)) for traced, matches in graphs]
    every = dict.fromkeys(group for traced, matches in graphs for group in _groups(traced, matches, coded, gated))
    return [group for group in every if all(group in own or not group.names & names.keys() for own, names in found)]


def _names(matches: Mapping[str, WeightSource]) -> Counter[str]:
    return Counter(name for match in matches.values() for name in {leaf.name for leaf in leaves(match)})


def _groups(
    traced: TracedGraph, matches: Mapping[str, WeightSource], coded: Container[str], gated: bool
) -> list[SmoothingGroup]:
    sources = {traced.weights[parameter]: match for parameter, match in matches.items()}
    counts = _names(matches)
    found = []
    for node in traced.model.graph:
        kind = node.domain, node.op_type
        of_kind = _group if kind in NORMS else _gated if gated and kind == ("", "Mul") else None
        group = of_kind(node, sources, coded) if of_kind else None
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
    matrices = _coded(products, sources, coded)
    if not matrices or any(list(norms[0].shape) != [inputs] for _, _, inputs, _ in matrices):
        return None
    return SmoothingGroup(tuple(one.name for one in norms), tuple(one[:2] for one in matrices))


def _gated(node: ir.Node, sources: Mapping[ir.Value, WeightSource], coded: Container[str]) -> SmoothingGroup | None:
    """The group of a product of two vectors, one of which is the output of a matrix without a bias."""
    if not (matrices := _coded(_products(node.outputs[0]), sources, coded)):
        return None
    for value in node.inputs:
        before = _product_before(value)
        made = _coded([before], sources, coded) if before else []
        if len(made) == 1 and all(inputs == made[0][3] for _, _, inputs, _ in matrices):
            return SmoothingGroup((), tuple(one[:2] for one in matrices), (made[0][:2],))
    return None


def _product_before(value: ir.Value | None) -> ir.Node | None:
    """The product without a bias whose result a value is, reshaped or not; None if any of it has another use."""
    while value is not None and len(value.uses()) == 1 and not value.is_graph_output():
        node = value.producer()
        if node is None or node.domain not in ("", MICROSOFT):
            return None
        if product_layout(node) is not None:
            return node if all(one is None for one in node.inputs[2:]) else None
        if node.op_type != "Reshape" or node.domain:
            return None
        value = node.inputs[0]
    return None


def _coded(
    products: Sequence[ir.Node], sources: Mapping[ir.Value, WeightSource], coded: Container[str]
) -> list[tuple[str, bool, int, int]]:
    """Name, whether it is [K, N], K and N of all matrices of products; none if one of them is not whole and coded."""
    found: list[tuple[str, bool, int, int]] = []
    for product in products:
        match, layout = _only_use(product.inputs[1], sources), product_layout(product)
        if match is None or layout is None:
            return []
        for rows, transB in output_parts(match, layout):
            is_coded = isinstance(rows, StoredRows) and rows.is_whole and len(rows.shape) == 2 and rows.name in coded
            if not is_coded:
                return []
            outputs, inputs = rows.shape if transB else rows.shape[::-1]
            found.append((next(leaves(rows)).name, not transB, inputs, outputs))
    return found


def _only_use(value: ir.Value | None, sources: Mapping[ir.Value, WeightSource]) -> WeightSource | None:
    """The stored tensors of a weight that one node reads; None for another value."""
    return sources.get(value) if value is not None and len(value.uses()) == 1 else None


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
