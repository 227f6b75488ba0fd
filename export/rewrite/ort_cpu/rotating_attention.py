"""`GroupQueryAttention` that rotates queries and keys itself: two nodes fewer per layer.

The operator looks up rows of a table by position, and requires as many rows as there are keys. Here the table contains
the angles of the new tokens, row by row, followed by zeros; so any rope scaling and any positions work as traced.

With an empty cache, such a graph counts one key too many: onnxruntime treats equal lengths as a first prompt, for which
it counts the rows of all prompts of a batch from those of the first. So it never detects a first prompt, and refuses a
batch of several tokens each (1.31, contrib_ops/cpu/bert/group_query_attention.cc).
Source: onnxruntime docs/ContribOperators.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from llmconv.export.node_editor import NodeEditor, constant, integers, producer, remove_unused
from llmconv.export.traced_graph import TracedGraph

TOTAL, TABLES, BIAS = 6, 7, 10
"""Input indices: `total_sequence_length`; the first of cosines, sines and row numbers; the mask."""
HEAD_MULTIPLE = 16
"""onnxruntime rotates head sizes that are a multiple of this."""


def rotate_in_attention(traced: TracedGraph) -> None:
    """Moves every `RotaryEmbedding` into the attention that reads it, in place; only in a graph for single steps."""
    if not traced.spec.steps:
        return
    graph = traced.model.graph
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
        remove_unused(traced.model)


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
    """The angles of a rotation of flat heads."""
    if rotation is None or "num_heads" not in rotation.attributes:
        return None
    cos, sin = rotation.inputs[1:3]
    half = cos.shape[-1] if cos is not None and cos.shape is not None else None
    if cos is None or sin is None or not isinstance(half, int) or 2 * half % HEAD_MULTIPLE:
        return None
    return _Angles(cos, sin, half)


class _SharedInputs:
    """Inputs that all layers share; `graph.sort` moves their nodes to the front.

    Attributes:
        total: `total_sequence_length`, int32 scalar: the number of keys, and more than the number of new tokens.
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
