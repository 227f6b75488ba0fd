"""Replaces groups of nodes by single operators of onnxruntime: shared buffers, `--target ort-cpu` and `ort-cuda`.

Each pass rewrites the patterns that it recognizes and leaves other nodes unchanged. Operators: onnx docs/Operators.md,
onnxruntime docs/ContribOperators.md; measurements: docs/benchmarks.md, docs/targets.md.

- Attention(q, Slice(TensorScatter(past, new)), …, mask) -> GroupQueryAttention(q, new, …, past, …, bias=mask), over a
  shared buffer. The standard operators must slice, which copies the past once per step; this one writes new keys into
  the buffer and reads `seqlens_k + 1` of its slots. The mask is passed as a bias, so padding, windows and holes stay
  exact. Other cases (other head sizes, keys and values of different shapes, attention that is not an `Attention` node)
  stay as traced.
- x * cos + Concat(-x[..., half:], x[..., :half]) * sin -> RotaryEmbedding(x, cos[..., :half], sin[..., :half]), where
  the graph shows that both halves of the tables are equal (`Concat(f, f)`).
- Heads stay side by side around `GroupQueryAttention`, which takes and returns `[batch, sequence, heads * head_dim]`.
- Reshape(Gemm(Reshape(x), W, b)) -> FusedMatMul(x, W) + b: `com.microsoft.FusedMatMul(transB=1)` takes `[batch,
  sequence, in]`. Twelve nodes fewer per layer of a Llama; the weights stay mapped as stored.
- RMSNormalization(residual + y) -> `com.microsoft.SkipSimplifiedLayerNormalization`, which onnxruntime itself does not
  fuse in exported graphs.
- `GroupQueryAttention` rotates queries and keys itself, by rows of a table with as many rows as there are keys: here
  the angles of the new tokens, then zeros, so any rope scaling and any positions work as traced. With an empty cache
  such a graph counts one key too many: onnxruntime treats equal lengths as a first prompt, and counts the rows of all
  prompts of a batch from the first (1.31, contrib_ops/cpu/bert/group_query_attention.cc).
- A call of the functions `DeltaRule` and `ChannelDeltaRule` (export/caches/delta_rule.py) -> `com.microsoft.
  LinearAttention` with the rule `gated_delta`: one kernel in place of about 150 nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from llmconv.export.traced_graph import (
    MICROSOFT,
    NodeEditor,
    ancestors,
    constant,
    integers,
    number_of,
    producer,
    rank,
    remove_unused,
    replace_value,
)
from llmconv.runtime.extra_inputs import CACHE_RANK, PAST, SCAN

if TYPE_CHECKING:
    from llmconv.export.input_map import Port

TOKEN_AXES = (2, -2)
MASK = 3  # index of the input of `Attention`
HIDDEN = -1e30  # a mask has no more for what is hidden, and 0 for what is seen
RESHAPING = {"Cast", "Expand", "Identity", "Reshape", "Slice", "Unsqueeze"}
# operators of a condition that grows narrower with each condition: with an `Or`, a token might see later ones
MASKING = {
    *("Add", "And", "Cast", "Concat", "Constant", "Expand", "Gather", "Greater", "Identity", "LessOrEqual", "Range"),
    *("Reshape", "Shape", "Slice", "Squeeze", "Sub", "Unsqueeze", "Where"),
}
KEPT = {"scale", "softcap"}  # attributes of `Attention` that the operator has, too
HEAD_MULTIPLE = 8  # the kernels of attention take head sizes that are a multiple of this
SWAP_HEADS = [0, 2, 1, 3]  # exchanges the axes of heads and tokens, in both directions


def use_grouped_query_attention(model: ir.Model) -> None:
    """Rewrites every attention node that reads its own layer's cache, a shared buffer or a growing one, in place."""
    graph = model.graph
    found = []
    for node in (node for node in graph if node.op_type == "Attention"):
        keys, values = _update(node.inputs[1]), _update(node.inputs[2])
        if not keys or not values or keys.sizes != values.sizes or not _is_plain(node):
            continue
        if all(isinstance(size, int) for size in keys.sizes) and keys.sizes[1] % HEAD_MULTIPLE == 0:
            found.append((node, keys, values))
    if found:
        lengths = _lengths(graph)
        for attention, keys, values in found:
            _rewrite(graph, attention, keys, values, lengths)
        model.opset_imports[MICROSOFT] = 1
        remove_unused(model)


def _is_plain(attention: ir.Node) -> bool:
    """Whether heads are an axis, their number is known, and a mask of numbers alone says what is attended to."""
    query, mask = attention.inputs[0], attention.inputs[MASK] if len(attention.inputs) > MASK else None
    if query is None or mask is None or query.shape is None or attention.attributes.keys() - KEPT:
        return False
    return rank(query) == CACHE_RANK and isinstance(query.shape[1], int) and mask.dtype == query.dtype


def is_causal(attention: ir.Node) -> bool:
    """Whether only a mask says what is attended to, and leaves out later tokens, as the operator does.

    It consists of conditions on positions, all of which must hold.
    """
    mask = attention.inputs[MASK] if len(attention.inputs) > MASK else None
    if mask is None or rank(mask) != CACHE_RANK or any(attention.inputs[MASK + 1 :]) or len(attention.outputs) > 1:
        return False
    chosen = producer(mask)
    while chosen is not None and chosen.op_type in RESHAPING:
        chosen = producer(chosen.inputs[0])
    if chosen is None or chosen.op_type != "Where" or chosen.inputs[0] is None:
        return False
    seen, hidden = (number_of(value) for value in chosen.inputs[1:])
    made_by = {node.op_type for value in ancestors(chosen.inputs[0]) if (node := value.producer()) is not None}
    return seen == 0 and hidden is not None and hidden <= HIDDEN and "LessOrEqual" in made_by and made_by <= MASKING


def fits_grouped_query(past: Sequence[Port]) -> bool:
    """Whether the operator can keep this cache: keys and values of the same shape, and no states; `past` its inputs."""
    keys, values = past[::2], past[1::2]
    sizes = [port.axes[3] for port in past if len(port.axes) == CACHE_RANK and PAST in port.axes]
    same = [key.axes for key in keys] == [value.axes for value in values]
    return bool(past) and len(sizes) == len(past) and same and all(int(size) % HEAD_MULTIPLE == 0 for size in sizes)


@dataclass(frozen=True)
class _BufferUpdate:
    """One `TensorScatter`: new keys or values are written into a layer's buffer."""

    buffer: ir.Value
    new: ir.Value
    written: ir.Value

    @property
    def sizes(self) -> tuple[Any, Any]:
        assert self.buffer.shape is not None
        return self.buffer.shape[1], self.buffer.shape[3]


def _update(read: ir.Value | None) -> _BufferUpdate | None:
    """The update of the buffer that attention reads; None if it reads something else."""
    joined = producer(read, "Concat")
    if read is not None and joined and len(joined.inputs) == 2 and joined.attributes.get_int("axis") in TOKEN_AXES:
        past, added = joined.inputs
        grows = past is not None and past.is_graph_input() and read.is_graph_output() and rank(past) == CACHE_RANK
        return _BufferUpdate(past, added, read) if past is not None and added is not None and grows else None
    cut = producer(read, "Slice")
    written = cut.inputs[0] if cut else None
    scatter = producer(written, "TensorScatter")
    if written is None or scatter is None:
        return None
    buffer, new = scatter.inputs[:2]
    assert buffer is not None and new is not None
    return _BufferUpdate(buffer, new, written)


def _rewrite(
    graph: ir.Graph, attention: ir.Node, keys: _BufferUpdate, values: _BufferUpdate, lengths: tuple[ir.Value, ir.Value]
) -> None:
    """Replaces an `Attention` and the two scatters that it reads by one node."""
    query, mask = attention.inputs[0], attention.inputs[3]
    assert query is not None and query.shape is not None and mask is not None
    heads, (kv_heads, size) = int(query.shape[1]), keys.sizes  # type: ignore[arg-type]
    editor = NodeEditor(graph, attention, module_of=attention)
    flat = [_flat(editor, value) for value in (query, keys.new, values.new)]
    kept = {name: attention.attributes[name].value for name in KEPT if name in attention.attributes}
    output, *presents = editor.add(
        "GroupQueryAttention",
        [*flat, keys.buffer, values.buffer, *lengths, None, None, None, mask],
        {"num_heads": heads, "kv_num_heads": kv_heads, **kept},
        outputs=3,
        domain=MICROSOFT,
    )
    for update, present in zip((keys, values), presents, strict=True):
        replace_value(update.written, present)
    unflat = editor.one("Reshape", [output, integers(graph, 0, 0, heads, int(size))])
    replace_value(attention.outputs[0], editor.one("Transpose", [unflat], {"perm": SWAP_HEADS}))


def _flat(editor: NodeEditor, value: ir.Value) -> ir.Value:
    """`[batch, heads, tokens, size]` as `[batch, tokens, heads * size]`."""
    swapped = editor.one("Transpose", [value], {"perm": SWAP_HEADS})
    return editor.one("Reshape", [swapped, integers(editor.graph, 0, 0, -1)])


def _lengths(graph: ir.Graph) -> tuple[ir.Value, ir.Value]:
    """`seqlens_k`: tokens of past and present less one, int32 `[batch]`; `total_sequence_length`: int32 scalar."""
    ids, attention_mask = graph.inputs[:2]
    editor = NodeEditor(graph, graph[0])
    total = editor.one("Shape", [attention_mask], {"start": 1, "end": 2})
    narrow = editor.one("Cast", [total], {"to": ir.DataType.INT32})
    last = editor.one("Sub", [narrow, constant(graph, "int32_1", np.array([1], dtype=np.int32))])
    rows = editor.one("Shape", [ids], {"start": 0, "end": 1})
    return editor.one("Expand", [last, rows]), editor.one("Squeeze", [narrow])


ELEMENTWISE = {"Cos", "Sin", "Cast", "Identity"}  # operators of one input that keep two equal halves equal
ROTARY_RANK = 4  # queries and keys: `[batch, heads, sequence, head_dim]`


def fuse_rotary(model: ir.Model) -> None:
    graph = model.graph
    rotations = [rotation for node in list(graph) if (rotation := _rotated(node)) is not None]
    halves: dict[ir.Value, ir.Value] = {}
    for rotation in rotations:
        cos, sin = (_first_half(graph, table, rotation.half, halves) for table in (rotation.cos, rotation.sin))
        editor = NodeEditor(graph, rotation.last, module_of=rotation.last)
        replace_value(rotation.last.outputs[0], editor.one("RotaryEmbedding", [rotation.x, cos, sin]))
    if rotations:
        remove_unused(model)


@dataclass(frozen=True)
class _Rotation:
    """One rotation of `x`; `cos` and `sin` are `[batch, sequence, head_dim]`, the node `last` adds the two products."""

    last: ir.Node
    x: ir.Value
    cos: ir.Value
    sin: ir.Value
    half: int


def _rotated(last: ir.Node) -> _Rotation | None:
    if last.op_type != "Add":
        return None
    for at in (0, 1):
        for x, cos in _factors(last.inputs[at]):
            for rotated, sin in _factors(last.inputs[1 - at]):
                half = _rotated_half(rotated, x)
                tables = _table(cos, x, half), _table(sin, x, half)
                if half and tables[0] is not None and tables[1] is not None:
                    return _Rotation(last, x, tables[0], tables[1], half)
    return None


def _factors(value: ir.Value | None) -> list[tuple[ir.Value, ir.Value]]:
    node = producer(value, "Mul")
    if node is None or node.inputs[0] is None or node.inputs[1] is None:
        return []
    return [(node.inputs[0], node.inputs[1]), (node.inputs[1], node.inputs[0])]


def _rotated_half(rotated: ir.Value, x: ir.Value) -> int:
    """Half the head size, if `rotated` is `Concat(-x[..., half:], x[..., :half])`; otherwise 0."""
    size = x.shape[-1] if x.shape is not None and rank(x) == ROTARY_RANK else None
    node = producer(rotated, "Concat")
    if not isinstance(size, int) or size % 2 or node is None or len(node.inputs) != 2:
        return 0
    negated = producer(node.inputs[0], "Neg")
    if node.attributes.get_int("axis") not in (-1, ROTARY_RANK - 1) or negated is None:
        return 0
    half = size // 2
    upper, lower = _slice_of(negated.inputs[0], x), _slice_of(node.inputs[1], x)
    return half if upper is not None and lower == (0, half) and upper[0] == half and upper[1] >= size else 0


def _slice_of(value: ir.Value | None, x: ir.Value) -> tuple[float, float] | None:
    """Start and end of a slice of the last axis of `x`."""
    node = producer(value, "Slice")
    if node is None or node.inputs[0] is not x:
        return None
    numbers = [number_of(given) for given in node.inputs[1:]]
    if len(numbers) < 3 or None in numbers or numbers[2] not in (-1, ROTARY_RANK - 1) or numbers[3:] not in ([], [1]):
        return None
    return numbers[0], numbers[1]  # type: ignore[return-value]


def _table(value: ir.Value, x: ir.Value, half: int) -> ir.Value | None:
    """The `[batch, sequence, head_dim]` before an `Unsqueeze` of the heads' axis, if its halves are equal."""
    node = producer(value, "Unsqueeze")
    table = node.inputs[0] if node and number_of(node.inputs[1]) == 1 else None
    if table is None or table.shape is None or x.shape is None or rank(table) != ROTARY_RANK - 1:
        return None
    # The operator does not broadcast a table over rows.
    fits = table.shape[0] == x.shape[0] and table.shape[-1] == 2 * half
    return table if fits and _has_equal_halves(table) else None


def _has_equal_halves(table: ir.Value) -> bool:
    """Whether a value is computed, element by element, from `Concat(f, f)` along its last axis."""
    node = producer(table)
    while node is not None:
        if node.op_type == "Concat":
            equal = len(node.inputs) == 2 and node.inputs[0] is node.inputs[1]
            return equal and node.attributes.get_int("axis") in (-1, rank(node.outputs[0]) - 1)
        scaled = node.op_type == "Mul" and number_of(node.inputs[1]) is not None
        if not scaled and node.op_type not in ELEMENTWISE:
            return False
        node = producer(node.inputs[0])
    return False


def _first_half(graph: ir.Graph, table: ir.Value, half: int, halves: dict[ir.Value, ir.Value]) -> ir.Value:
    """The first half of a table, cut once for all layers."""
    if table not in halves:
        node = producer(table)
        assert node is not None and table.shape is not None
        editor = NodeEditor(graph, module_of=node)  # `graph.sort` moves it after the table
        cut = editor.one("Slice", [table, *(integers(graph, number) for number in (0, half, -1))])
        cut.shape, cut.type = ir.Shape([*table.shape[:-1], half]), table.type
        halves[table] = cut
    return halves[table]


RANK = 3


def flatten_heads(model: ir.Model) -> None:
    """Removes the transposes and reshapes around every `GroupQueryAttention`, in place."""
    graph = model.graph
    nodes = [node for node in graph if node.op_type == "GroupQueryAttention"]
    for node in nodes:
        heads = node.attributes.get_int("num_heads"), *[node.attributes.get_int("kv_num_heads")] * 2
        editor = NodeEditor(graph, node, module_of=node)
        for at, number in enumerate(heads):
            flat = _flat_input(editor, node.inputs[at], number)
            if flat is not None:
                node.replace_input_with(at, flat)
        _flatten_output(node.outputs[0])
    if nodes:
        remove_unused(model)


def _flat_input(editor: NodeEditor, value: ir.Value | None, heads: int) -> ir.Value | None:
    """The same heads without transposes; None if they are computed in another way."""
    reshape = producer(value, "Reshape")
    swapped = _before_swap(reshape.inputs[0]) if reshape else None
    rotation = producer(swapped, "RotaryEmbedding")
    unswapped = _before_swap(rotation.inputs[0] if rotation else swapped)
    if unswapped is None:
        return None
    reshape = producer(unswapped, "Reshape")  # `[batch, sequence, heads, head_dim]` with its last two axes merged
    flat = reshape.inputs[0] if reshape else None
    if flat is None or not _width(flat) == _width(unswapped) != 0:
        flat = editor.one("Reshape", [unswapped, integers(editor.graph, 0, 0, -1)])
    if rotation is None:
        return flat
    return editor.one("RotaryEmbedding", [flat, *rotation.inputs[1:]], {"num_heads": heads})


def _before_swap(value: ir.Value | None) -> ir.Value | None:
    """The input of a transpose of heads and tokens."""
    node = producer(value, "Transpose")
    return node.inputs[0] if node and list(node.attributes.get_ints("perm")) == SWAP_HEADS else None


def _width(value: ir.Value) -> int:
    """Number of elements per token; 0 if unknown."""
    axes = list(value.shape[2:]) if value.shape is not None and rank(value) >= RANK else []
    numbers = [axis for axis in axes if isinstance(axis, int)]
    return prod(numbers) if axes and len(numbers) == len(axes) else 0


def _flatten_output(output: ir.Value) -> None:
    """Users of the heads side by side read the operator's output."""
    for reshape, _ in list(output.uses()):
        for swap, _ in list(reshape.outputs[0].uses()):
            for back, _ in list(swap.outputs[0].uses()):
                heads = back.outputs[0]
                if _before_swap(heads) is None or _before_swap(swap.outputs[0]) is None:
                    continue
                for last, _ in list(heads.uses()):
                    result = last.outputs[0]
                    if last.op_type == "Reshape" and rank(result) == RANK and _width(result) == _width(heads) != 0:
                        result.replace_all_uses_with(output)
                        output.shape, output.type = result.shape, result.type


def fuse_linear_layers(model: ir.Model, *, biases: bool = True) -> None:
    """Rewrites every `Gemm` between two reshapes, in place; without `biases` those without one."""
    nodes = [node for node in model.graph if biases or len(node.inputs) == 2]
    found = [match for node in nodes if (match := _between_reshapes(node)) is not None]
    for source, gemm, last in found:
        editor = NodeEditor(model.graph, last, module_of=gemm)
        attributes = {"transA": 0, "transB": 1, "alpha": 1.0}
        result = editor.one("FusedMatMul", [source, gemm.inputs[1]], attributes, domain=MICROSOFT)
        if len(gemm.inputs) > 2:
            result = editor.one("Add", [result, gemm.inputs[2]])
        replace_value(last.outputs[0], result)
    if found:
        model.opset_imports[MICROSOFT] = 1
        remove_unused(model)


def _between_reshapes(gemm: ir.Node) -> tuple[ir.Value, ir.Node, ir.Node] | None:
    """The left operand before it is flattened, the `Gemm`, and the `Reshape` that restores the axes of the product."""
    before = producer(gemm.inputs[0], "Reshape") if gemm.op_type == "Gemm" else None
    if before is None or gemm.attributes.get_int("transB", 0) != 1 or gemm.attributes.get_int("transA", 0) != 0:
        return None
    if any(gemm.attributes.get_float(name, 1.0) != 1.0 for name in ("alpha", "beta")):
        return None
    source, uses = before.inputs[0], list(gemm.outputs[0].uses())
    if source is None or len(uses) != 1 or uses[0].node.op_type != "Reshape":
        return None
    last = uses[0].node
    return (source, gemm, last) if rank(source) == rank(last.outputs[0]) != 0 else None


SUM = 3  # index of the sum among the outputs of `SkipSimplifiedLayerNormalization`, after an unused mean and variance


def fuse_sums_before_norms(model: ir.Model) -> None:
    """Replaces every norm of a sum of whole hidden states by one node, which also returns the sum, in place."""
    graph = model.graph
    norms = [(node, producer(node.inputs[0], "Add")) for node in graph if node.op_type == "RMSNormalization"]
    found = [(norm, add) for norm, add in norms if add and _same_shape(add)]
    for norm, add in found:
        editor, (x, weight) = NodeEditor(graph, norm, module_of=norm), norm.inputs[:2]
        assert x is not None
        attributes = {"epsilon": norm.attributes.get_float("epsilon", 1e-5)}
        inputs = [*add.inputs, weight]
        outputs = editor.add("SkipSimplifiedLayerNormalization", inputs, attributes, SUM + 1, MICROSOFT)
        replace_value(norm.outputs[0], outputs[0])
        total = outputs[SUM]
        total.shape, total.type = x.shape, x.type
        x.replace_all_uses_with(total)
        fused = outputs[0].producer()
        assert fused is not None
        for index, value in enumerate(inputs[:2]):
            fused.replace_input_with(index, value)
    if found:
        model.opset_imports[MICROSOFT] = 1
        remove_unused(model)


def _same_shape(add: ir.Node) -> bool:
    """Whether both terms are whole hidden states."""
    one, other = add.inputs
    return one is not None and other is not None and rank(one) == rank(other) == 3 and one.shape == other.shape


TOTAL, TABLES, BIAS = 6, 7, 10
"""Input indices: `total_sequence_length`; the first of cosines, sines and row numbers; the mask."""
ROTATED_MULTIPLE = 16  # onnxruntime rotates head sizes that are a multiple of this


def rotate_in_attention(model: ir.Model) -> None:
    """Moves every `RotaryEmbedding` into the attention that reads it, in place; for a graph of single steps."""
    graph = model.graph
    found = [
        (node, *rotation)
        for node in graph
        if node.op_type == "GroupQueryAttention" and (rotation := _rotation(node)) is not None
    ]
    if found:
        shared = _SharedInputs(graph)
        for attention, angles, unrotated in found:
            inputs = {TOTAL: shared.total, BIAS: shared.bias(attention.inputs[BIAS])}
            for at, value in [*enumerate(unrotated), *enumerate(shared.tables(angles), TABLES), *inputs.items()]:
                attention.replace_input_with(at, value)
            attention.attributes["do_rotary"] = ir.AttrInt64("do_rotary", 1)
        remove_unused(model)


@dataclass(frozen=True)
class _Angles:
    """Cosines and sines of the new tokens, `[batch, sequence, half]`."""

    cos: ir.Value
    sin: ir.Value
    half: int


def _rotation(attention: ir.Node) -> tuple[_Angles, list[ir.Value]] | None:
    """The angles of queries and keys, and both before the rotation; None if the operator does not support it."""
    nodes = [producer(value, "RotaryEmbedding") for value in attention.inputs[:2]]
    query, key = (_angles(node) for node in nodes)
    unrotated = [value for node in nodes if node and (value := node.inputs[0]) is not None]
    return (query, unrotated) if query is not None and query == key and len(unrotated) == 2 else None


def _angles(rotation: ir.Node | None) -> _Angles | None:
    if rotation is None or "num_heads" not in rotation.attributes:
        return None
    cos, sin = rotation.inputs[1:3]
    half = cos.shape[-1] if cos is not None and cos.shape is not None else None
    if cos is None or sin is None or not isinstance(half, int) or 2 * half % ROTATED_MULTIPLE:
        return None
    return _Angles(cos, sin, half)


class _SharedInputs:
    """Inputs that all layers share; `graph.sort` moves their nodes to the front.

    `total` is `total_sequence_length`, int32 scalar: the number of keys, and more than the number of new tokens.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self._graph, self._edit = graph, NodeEditor(graph, graph[0], "rotary")
        self._tables: dict[_Angles, list[ir.Value]] = {}
        self._bias: dict[ir.Value, ir.Value] = {}
        new, keys = (self._one("Shape", port, start=1, end=2) for port in graph.inputs[:2])
        self._total = self._one("Max", keys, self._one("Add", new, integers(graph, 1)))
        self._pads = self._one("Concat", integers(graph, *[0] * 7), self._one("Sub", self._total, keys), axis=0)
        self.total = self._one("Squeeze", self._one("Cast", self._total, to=ir.DataType.INT32))

    def bias(self, mask: ir.Value | None) -> ir.Value:
        """The mask padded to `total` keys, `[batch, 1, sequence, total]`."""
        assert mask is not None
        if mask not in self._bias:
            self._bias[mask] = self._one("Pad", mask, self._pads)
        return self._bias[mask]

    def tables(self, angles: _Angles) -> list[ir.Value]:
        """Both tables, `[total, half]`, and the row number of every new token, int64 `[batch, sequence]`."""
        if angles not in self._tables:
            self._tables[angles] = self._build_tables(angles)
        return self._tables[angles]

    def _build_tables(self, angles: _Angles) -> list[ir.Value]:
        graph, half = self._graph, integers(self._graph, angles.half)
        rows = [self._one("Reshape", table, integers(graph, -1, angles.half)) for table in (angles.cos, angles.sin)]
        count = self._one("Shape", rows[0], start=0, end=1)
        missing = self._one("Max", self._one("Sub", self._total, count), integers(graph, 0))
        assert angles.cos.dtype is not None
        zero = ir.tensor([0], dtype=angles.cos.dtype)
        rest = self._one("ConstantOfShape", self._one("Concat", missing, half, axis=0), value=zero)
        first, step = (constant(graph, f"int64_scalar_{number}", np.array(number)) for number in (0, 1))
        order = self._one("Range", first, self._one("Squeeze", count), step)
        return [
            *(self._one("Concat", table, rest, axis=0) for table in rows),
            self._one("Reshape", order, self._one("Shape", graph.inputs[0])),
        ]

    def _one(self, op_type: str, *inputs: ir.Value, **attributes: object) -> ir.Value:
        return self._edit.one(op_type, inputs, attributes)


DELTA_RULES = ("DeltaRule", "ChannelDeltaRule")
DELTA_INPUTS = ["x", "q", "k", "decay", "beta", "past"]


def use_linear_attention(model: ir.Model) -> None:
    """Replaces every call of the delta rule by one node, in place; the states stay as they are."""
    graph = model.graph
    rules = [key for key, function in model.functions.items() if _is_delta_rule(function)]
    calls = [node for node in graph if node.op_identifier() in rules and _is_whole(node)]
    for node in calls:
        values, query, key, decay, beta, past = node.inputs
        assert past is not None and past.shape is not None
        heads, _, width = (int(size) for size in past.shape[1:])  # type: ignore[arg-type]
        edit = NodeEditor(graph, node, module_of=node)
        flat = [edit.one("Reshape", [value, integers(graph, 0, 0, -1)]) for value in (query, key, values)]
        if node.op_type == DELTA_RULES[1]:  # a decay for each channel
            decay = edit.one("Reshape", [decay, integers(graph, 0, 0, -1)])
        # queries are scaled before
        attributes = {"q_num_heads": heads, "kv_num_heads": heads, "update_rule": "gated_delta", "scale": 1.0}
        output, present = edit.add("LinearAttention", [*flat, past, decay, beta], attributes, 2, MICROSOFT)
        replace_value(node.outputs[1], present)
        replace_value(node.outputs[0], edit.one("Reshape", [output, integers(graph, 0, 0, heads, width)]))
    if calls:
        model.opset_imports[MICROSOFT] = 1
        remove_unused(model)
        for rule in set(rules) - {node.op_identifier() for node in graph}:
            del model.functions[rule]


def _is_delta_rule(function: ir.Function) -> bool:
    names = [value.name for value in function.inputs]
    return function.domain == SCAN and function.name in DELTA_RULES and names == DELTA_INPUTS


def _is_whole(call: ir.Node) -> bool:
    """Whether a call has all inputs and outputs, and a state of known sizes, `[batch, heads, key_dim, value_dim]`."""
    if None in call.inputs or (len(call.inputs), len(call.outputs)) != (len(DELTA_INPUTS), 2):
        return False
    shape = call.inputs[-1].shape if call.inputs[-1] is not None else None
    return shape is not None and len(shape) == CACHE_RANK and all(isinstance(size, int) for size in shape[1:])


def fuse_for_target(model: ir.Model, target: str | None, *, steps: bool = False) -> None:
    """Rewrites a graph for a target, a key of `TARGETS`, in place; `steps`: it takes one new token per row.

    First a rotation becomes one node, then heads are flattened around it, then attention includes it.
    """
    if target not in ("ort-cpu", "ort-cuda"):
        return
    fuse_rotary(model)
    flatten_heads(model)
    if target == "ort-cpu":
        use_linear_attention(model)
        if steps:
            rotate_in_attention(model)
    fuse_linear_layers(model, biases=target == "ort-cpu")  # on CUDA a bias costs a kernel of its own
    fuse_sums_before_norms(model)
