"""`GroupQueryAttention` that rotates queries and keys itself: two nodes less per layer.

It looks up rows of a table by position, and wants as many rows as there are keys. The table here holds the angles of
the new tokens only, row by row, and nothing behind them; so any rope scaling and any positions work as traced.

Where nothing is cached, such a graph counts one key too many: onnxruntime takes equal lengths for a first prompt, and
then counts the rows of all prompts of a batch from the first one's. So it never sees one, and refuses a batch of
several tokens each (1.31, contrib_ops/cpu/bert/group_query_attention.cc).
Source: onnxruntime docs/ContribOperators.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from llmconv.export.rewrite.passes.node_editor import Editor, constant, integers
from llmconv.export.traced_graph import TracedGraph

TOTAL, TABLES, BIAS = 6, 7, 10
"""Inputs of the operator: `total_sequence_length`; cosines, sines and every token's row of them; the mask."""
HEAD_MULTIPLE = 16
"""onnxruntime rotates heads of a multiple of this size."""


def rotate_in_attention(traced: TracedGraph) -> None:
    """Moves every `RotaryEmbedding` of a graph for steps into the attention that reads it, in place."""
    if not traced.form.steps:
        return
    graph = traced.model.graph
    found = [
        (node, *turned)
        for node in graph
        if node.op_type == "GroupQueryAttention" and (turned := _turned(node)) is not None
    ]
    if found:
        shared = _Shared(graph)
        for attention, angles, unturned in found:
            inputs = {TOTAL: shared.total, BIAS: shared.bias(attention.inputs[BIAS])}
            for at, value in [*enumerate(unturned), *enumerate(shared.tables(angles), TABLES), *inputs.items()]:
                attention.replace_input_with(at, value)
            attention.attributes["do_rotary"] = ir.AttrInt64("do_rotary", 1)
        RemoveUnusedNodesPass()(traced.model)
        graph.sort()


@dataclass(frozen=True)
class _Angles:
    """Cosines and sines of the new tokens, `[batch, sequence, half]`."""

    cos: ir.Value
    sin: ir.Value
    half: int


def _turned(attention: ir.Node) -> tuple[_Angles, list[ir.Value]] | None:
    """By what queries and keys are turned, and both before; None where the operator cannot do it."""
    turns = [value.producer() if value is not None else None for value in attention.inputs[:2]]
    query, key = (_angles(turn) for turn in turns)
    before = [turn.inputs[0] for turn in turns if turn is not None]
    if query is None or query != key or None in before:
        return None
    return query, before  # type: ignore[return-value]


def _angles(turn: ir.Node | None) -> _Angles | None:
    """What a node turns flat heads by."""
    if turn is None or turn.op_type != "RotaryEmbedding" or "num_heads" not in turn.attributes:
        return None
    cos, sin = turn.inputs[1:3]
    half = cos.shape[-1] if cos is not None and cos.shape is not None else None
    if cos is None or sin is None or not isinstance(half, int) or 2 * half % HEAD_MULTIPLE:
        return None
    return _Angles(cos, sin, half)


class _Shared:
    """What all layers read; `graph.sort` puts it into its place.

    Attributes:
        total: `total_sequence_length`, int32 scalar: the keys, and more than there are new tokens.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self._graph, self._edit = graph, Editor(graph, "rotary", graph[0])
        self._tables: dict[_Angles, list[ir.Value]] = {}
        self._bias: dict[ir.Value, ir.Value] = {}
        new, keys = (self._one("Shape", port, start=1, end=2) for port in graph.inputs[:2])
        self._total = self._one("Max", keys, self._one("Add", new, integers(graph, 1)))
        self._pads = self._one("Concat", integers(graph, *[0] * 7), self._one("Sub", self._total, keys), axis=0)
        self.total = self._one("Squeeze", self._one("Cast", self._total, to=ir.DataType.INT32))

    def bias(self, mask: ir.Value | None) -> ir.Value:
        """The mask over so many keys, `[batch, 1, sequence, total]`."""
        assert mask is not None
        if mask not in self._bias:
            self._bias[mask] = self._one("Pad", mask, self._pads)
        return self._bias[mask]

    def tables(self, angles: _Angles) -> list[ir.Value]:
        """Both tables, `[total, half]`, and the row of every new token, int64 `[batch, sequence]`."""
        if angles not in self._tables:
            self._tables[angles] = self._make(angles)
        return self._tables[angles]

    def _make(self, angles: _Angles) -> list[ir.Value]:
        graph, half = self._graph, integers(self._graph, angles.half)
        rows = [self._one("Reshape", table, integers(graph, -1, angles.half)) for table in (angles.cos, angles.sin)]
        count = self._one("Shape", rows[0], start=0, end=1)
        missing = self._one("Max", self._one("Sub", self._total, count), integers(graph, 0))
        assert angles.cos.dtype is not None
        nothing = ir.tensor([0], dtype=angles.cos.dtype)
        rest = self._one("ConstantOfShape", self._one("Concat", missing, half, axis=0), value=nothing)
        first, step = (constant(graph, f"int64_scalar_{number}", np.array(number)) for number in (0, 1))
        order = self._one("Range", first, self._one("Squeeze", count), step)
        return [
            *(self._one("Concat", table, rest, axis=0) for table in rows),
            self._one("Reshape", order, self._one("Shape", graph.inputs[0])),
        ]

    def _one(self, op_type: str, *inputs: ir.Value, **attributes: object) -> ir.Value:
        return self._edit.one(op_type, inputs, attributes)
