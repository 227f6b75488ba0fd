"""Which stored tensors can be quantized: those that the graphs only multiply with, or look up in a tied embedding."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import onnx_ir as ir

from llmconv.errors import InputRefused
from llmconv.export.node_editor import MICROSOFT
from llmconv.export.quantization.activation_range import ActivationRange
from llmconv.export.quantization.block_format import BlockFormat
from llmconv.export.quantization.block_rounding import NONE
from llmconv.export.quantization.column_factors import multiplied, stored_factors
from llmconv.export.quantization.column_format import ColumnFormat, WeightFormat
from llmconv.export.quantization.column_tensor import ColumnTensor
from llmconv.export.quantization.quantized_tensor import SCALES, QuantizedTensor
from llmconv.export.quantization.repacked_weight import RepackedWeight
from llmconv.export.quantization.rounded_codes import RoundedCodes
from llmconv.export.quantization.settings import INT8, QuantizationSettings
from llmconv.export.quantization.stored_formats import StoredFormats
from llmconv.export.traced_graph import TracedGraph
from llmconv.export.weights.experts import DOMAIN, GROUPED, output_parts
from llmconv.export.weights.parameter_sources import StoredRows, WeightSource, element, leaves
from llmconv.export.weights.stored_values import NAMES, ONNX_TYPES
from llmconv.files.safetensors_file import FileTensor
from llmconv.tensors import BY_NAME, Array, DType, LazyTensor

POINTWISE = {
    *("Softmax", "Sigmoid", "Tanh", "Softplus", "Exp", "Log", "Cast", "Reshape", "Unsqueeze", "Squeeze", "Transpose"),
    *("Add", "Sub", "Mul", "Div", "Neg", "Min", "Max", "Clip", "Where", "Identity", "Gather", "Slice"),
}
"""Operators between the scores of a router and its choice."""


@dataclass(frozen=True)
class QuantizedWeight:
    """How a stored tensor is quantized.

    Attributes:
        form: how codes are laid out, and their bits.
        transposed: its matrices are stored as [K, N].
        dtype: element type that the graphs multiply it in.
        kept: the codes that the checkpoint stores; None if they are rounded now, with scales of this `dtype`.
        activation: range of the activations it is multiplied with; None if that is found at run time.
        group: all tensors that are multiplied with the same activation and stored in this format; empty for one alone.
    """

    form: WeightFormat
    transposed: bool
    dtype: ir.DataType
    kept: RepackedWeight | None = None
    activation: ActivationRange | None = None
    rounded: RoundedCodes | None = None
    group: tuple[str, ...] = ()

    @property
    def scale_dtype(self) -> DType:
        """Element type of scales that are chosen now."""
        return BY_NAME[NAMES[self.dtype]]

    @property
    def is_searched(self) -> bool:
        """Whether its codes depend on the importance of its columns."""
        return self.kept is None and isinstance(self.form, BlockFormat) and self.form.search

    @property
    def is_reordered(self) -> bool:
        """Whether its columns are stored in another order."""
        return self.kept is not None and self.kept.order is not None

    def stored(
        self, name: str, tensor: LazyTensor, importance: Array = NONE, factors: Array = NONE
    ) -> dict[str, LazyTensor]:
        """Codes, zero points and scales of a tensor, by name.

        An empty `importance` means that all columns count alike; `factors` multiply the columns first, none if empty.
        """
        if self.rounded:
            return self.rounded.tensors(name)
        if factors.size:
            smaller = importance / factors.ravel() ** 2 if importance.size else NONE  # of what is divided by factors
            return {**self.stored(name, multiplied(tensor, factors), smaller), **stored_factors(name, factors)}
        scales, turned = self.scale_dtype, self.transposed
        if self.kept:  # float32 holds the scales of any dtype
            return self.kept.tensors(name, None if self.dtype == ir.DataType.FLOAT else scales)
        if isinstance(self.form, ColumnFormat):
            return ColumnTensor(name, tensor, transposed=turned).tensors()
        made = QuantizedTensor(name, tensor, self.form, transposed=turned, scale_dtype=scales, importance=importance)
        return made.tensors()

    def in_file(self, name: str) -> dict[str, FileTensor] | None:
        """Codes and scales over the checkpoint's own bytes; None if those are not what the graphs read."""
        found = self.kept.in_file(name) if self.kept else None
        if found and self.dtype not in (ir.DataType.FLOAT, ONNX_TYPES.get(found[name + SCALES].dtype.name)):
            return None
        return found


@dataclass(frozen=True)
class _Use:
    """A node that multiplies with parts of stored tensors; `parts` is empty for any other use of `names`."""

    names: frozenset[str]
    parameter: str
    parts: tuple[tuple[StoredRows, bool], ...] = ()
    dtype: ir.DataType = ir.DataType.FLOAT
    lookup: bool = False


def select(
    graphs: Sequence[tuple[TracedGraph, Mapping[str, WeightSource]]], settings: QuantizationSettings | StoredFormats
) -> dict[str, QuantizedWeight]:
    """The stored tensors to quantize, by name; InputRefused if the user's settings select none. Graphs are unbound."""
    uses, found = [], dict[str, QuantizedWeight]()
    for traced, matches in graphs:
        least = settings.least_elements(sum(prod(match.shape) for match in matches.values()))
        for use in _uses(traced, matches):
            uses.append(use)
            for rows, transposed in () if use.lookup else use.parts:
                form = _format(use, rows, transposed, traced, settings)
                kept = settings.stored(rows.name)
                if form and prod(rows.stored) >= least and (kept is None or kept.transposed == transposed):
                    known = found.get(rows.name)
                    best = max((form, known.form), key=_precedence) if known else form
                    found[rows.name] = QuantizedWeight(best, transposed, use.dtype, kept)
    _drop_unfit(found, uses)
    if not found and isinstance(settings, QuantizationSettings):
        raise InputRefused(
            "no weight of this model can be quantized with these options",
            hint="give a smaller `--quant-block`, or fewer `--quant-exclude`",
        )
    return found


def _format(
    use: _Use, rows: StoredRows, transposed: bool, traced: TracedGraph, settings: QuantizationSettings | StoredFormats
) -> WeightFormat | None:
    index = re.match(rf"{re.escape(traced.layers_name)}\.(\d+)\.", use.parameter)
    layer = int(index[1]) if index else None
    form = settings.format_of(rows.name, use.parameter, layer, traced.num_layers)
    columns = rows.stored[-2] if transposed else rows.stored[-1]
    is_cut = isinstance(form, ColumnFormat) and not (rows.is_whole or rows.single)
    if is_cut and isinstance(settings, QuantizationSettings):
        form = replace(INT8, size=settings.block or INT8.size)  # rows of the weight are not adjacent in [K, N]
    return form if form and (columns >= form.size or settings.stored(rows.name)) else None


def _precedence(form: WeightFormat) -> tuple[int, bool]:
    """Of two formats for one tensor, the larger counts: more bits, and blocks, which can be cut into rows."""
    return form.bits, isinstance(form, BlockFormat)


def _drop_unfit(found: dict[str, QuantizedWeight], uses: Sequence[_Use]) -> None:
    """Drops tensors with another use, another orientation or dtype, and those multiplied together with such."""
    while True:
        unfit = {name for use in uses if not _is_served(use, found) for name in use.names}
        if not unfit & found.keys():
            return
        for name in unfit:
            found.pop(name, None)


def _is_served(use: _Use, found: Mapping[str, QuantizedWeight]) -> bool:
    """Whether a node can read the codes of all its tensors."""
    if use.lookup:
        return all(
            name not in found or (not found[name].transposed and _can_look_up(found[name], use)) for name in use.names
        )
    return bool(use.parts) and all(
        rows.name in found and found[rows.name].transposed == transposed and found[rows.name].dtype == use.dtype
        for rows, transposed in use.parts
    )


def _can_look_up(weight: QuantizedWeight, use: _Use) -> bool:
    """`GatherBlockQuantized` takes rows of whole blocks, in their own order."""
    return (
        isinstance(weight.form, BlockFormat)
        and not weight.is_reordered
        and all(rows.stored[-1] % weight.form.size == 0 for rows, _ in use.parts)
    )


def _uses(traced: TracedGraph, matches: Mapping[str, WeightSource]) -> Iterator[_Use]:
    for parameter, match in matches.items():
        value = traced.weights[parameter]
        for node, index in value.uses():
            yield _use(parameter, match, value, node, index)


def _use(parameter: str, match: WeightSource, value: ir.Value, node: ir.Node, index: int) -> _Use:
    names = frozenset(leaf.name for leaf in leaves(match))
    dtype = value.dtype or ir.DataType.FLOAT
    is_lookup = node.op_type == "Gather" and index == 0 and node.attributes.get_int("axis", 0) == 0
    if is_lookup and isinstance(match, StoredRows) and match.is_whole:
        return _Use(names, parameter, ((match, False),), dtype, lookup=True)
    is_transposed = product_layout(node) if index == 1 else None
    if is_transposed is None or leads_to_choice(node):
        return _Use(names, parameter)
    grouped = (node.domain, node.op_type) == (DOMAIN, GROUPED)
    matrices = [element(match, at) for at in range(match.shape[0])] if grouped else [match]
    parts = [part for matrix in matrices for part in output_parts(matrix, is_transposed)]
    stored = tuple((rows, not transB) for rows, transB in parts if isinstance(rows, StoredRows))
    fits = len(stored) == len(parts) and all(_is_matrix(rows, transposed) for rows, transposed in stored)
    return _Use(names, parameter, stored if fits else (), dtype)


def _is_matrix(rows: StoredRows, transposed: bool) -> bool:
    """Whether the rows are a matrix of which every row of the product's result has its own codes."""
    return len(rows.shape) == 2 and (not transposed or rows.single or rows.is_whole)


def product_layout(node: ir.Node) -> bool | None:
    """Whether the second factor of a product is [K, N] and not [N, K]; None for another node, or a scaled product."""
    kind = node.domain, node.op_type
    if kind == ("", "MatMul"):
        return True
    if kind == (DOMAIN, GROUPED):
        return not node.attributes["transB"].as_int()
    if kind not in {("", "Gemm"), (MICROSOFT, "FusedMatMul")}:
        return None
    scales = [node.attributes.get_float(name, 1.0) for name in ("alpha", "beta")]
    odd = [node.attributes.get_int(name, 0) for name in ("transA", "transBatchA", "transBatchB")]
    return None if any(odd) or scales != [1.0, 1.0] else not node.attributes.get_int("transB", 0)


def leads_to_choice(node: ir.Node) -> bool:
    """Whether a product is of a router: its result decides, element by element, which experts are chosen."""
    waiting, seen = [node], {node}
    while waiting:
        for output in waiting.pop().outputs:
            for user, _ in output.uses():
                if user.op_type == "TopK":
                    return True
                if user.op_type in POINTWISE and user not in seen:
                    seen.add(user)
                    waiting.append(user)
    return False
