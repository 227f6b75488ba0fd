"""Smoothing: factors that move the range of activations into the weights they are multiplied with (`--calibrate`).

A channel with outliers makes the one scale of an activation coarse for all others. So the norm that makes it is divided
by a factor per channel, and the columns of the matrices behind it are multiplied with the same one:
`s = max|x| ** 0.5 / max|w| ** 0.5` (SmoothQuant, Xiao et al., arXiv:2211.10438, equation 4, alpha 0.5), rounded to a
power of two, so that both are exact in floating point and the model stays the same function.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import onnx_ir as ir

from llmconv.export.quantization.block_rounding import ColumnFormat, WeightFormat
from llmconv.export.quantization.calibration import TextRun, largest_of, require_finite
from llmconv.export.quantization.quantized_tensor import FLOAT32, RoundedCodes, stored_factors
from llmconv.export.quantization.selection import QuantizedWeight, leads_to_choice, product_layout
from llmconv.export.traced_graph import MICROSOFT, NodeEditor, TracedGraph, integers, producer, rank
from llmconv.export.weights import DOMAIN, GROUPED, StoredRows, WeightSource, element, leaves, output_parts
from llmconv.progress import warn
from llmconv.tensors import Array, DType, LazyTensor, in_memory, lists_by_key

LARGEST = 24  # the largest exponent of a factor, positive or negative


@dataclass(frozen=True)
class Smoothing:
    """Powers of two by names of stored tensors, float32, which broadcast over them."""

    # multiply matrices before they are rounded, and routers, which are not: [K], or [K, 1] for one that is stored as
    # [K, N]; of a stack [experts, 1, K] or [experts, K, 1]
    matrices: Mapping[str, Array] = field(default_factory=dict)
    norms: Mapping[str, Array] = field(default_factory=dict)  # divide norms: [K]
    # multiply outputs of matrices, by the reciprocals: [N, 1], or [N] for one that is stored as [K, N]; of a stack
    # [experts, N, 1] or [experts, 1, N]
    outputs: Mapping[str, Array] = field(default_factory=dict)

    @classmethod
    def of(cls, found: Iterable[tuple[SmoothingGroup, Array]]) -> Smoothing:
        matrices: dict[str, Array] = {}
        norms: dict[str, Array] = {}
        outputs: dict[str, Array] = {}
        for group, factors in found:
            for one in (*group.matrices, *group.routers):
                one.put(matrices, factors, of_outputs=False)
            norms |= dict.fromkeys(group.norms, factors)
            for one in group.outputs:
                one.put(outputs, 1 / factors, of_outputs=True)
        return cls(matrices, norms, outputs)

    def plain(self, name: str, tensor: LazyTensor) -> dict[str, LazyTensor]:
        """A norm divided by its factors, or a router multiplied with them, in float32, and the factors, by name."""
        divided, values = name in self.norms, tensor.read().astype(np.float32)
        factors = self.norms[name] if divided else self.matrices[name]
        changed = (values / factors if divided else values * factors).astype(np.float32)
        return {name: in_memory(changed, FLOAT32), **stored_factors(name, factors)}


def measured_digest(
    importance: Mapping[str, Array], smoothing: Smoothing, rounded: Mapping[str, RoundedCodes | None]
) -> str:
    """The sha256 of what a text says of weights, which may differ between processors; empty without a text.

    A norm and the matrices behind it, and the codes and scales of one matrix, fit together only if they are of one run.
    """
    parts = importance, smoothing.matrices, smoothing.norms, smoothing.outputs
    arrays = {(str(at), name): array for at, one in enumerate(parts) for name, array in one.items()}
    arrays |= {(end, name): array for name, one in rounded.items() if one for end, array in one.parts.items()}
    content = hashlib.sha256()
    for key, array in arrays.items():
        content.update(f"{key} {array.shape}".encode())
        content.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return content.hexdigest() if arrays else ""


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
    names = {group: group.matrices[0].name for group in groups}
    largest = largest_of(run.reduced(_largest, set(names.values()))) if names else {}
    measured = [(group, name) for group, name in names.items() if name in largest]
    return Smoothing.of((group, _factors(largest[name], group, run.tensors)) for group, name in measured)


def _largest(editor: NodeEditor, values: ir.Value) -> ir.Value:
    return editor.one("ReduceMax", [editor.one("Abs", [values]), integers(editor.graph, 0)], {"keepdims": 0})


def _factors(inputs: Array, group: SmoothingGroup, tensors: Mapping[str, LazyTensor]) -> Array:
    """Powers of two float32 [K]; 1 where a channel is zero, or the norm's quotient would be rounded."""
    require_finite(group.matrices[0].name, inputs)
    weights = np.zeros(inputs.shape, np.float32)
    for matrix in group.matrices:
        tensor = tensors[matrix.name]
        for start, stop in tensor.blocks():
            rows = np.abs(tensor.rows(start, stop).astype(np.float32))
            part = weights[start:stop] if matrix.turned else weights
            np.maximum(part, rows.max(axis=1 if matrix.turned else 0), out=part)
    with np.errstate(divide="ignore", invalid="ignore"):
        exponents = (np.log2(inputs) - np.log2(weights)) / 2
    return exact_factors(exponents, group, tensors, FLOAT32)


def exact_factors(exponents: Array, group: SmoothingGroup, tensors: Mapping[str, LazyTensor], dtype: DType) -> Array:
    """Powers of two float32 [K]; 1 where the exponent is not finite, or a norm or router with it would be rounded.

    Exponents [K] are rounded to the nearest integers; the graphs have the group's norm and routers in `dtype`.
    """
    whole = np.clip(np.rint(exponents), -LARGEST, LARGEST)
    factors = np.ldexp(np.float32(1), np.where(np.isfinite(whole), whole, 0).astype(np.int32))
    routers = [(one.name, one.turned, -1) for one in group.routers]
    for name, turned, sign in [*((name, False, 1) for name in group.norms), *routers]:
        tensor = tensors[name]
        values = tensor.read().astype(np.float32)
        values = values.T if turned else values  # [K] or [N, K]
        for kind in (FLOAT32, dtype, tensor.dtype):
            with np.errstate(all="ignore"):
                changed = (values / factors**sign).astype(kind.numpy).astype(np.float32)
                is_exact = changed * factors**sign == values.astype(kind.numpy).astype(np.float32)
            factors = np.where(is_exact.reshape(-1, factors.size).all(axis=0), factors, np.float32(1))
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
class Matrix:
    """A matrix that takes factors: a stored tensor, or one of a stack; of outputs maybe a part."""

    name: str  # of the stored tensor
    shape: tuple[int, ...]  # of the stored tensor: [N, K] or [K, N], of a stack [experts, ...]
    turned: bool  # it is [K, N]
    expert: int | None = None  # whose activations it is multiplied with; None for those of all tokens
    first: int = 0  # of its outputs, where not all of N are divided
    count: int = -1

    @property
    def is_stacked(self) -> bool:
        return len(self.shape) == STACK

    @property
    def label(self) -> str:
        """That of its `StoredRows`."""
        return f"{self.name}[{self.expert}]" if self.is_stacked else self.name

    @property
    def sizes(self) -> tuple[int, int]:
        """N and K."""
        rows, columns = self.shape[-2:]
        return (columns, rows) if self.turned else (rows, columns)

    def put(self, made: dict[str, Array], factors: Array, *, of_outputs: bool) -> None:
        """Sets factors of columns [K], or of the outputs that this is; all others of the tensor are 1 at first."""
        size = self.sizes[0 if of_outputs else 1]
        shape = (1, size) if of_outputs == self.turned else (size, 1)
        stack = self.shape[:1] if self.is_stacked else ()
        if self.name not in made:
            made[self.name] = np.ones(size if shape[0] == 1 and not stack else (*stack, *shape), np.float32)
        stop = size if self.count < 0 else self.first + self.count
        made[self.name].reshape(-1, size)[self.expert or 0 if stack else 0, self.first : stop] = factors


STACK = 3  # dimensions of a stack of matrices


@dataclass(frozen=True)
class SmoothingGroup:
    """A norm, and all matrices that its result is multiplied with; or instead of a norm the matrix of a gated unit."""

    norms: tuple[str, ...]  # names of the stored vectors [K] of the norm: its weight, and its bias if it has one
    matrices: tuple[Matrix, ...]  # those that are rounded
    outputs: tuple[Matrix, ...] = ()  # the matrix whose output is divided, without a norm
    routers: tuple[Matrix, ...] = ()  # matrices behind the norm that are not rounded

    @property
    def names(self) -> set[str]:
        return {*self.norms, *(one.name for one in (*self.matrices, *self.outputs, *self.routers))}


def smoothing_groups(graphs: Graphs, coded: Container[str], *, aware: bool = False) -> list[SmoothingGroup]:
    """The norms whose result has no other use than products with `coded` matrices, which can take factors.

    A norm that adds 1 to its weight (Gemma) is not among them: the quotient minus 1 would be rounded. `aware`: also
    norms before experts and their router, and `coded` matrices without a bias, of experts and others, whose output, or
    a part of it, is gated and then has no other use (`down(f(gate(x)) * up(x))`).
    """
    found = [(set(_groups(traced, matches, coded, aware)), _names(matches)) for traced, matches in graphs]
    every = dict.fromkeys(group for traced, matches in graphs for group in _groups(traced, matches, coded, aware))
    return [group for group in every if all(group in own or not group.names & names.keys() for own, names in found)]


def _names(matches: Mapping[str, WeightSource]) -> Counter[str]:
    return Counter(name for match in matches.values() for name in {leaf.name for leaf in leaves(match)})


def _groups(
    traced: TracedGraph, matches: Mapping[str, WeightSource], coded: Container[str], aware: bool
) -> list[SmoothingGroup]:
    sources = {traced.weights[parameter]: match for parameter, match in matches.items()}
    counts = _names(matches)
    found = []
    for node in traced.model.graph:
        kind = node.domain, node.op_type
        if kind in NORMS:
            group = _group(node, sources, coded, aware)
            made = [group] if group else []
        else:
            made = _gated(node, sources, coded) if aware and kind == ("", "Mul") else []
        found += [group for group in made if all(counts[name] == 1 for name in group.names)]
    return found


def _group(
    node: ir.Node, sources: Mapping[ir.Value, WeightSource], coded: Container[str], aware: bool
) -> SmoothingGroup | None:
    vectors = [value for value in node.inputs[NORMS[node.domain, node.op_type]] if value is not None]
    stored = [_only_use(value, sources) for value in vectors]
    products = _products(node.outputs[0], picked=aware)
    if not products or not all(isinstance(one, StoredRows) and one.is_whole for one in stored):
        return None
    norms = [one for one in stored if isinstance(one, StoredRows)]
    routers = _routers(products, sources) if aware and any(_is_grouped(product) for product in products) else {}
    matrices = _coded([product for product in products if product not in routers], sources, coded)
    if not matrices or any([one.sizes[1]] != list(norms[0].shape) for one in (*matrices, *routers.values())):
        return None
    return SmoothingGroup(tuple(one.name for one in norms), tuple(matrices), routers=tuple(routers.values()))


def _routers(products: Sequence[ir.Node], sources: Mapping[ir.Value, WeightSource]) -> dict[ir.Node, Matrix]:
    """The products whose result chooses experts, or weighs one (`shared_expert_gate`), and their stored matrices."""
    found: dict[ir.Node, Matrix] = {}
    for product in products:
        value = product.inputs[1]
        cast = producer(value, "Cast")
        rows = _only_use(cast.inputs[0] if cast else value, sources)
        if _is_grouped(product) or not isinstance(rows, StoredRows) or not rows.is_whole or len(rows.shape) != MATRIX:
            continue
        one = Matrix(rows.name, rows.shape, bool(product_layout(product)))
        if one.sizes[0] == 1 or leads_to_choice(product):
            found[product] = one
    return found


MATRIX = 2


def _is_grouped(node: ir.Node) -> bool:
    return (node.domain, node.op_type) == (DOMAIN, GROUPED)


def _gated(node: ir.Node, sources: Mapping[ir.Value, WeightSource], coded: Container[str]) -> list[SmoothingGroup]:
    """The groups of a product of two vectors, one of which is made by a matrix without a bias: one for each expert."""
    matrices = _coded(_products(node.outputs[0], picked=True), sources, coded)
    for value in node.inputs if matrices else ():
        made = _outputs_before(value, sources, coded)
        by_expert = lists_by_key((one.expert, one) for one in matrices)
        if by_expert.keys() == {one.expert for one in made} and len(by_expert) == len(made):
            widths = {one.sizes[1] for one in matrices} | {one.count for one in made}
            if len(widths) == 1:
                return [SmoothingGroup((), tuple(by_expert[one.expert]), (one,)) for one in made]
    return []


def _outputs_before(
    value: ir.Value | None, sources: Mapping[ir.Value, WeightSource], coded: Container[str]
) -> list[Matrix]:
    """The matrices, one for each expert, whose outputs or a part of them a value is, reshaped or not.

    None if they have a bias, or any of these outputs has another use.
    """
    part: tuple[int, int, int] | None = None
    is_cut = False  # whether the other uses of a value are known
    while value is not None and not value.is_graph_output() and (is_cut or len(value.uses()) == 1):
        node = value.producer()
        if node is None:
            return []
        if product_layout(node) is not None:
            bias = any(one is not None for one in node.inputs[2:]) and not _is_grouped(node)
            return [] if bias else _cut(_coded([node], sources, coded), part)
        is_cut = part is None and node.op_type in ("Split", "Slice")
        part = _part(node, value) if is_cut else part
        if node.domain or (part is None if is_cut else node.op_type != "Reshape"):
            return []
        value = node.inputs[0]
    return []


def _part(node: ir.Node, value: ir.Value) -> tuple[int, int, int] | None:
    """First and number of the entries of the last axis that a part is, and the size of the axis.

    None if they are not known, or another use of the whole has any of these.
    """
    whole = node.inputs[0]
    if whole is None or whole.is_graph_output():
        return None
    parts = [(one, _range(user, one)) for user, _ in whole.uses() for one in user.outputs]
    found = next(part for one, part in parts if one is value)
    if found is None:
        return None
    first, count, size = found
    for one, part in parts:
        if one is not value and (part is None or (part[0] < first + count and first < part[0] + part[1])):
            return None
    return first, count, size


def _range(node: ir.Node, value: ir.Value) -> tuple[int, int, int] | None:
    """The entries of the last axis that an output of Split or Slice has: first, number, and the size of the axis."""
    shape = node.inputs[0].shape if node.inputs[0] is not None else None
    if not shape or node.domain or not isinstance(shape[-1], int):
        return None
    size, last = shape[-1], (-1, len(shape) - 1)
    given = [_numbers(one) for one in node.inputs[1:]]
    if node.op_type == "Split" and node.attributes.get_int("axis", 0) in last:
        at, count = list(node.outputs).index(value), len(node.outputs)
        sizes = given[0] if given else [-(-size // count)] * count
        return (sum(sizes[:at]), sizes[at], size) if sum(sizes) == size and len(sizes) == count else None
    ones = [[1]]  # of all steps
    if node.op_type == "Slice" and [len(one) for one in given[:3]] == [1, 1, 1] and given[3:] in ([], ones):
        first, stop, _ = slice(given[0][0], given[1][0]).indices(size)
        return (first, stop - first, size) if given[2][0] in last else None
    return None


def _numbers(value: ir.Value | None) -> list[int]:
    constant = ir.convenience.get_const_tensor(value) if value is not None else None
    return [int(one) for one in constant.numpy().ravel()] if constant is not None else []


def _cut(matrices: Sequence[Matrix], part: tuple[int, int, int] | None) -> list[Matrix]:
    """The matrices of a product's experts that a part of its outputs is of; none if it is not of one alone."""
    made: list[Matrix] = []
    by_expert = lists_by_key((one.expert, one) for one in matrices)
    for several in by_expert.values():
        starts = [0, *accumulate(one.sizes[0] for one in several)]
        first, count, size = part or (0, starts[-1], starts[-1])
        inside = [
            replace(one, first=first - start, count=count)
            for one, start in zip(several, starts, strict=False)
            if size == starts[-1] and start <= first and first + count <= start + one.sizes[0]
        ]
        made += inside
    return made if len(made) == len(by_expert) else []


def _coded(
    products: Sequence[ir.Node], sources: Mapping[ir.Value, WeightSource], coded: Container[str]
) -> list[Matrix]:
    """All matrices of products, of experts one by one; none if one of them is not a coded matrix of its own."""
    found: list[Matrix] = []
    for product in products:
        match, layout = _only_use(product.inputs[1], sources), product_layout(product)
        if match is None or layout is None:
            return []
        experts = range(match.shape[0]) if _is_grouped(product) else [None]
        for expert in experts:
            for rows, transB in output_parts(match if expert is None else element(match, expert), layout):
                if not isinstance(rows, StoredRows) or len(rows.shape) != MATRIX or rows.name not in coded:
                    return []
                if not (rows.is_whole or rows.single and rows.first == expert):
                    return []
                found.append(Matrix(rows.name, rows.stored, not transB, expert))
    return found


def _only_use(value: ir.Value | None, sources: Mapping[ir.Value, WeightSource]) -> WeightSource | None:
    """The stored tensors of a weight that one node reads; None for another value."""
    return sources.get(value) if value is not None and len(value.uses()) == 1 else None


def _products(value: ir.Value, *, picked: bool = False) -> list[ir.Node]:
    """The products that a value is the first factor of, reshaped or not; none if it has another use.

    `picked`: also products of rows of it, as of the tokens that an expert has, and of it in another dtype.
    """
    found: list[ir.Node] = []
    waiting = [value]
    while waiting:
        current = waiting.pop()
        if current.is_graph_output():
            return []
        for node, index in current.uses():
            passes = node.op_type == "Reshape" or (picked and (node.op_type == "Cast" or _picks_rows(node)))
            if index == 0 and passes and not node.domain:
                waiting.append(node.outputs[0])
            elif index == 0 and product_layout(node) is not None and (picked or not _is_grouped(node)):
                found.append(node)
            else:
                return []
    return found


def _picks_rows(node: ir.Node) -> bool:
    """Whether an operator only chooses along axes before the last."""
    sizes = [
        value.shape[-1] if value is not None and value.shape else None for value in (node.inputs[0], node.outputs[0])
    ]
    if not isinstance(sizes[0], int) or sizes[0] != sizes[1]:
        return False
    if node.op_type == "Gather":
        return node.attributes.get_int("axis", 0) == 0 and rank(node.inputs[0]) > 1
    index = node.inputs[1].shape if node.op_type == "GatherND" and node.inputs[1] is not None else None
    batch = node.attributes.get_int("batch_dims", 0)
    return index is not None and batch == 0 and index[-1] == 1 and rank(node.inputs[0]) > 1
