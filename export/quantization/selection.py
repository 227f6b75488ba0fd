"""Which weights become codes, and how: by the settings, the layout of a stored code, and the ranges of activations.

Toolchains for NPUs read `QuantizeLinear` and `DequantizeLinear` with constant scale and zero point (ONNX,
docs/Operators.md); runtimes fuse them with the product that follows.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir

from llmconv.errors import InputRefused
from llmconv.export.export_options import QuantizedSizes
from llmconv.export.quantization.block_rounding import BITS, NONE, BlockFormat, ColumnFormat, WeightFormat, pack
from llmconv.export.quantization.quantized_tensor import (
    CODES,
    IMPORTANCE,
    OFFSETS,
    ORDER,
    OUTPUTS,
    SCALES,
    SMOOTHING,
    ZEROS,
    ColumnTensor,
    QuantizedTensor,
    RoundedCodes,
    byte_shapes,
    multiplied,
    require_kept,
    squares_lost,
    stored_factors,
    stored_scales,
)
from llmconv.export.quantization.settings import INT8, QuantizationSettings
from llmconv.export.traced_graph import MICROSOFT, NodeEditor, TracedGraph, constant
from llmconv.export.weights import (
    DOMAIN,
    GROUPED,
    NAMES,
    ONNX_TYPES,
    StoredRows,
    WeightSource,
    element,
    leaves,
    output_parts,
)
from llmconv.files.safetensors_file import FileTensor
from llmconv.quantized_weights.packed_weight import IntegerCodes, tiled
from llmconv.quantized_weights.quantized_checkpoint import QuantizedCheckpoint
from llmconv.tensors import BY_NAME, Array, DType, LazyTensor, in_memory

STEPS = 255  # between the smallest and the largest code of uint8


@dataclass(frozen=True)
class ActivationRange:
    """A value is `(code - zero) * scale` (float32), with codes of 0 to 255; `zero` is the code of 0."""

    scale: float
    zero: int

    @classmethod
    def of(cls, low: float, high: float) -> ActivationRange:
        """The range from `low` to `high`, extended to contain 0; scale 1 if that is all it contains."""
        low, high = min(low, 0.0), max(high, 0.0)
        scale = float(np.float32((high - low) / STEPS)) or 1.0
        return cls(scale, int(np.clip(np.rint(-low / scale), 0, STEPS)))

    def rounded(self, editor: NodeEditor, value: ir.Value, name: str) -> ir.Value:
        """A float32 value, rounded in this range; all its readers share the nodes.

        The constants are called `{name}.input_scale` and `{name}.input_zero`.
        """
        known = [node.outputs[0] for node, at in value.uses() if node.op_type == "QuantizeLinear" and at == 0]
        if known:
            return next(node.outputs[0] for node, _ in known[0].uses())
        scale = constant(editor.graph, f"{name}.input_scale", np.array(self.scale, np.float32))
        zero = constant(editor.graph, f"{name}.input_zero", np.array(self.zero, np.uint8))
        return editor.one("DequantizeLinear", [editor.one("QuantizeLinear", [value, scale, zero]), scale, zero])


POINTWISE = {  # operators between the scores of a router and its choice
    *("Softmax", "Sigmoid", "Tanh", "Softplus", "Exp", "Log", "Cast", "Reshape", "Unsqueeze", "Squeeze", "Transpose"),
    *("Add", "Sub", "Mul", "Div", "Neg", "Min", "Max", "Clip", "Where", "Identity", "Gather", "Slice"),
}


@dataclass(frozen=True)
class QuantizedWeight:
    """How a stored tensor is quantized."""

    form: WeightFormat  # how codes are laid out, and their bits
    transposed: bool  # its matrices are stored as [K, N]
    dtype: ir.DataType  # element type that the graphs multiply it in
    # the codes that the checkpoint stores; None if they are rounded now, with scales of this `dtype`
    kept: RepackedWeight | None = None
    # range of the activations it is multiplied with; None if that is found at run time
    activation: ActivationRange | None = None
    rounded: RoundedCodes | None = None
    # all tensors that are multiplied with the same activation and stored in this format; empty for one alone
    group: tuple[str, ...] = ()

    @property
    def scale_dtype(self) -> DType:
        return BY_NAME[NAMES[self.dtype]]

    @property
    def is_searched(self) -> bool:
        return self.kept is None and isinstance(self.form, BlockFormat) and self.form.search

    @property
    def has_offsets(self) -> bool:
        return self.kept is not None and self.kept.integers.offsets is not None

    @property
    def is_reordered(self) -> bool:
        return self.kept is not None and self.kept.order is not None

    def stored(
        self, name: str, tensor: LazyTensor, importance: Array = NONE, factors: Array = NONE, outputs: Array = NONE
    ) -> dict[str, LazyTensor]:
        """Codes, zero points and scales of a tensor, by name.

        An empty `importance` means that all columns count alike; `factors` multiply the columns first, `outputs` the
        outputs, none if empty.
        """
        if self.rounded:
            return self.rounded.tensors(name)
        if outputs.size:
            rest = self.stored(name, multiplied(tensor, outputs), importance, factors)
            return {**rest, **stored_factors(name, outputs, OUTPUTS)}
        if factors.size:
            squares = factors.reshape(importance.shape) ** 2 if importance.size else NONE
            smaller = importance / squares if importance.size else NONE  # of what is divided by factors
            return {**self.stored(name, multiplied(tensor, factors), smaller), **stored_factors(name, factors)}
        scales, turned = self.scale_dtype, self.transposed
        if self.kept:  # float32 holds the scales of any dtype
            return self.kept.tensors(name, None if self.dtype == ir.DataType.FLOAT else scales)
        if isinstance(self.form, ColumnFormat):
            return ColumnTensor(name, tensor, transposed=turned).tensors()
        made = QuantizedTensor(name, tensor, self.form, transposed=turned, scale_dtype=scales, importance=importance)
        known = stored_factors(name, importance, IMPORTANCE) if importance.size and self.form.search else {}
        return {**made.tensors(), **known}

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
    uses, found = list[_Use](), dict[str, QuantizedWeight]()
    for traced, matches in graphs:
        least = settings.least_elements(sum(prod(match.shape) for match in matches.values()))
        every = [(parameter, *use) for parameter in matches for use in traced.weights[parameter].uses()]
        mine = [_use(one, matches[one], traced.weights[one], node, index) for one, node, index in every]
        looked_up = {name for use in mine if use.lookup for name in use.names}
        uses += mine
        for use in mine:
            # an embedding alone is not rounded, but stays as it is stored
            for rows, transposed in use.parts if not use.lookup or settings.stored(use.parts[0][0].name) else ():
                form = _format(use, rows, transposed, traced, settings, tied=rows.name in looked_up)
                kept = settings.stored(rows.name)
                if form and prod(rows.stored) >= least and (kept is None or kept.transposed == transposed):
                    known = [found[rows.name].form] if rows.name in found else []
                    # the larger counts: more bits, and blocks, which can be cut into rows
                    best = max([form, *known], key=lambda one: (one.bits, isinstance(one, BlockFormat)))
                    found[rows.name] = QuantizedWeight(best, transposed, use.dtype, kept)
    while True:  # drops tensors with another use, another orientation or dtype, and those multiplied with such
        unfit = {name for use in uses if not _is_served(use, found) for name in use.names}
        if not unfit & found.keys():
            break
        found = {name: weight for name, weight in found.items() if name not in unfit}
    if not found and isinstance(settings, QuantizationSettings):
        raise InputRefused(
            "no weight of this model can be quantized with these options",
            hint="give a smaller `--quant-block`, or fewer `--quant-exclude`",
        )
    return found


def _format(
    use: _Use,
    rows: StoredRows,
    transposed: bool,
    traced: TracedGraph,
    settings: QuantizationSettings | StoredFormats,
    *,
    tied: bool,
) -> WeightFormat | None:
    index = re.match(rf"{re.escape(traced.layers_name)}\.(\d+)\.", use.parameter)
    layer = int(index[1]) if index else None
    form = settings.format_of(rows.name, use.parameter, layer, traced.num_layers, tied=tied)
    columns = rows.stored[-2] if transposed else rows.stored[-1]
    is_cut = isinstance(form, ColumnFormat) and not (rows.is_whole or rows.single)
    if is_cut and isinstance(settings, QuantizationSettings):
        form = replace(INT8, size=settings.block or INT8.size)  # rows of the weight are not adjacent in [K, N]
    return form if form and (columns >= form.size or settings.stored(rows.name)) else None


def _is_served(use: _Use, found: Mapping[str, QuantizedWeight]) -> bool:
    """Whether a node can read the codes of all its tensors.

    `GatherBlockQuantized` takes rows of whole blocks, in their own order.
    """
    if use.lookup:
        weights = [found[name] for name in use.names if name in found]
        return all(
            isinstance(weight.form, BlockFormat)
            and not (weight.transposed or weight.is_reordered)
            and all(rows.stored[-1] % weight.form.size == 0 for rows, _ in use.parts)
            for weight in weights
        )
    return bool(use.parts) and all(
        rows.name in found and found[rows.name].transposed == transposed and found[rows.name].dtype == use.dtype
        for rows, transposed in use.parts
    )


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
    fits = len(stored) == len(parts) and all(  # every row of the product's result has its own codes
        len(rows.shape) == 2 and (not turned or rows.single or rows.is_whole) for rows, turned in stored
    )
    return _Use(names, parameter, stored if fits else (), dtype)


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


@dataclass(frozen=True, eq=False)
class RepackedWeight:
    """A weight of a quantized checkpoint: its codes as stored, and its layout in the new file.

    `order` int32 [K] is the stored column of each column of codes, None where they are in their own order. If
    `symmetric`, all zero points are the middle code.
    """

    integers: IntegerCodes
    form: BlockFormat
    order: Array | None

    @property
    def transposed(self) -> bool:
        return self.integers.turned

    def tensors(self, name: str, scale_dtype: DType | None = None) -> dict[str, LazyTensor]:
        """Codes, zero points, scales (None: as stored) and column order by name, as in `QuantizedTensor.tensors`."""
        outer, columns = self.integers.shape[:-1], self.integers.shape[-1]
        dtype, readers = scale_dtype or self.integers.scale_dtype, {CODES: self._codes, ZEROS: self._zeros}
        shapes = byte_shapes(outer, columns, self.form)
        made = {suffix: LazyTensor(BY_NAME["uint8"], shape, readers[suffix]) for suffix, shape in shapes}
        made[CODES] = tiled(made[CODES], prod(self.integers.shape[1:]))

        def scales(start: int, stop: int) -> Array:
            if start == 0 and dtype != self.integers.scale_dtype:
                whole = self.integers.scales(0, outer[0])
                require_kept(squares_lost(whole, stored_scales(whole, dtype, name, kept=True)), dtype, name, kept=True)
            return stored_scales(self.integers.scales(start, stop)[..., self._block_groups], dtype, name, kept=True)

        made[SCALES] = LazyTensor(dtype, (*outer, self.form.blocks(columns)), scales)
        if self.order is not None:
            made[ORDER] = in_memory(self.order, BY_NAME["int32"])
        if self.integers.offsets is not None:
            shape = (self.form.blocks(columns), outer[0])
            made[OFFSETS] = LazyTensor(BY_NAME["float32"], shape, lambda start, stop: self._offsets[start:stop])
        return {name + suffix: tensor for suffix, tensor in made.items()}

    def in_file(self, name: str) -> dict[str, FileTensor] | None:
        """The same tensors over the checkpoint's own bytes; None if those differ.

        Raises MalformedInput: scales that are not finite, or so large that values are not.
        """
        known, form = self.integers.in_file, self.form
        rows, columns = self.integers.shape[-2:]
        fits = form.bits == self.integers.bits and columns % form.size == 0 and self.order is None
        if not known or not fits or known[1].shape[-1] != form.blocks(columns):
            return None
        self.integers.scales(0, rows)  # graphs map them unread
        shape = rows, form.blocks(columns), form.block_bytes
        codes = FileTensor(known[0].path, known[0].offset, BY_NAME["uint8"], shape, known[0].record)
        return {name + CODES: codes, name + SCALES: known[1]}

    @property
    def _offsets(self) -> Array:
        """What is added to the values of each block, float32 [blocks, N]: the second factor of a product."""
        assert self.integers.offsets is not None
        return np.ascontiguousarray(self.integers.offsets()[:, self._block_groups].T)

    @property
    def _block_groups(self) -> Array:
        groups = self.integers.groups
        return (groups if self.order is None else groups[self.order])[:: self.form.size]

    def _codes(self, start: int, stop: int) -> Array:
        codes, form = self.integers.codes(start, stop), self.form
        if self.order is not None:
            codes = codes[..., self.order]
        if missing := -codes.shape[-1] % form.size:
            codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, missing)])
        return pack(codes.reshape(-1, form.size), form.bits).reshape(*codes.shape[:-1], -1, form.block_bytes)

    def _zeros(self, start: int, stop: int) -> Array:
        return np.ascontiguousarray(pack(zero_points(self.integers)[start:stop][:, self._block_groups], self.form.bits))


def repacked(integers: IntegerCodes) -> RepackedWeight | None:
    """The codes in blocks, or None if onnxruntime has no operator for groups like these."""
    order = None if (np.diff(integers.groups) >= 0).all() else np.argsort(integers.groups, kind="stable")
    if not integers.has_operator or (size := integers.block_size) is None:
        return None
    bits = next(bits for bits in BITS if bits >= integers.bits)
    middle = 1 << (bits - 1)
    symmetric = bits == integers.bits and (integers.zeros is None or bool((zero_points(integers) == middle).all()))
    form = BlockFormat(bits, size, symmetric, search=False)
    return RepackedWeight(integers, form, None if order is None else order.astype(np.int32))


def zero_points(integers: IntegerCodes) -> Array:
    """All zero points, uint8 [N, groups]."""
    if integers.zeros is None:
        return np.full((integers.shape[-2], int(integers.groups.max()) + 1), 1 << (integers.bits - 1), np.uint8)
    return integers.zeros()


@dataclass(frozen=True)
class StoredFormats:
    """The formats of the weights of a quantized checkpoint, by name."""

    method: str  # such as `gptq`
    # None for codes that onnxruntime has no operator for, which are quantized again to 8 bits
    weights: Mapping[str, RepackedWeight | None]

    @classmethod
    def of(cls, checkpoint: QuantizedCheckpoint) -> StoredFormats:
        """The formats of all its quantized weights; reads zero points and orders of columns, but no codes."""
        found = {name: weight.integers for name, weight in checkpoint.weights.items()}
        return cls(checkpoint.method.name, {name: repacked(one) if one else None for name, one in found.items()})

    @property
    def without_operator(self) -> list[str]:
        """The weights that are quantized again."""
        return [name for name, weight in self.weights.items() if weight is None]

    def format_of(
        self, name: str, parameter: str, layer: int | None, layers: int, *, tied: bool = False
    ) -> BlockFormat | None:
        if name not in self.weights:
            return None
        weight = self.weights[name]
        return weight.form if weight else INT8

    def stored(self, name: str) -> RepackedWeight | None:
        """The codes of a weight that are kept; None if it is quantized again."""
        return self.weights.get(name)

    def least_elements(self, total: int) -> float:
        return 0

    def manifest_fields(self) -> dict[str, Any]:
        return {"quant": self.method}


def quantized_sizes(
    quantized: Mapping[str, QuantizedWeight], before: Mapping[str, LazyTensor], after: Mapping[str, LazyTensor]
) -> QuantizedSizes:
    """The sizes of an export, by the tensors of the model (`before`) and those stored instead (`after`)."""
    parts = [name + suffix for name in quantized for suffix in (CODES, ZEROS, SCALES, ORDER, OFFSETS)]
    forms = [weight.form for weight in quantized.values()]
    kinds = [(form.bits, 0 if isinstance(form, ColumnFormat) else form.size) for form in forms]
    return QuantizedSizes(
        dict(Counter(kinds).most_common()),
        sum(before[name].nbytes for name in quantized),
        sum(after[name].nbytes for name in parts if name in after),
        len(before.keys() - quantized.keys()),
        sum(tensor.nbytes for name, tensor in after.items() if name.endswith((SMOOTHING, OUTPUTS, IMPORTANCE))),
    )
