"""`com.microsoft.GroupQueryAttention` over a shared buffer: attention reads the filled part where it lies.

    Attention(q, Slice(TensorScatter(past, new)), …, mask)  ->  GroupQueryAttention(q, new, …, past, …, bias=mask)

The standard operators have to slice, which copies the past once per step; this one writes new keys into the buffer and
reads `seqlens_k + 1` of its slots. The mask goes along as a bias, so padding, windows and holes stay exact. What it
cannot do (other sizes of head, values unlike keys, attention that is no `Attention` node) stays as it was traced.
Source: onnxruntime docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from llmconv.export.rewrite.passes.node_editor import constant, integers
from llmconv.export.traced_graph import TracedGraph

DOMAIN = "com.microsoft"
HEAD_MULTIPLE = 8
"""onnxruntime's kernels take heads of a multiple of this size."""

HEADS_LAST = [0, 2, 1, 3]
"""Swaps heads and tokens, in both directions."""


def share_buffers(traced: TracedGraph) -> None:
    """Rewrites every attention node that reads its own layer's shared buffer, in place."""
    graph = traced.model.graph
    rewriter = _Rewriter(graph)
    for node in list(graph):
        write = _writes_of(node) if node.op_type == "Attention" else None
        if write is not None:
            rewriter.rewrite(node, *write)
    if rewriter.used:
        traced.model.opset_imports[DOMAIN] = 1
        RemoveUnusedNodesPass()(traced.model)
        graph.sort()


@dataclass(frozen=True)
class _Write:
    """One `TensorScatter`: new keys or values into a layer's buffer."""

    buffer: ir.Value
    new: ir.Value
    written: ir.Value

    @property
    def sizes(self) -> tuple[Any, Any]:
        """Heads, and the size of one."""
        assert self.buffer.shape is not None
        return self.buffer.shape[1], self.buffer.shape[3]


def _writes_of(attention: ir.Node) -> tuple[_Write, _Write] | None:
    """How the keys and values of a node came into the buffer; None where the operator does not apply."""
    keys, values = _write(attention.inputs[1]), _write(attention.inputs[2])
    if keys is None or values is None or keys.sizes != values.sizes:
        return None
    return (keys, values) if keys.sizes[1] % HEAD_MULTIPLE == 0 else None


def _write(read: ir.Value | None) -> _Write | None:
    cut = read.producer() if read is not None else None
    written = cut.inputs[0] if cut is not None and cut.op_type == "Slice" else None
    scatter = written.producer() if written is not None else None
    if written is None or scatter is None or scatter.op_type != "TensorScatter":
        return None
    buffer, new = scatter.inputs[:2]
    assert buffer is not None and new is not None
    return _Write(buffer, new, written)


class _Rewriter:
    """One pass over a graph; the lengths are computed once for all layers."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._lengths: tuple[ir.Value, ir.Value] | None = None

    @property
    def used(self) -> bool:
        """Whether anything was rewritten."""
        return self._lengths is not None

    def rewrite(self, attention: ir.Node, keys: _Write, values: _Write) -> None:
        """Puts one node in the place of an `Attention` and of the two scatters that it reads."""
        query, mask = attention.inputs[0], attention.inputs[3]
        assert query is not None and query.shape is not None and mask is not None
        heads, (kv_heads, size) = int(query.shape[1]), keys.sizes  # type: ignore[arg-type]
        flat = [self._flat(attention, value) for value in (query, keys.new, values.new)]
        seqlens, total = self._lengths_of_mask()
        attributes = {
            name: attention.attributes[name].value for name in ("scale", "softcap") if name in attention.attributes
        }
        node = ir.Node(
            DOMAIN,
            "GroupQueryAttention",
            [*flat, keys.buffer, values.buffer, seqlens, total, None, None, None, mask],
            ir.convenience.convert_attributes({"num_heads": heads, "kv_num_heads": kv_heads, **attributes}),
            num_outputs=3,
        )
        self._place(attention, node)
        for write, present in ((keys, node.outputs[1]), (values, node.outputs[2])):
            _replace(write.written, present)
        unflat = self._insert(attention, "Reshape", [node.outputs[0], integers(self._graph, 0, 0, heads, int(size))])
        _replace(attention.outputs[0], self._insert(attention, "Transpose", [unflat], {"perm": HEADS_LAST}))

    def _flat(self, place: ir.Node, value: ir.Value) -> ir.Value:
        """`[batch, heads, tokens, size]` as `[batch, tokens, heads * size]`."""
        swapped = self._insert(place, "Transpose", [value], {"perm": HEADS_LAST})
        return self._insert(place, "Reshape", [swapped, integers(self._graph, 0, 0, -1)])

    def _lengths_of_mask(self) -> tuple[ir.Value, ir.Value]:
        """`seqlens_k`: tokens of past and present less one, int32 `[batch]`; `total_sequence_length`: int32 scalar."""
        if self._lengths is None:
            ids, attention_mask = self._graph.inputs[:2]
            first = self._graph[0]
            total = self._prologue(first, "Shape", [attention_mask], {"start": 1, "end": 2})
            narrow = self._prologue(first, "Cast", [total], {"to": ir.DataType.INT32})
            last = self._prologue(
                first, "Sub", [narrow, constant(self._graph, "int32_1", np.array([1], dtype=np.int32))]
            )
            rows = self._prologue(first, "Shape", [ids], {"start": 0, "end": 1})
            self._lengths = (
                self._prologue(first, "Expand", [last, rows]),
                self._prologue(first, "Squeeze", [narrow]),
            )
        return self._lengths

    def _insert(
        self, place: ir.Node, op_type: str, inputs: Sequence[ir.Value], attributes: dict[str, Any] | None = None
    ) -> ir.Value:
        """A node of the same module before `place`."""
        node = ir.node(op_type, inputs, attributes=attributes)
        self._place(place, node)
        return node.outputs[0]

    def _place(self, place: ir.Node, node: ir.Node) -> None:
        node.metadata_props.update(place.metadata_props)
        self._graph.insert_before(place, node)

    def _prologue(
        self, place: ir.Node, op_type: str, inputs: Sequence[ir.Value], attributes: dict[str, Any] | None = None
    ) -> ir.Value:
        """A node that serves all layers."""
        node = ir.node(op_type, inputs, attributes=attributes)
        self._graph.insert_before(place, node)
        return node.outputs[0]


def _replace(old: ir.Value, new: ir.Value) -> None:
    """`new` in the place of `old`, also as the graph's output."""
    new.shape, new.type = old.shape, old.type
    new.name, old.name = old.name, None
    old.replace_all_uses_with(new, replace_graph_outputs=True)
