"""`com.microsoft.GroupQueryAttention` over a shared buffer: attention reads the filled part of the buffer in place.

    Attention(q, Slice(TensorScatter(past, new)), …, mask)  ->  GroupQueryAttention(q, new, …, past, …, bias=mask)

The standard operators must slice, which copies the past once per step; this one writes new keys into the buffer and
reads `seqlens_k + 1` of its slots. The mask is passed as a bias, so padding, windows and holes stay exact. Unsupported
cases (other head sizes, keys and values of different shapes, attention that is not an `Attention` node) stay as traced.
Source: onnxruntime docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
from llmconv.runtime.extra_inputs import CACHE_RANK, PAST

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
HEAD_MULTIPLE = 8  # onnxruntime's kernels take head sizes that are a multiple of this
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
