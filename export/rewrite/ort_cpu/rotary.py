"""Rotary embeddings as one node each: `RotaryEmbedding` (opset 23) instead of seven nodes.

    x * cos + Concat(-x[..., half:], x[..., :half]) * sin  ->  RotaryEmbedding(x, cos[..., :half], sin[..., :half])

Requires tables of two equal halves, which the graph must show (`Concat(f, f)`).
Source: onnx docs/Operators.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from llmconv.export.node_editor import (
    NodeEditor,
    integers,
    number_of,
    producer,
    rank,
    remove_unused,
    replace_value,
)
from llmconv.export.traced_graph import TracedGraph

ELEMENTWISE = {"Cos", "Sin", "Cast", "Identity"}
"""Operators of one input that keep two equal halves equal."""
RANK = 4
"""Queries and keys: `[batch, heads, sequence, head_dim]`."""


def fuse_rotary(traced: TracedGraph) -> None:
    """Rewrites every rotary embedding of the graph in place."""
    graph = traced.model.graph
    rotations = [rotation for node in list(graph) if (rotation := _rotation(node)) is not None]
    halves: dict[ir.Value, ir.Value] = {}
    for rotation in rotations:
        cos, sin = (_first_half(graph, table, rotation.half, halves) for table in (rotation.cos, rotation.sin))
        editor = NodeEditor(graph, rotation.last, module_of=rotation.last)
        replace_value(rotation.last.outputs[0], editor.one("RotaryEmbedding", [rotation.x, cos, sin]))
    if rotations:
        remove_unused(traced.model)


@dataclass(frozen=True)
class _Rotation:
    """One rotation of `x`; `cos` and `sin` are `[batch, sequence, head_dim]`, the node `last` adds the two products."""

    last: ir.Node
    x: ir.Value
    cos: ir.Value
    sin: ir.Value
    half: int


def _rotation(last: ir.Node) -> _Rotation | None:
    """The rotation that ends with a node, with summands and factors in any order."""
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
    """The factors of a product in both orders."""
    node = producer(value, "Mul")
    if node is None or node.inputs[0] is None or node.inputs[1] is None:
        return []
    return [(node.inputs[0], node.inputs[1]), (node.inputs[1], node.inputs[0])]


def _rotated_half(rotated: ir.Value, x: ir.Value) -> int:
    """Half the head size, if `rotated` is `Concat(-x[..., half:], x[..., :half])`; otherwise 0."""
    size = x.shape[-1] if x.shape is not None and rank(x) == RANK else None
    node = producer(rotated, "Concat")
    if not isinstance(size, int) or size % 2 or node is None or len(node.inputs) != 2:
        return 0
    negated = producer(node.inputs[0], "Neg")
    if node.attributes.get_int("axis") not in (-1, RANK - 1) or negated is None:
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
    if len(numbers) < 3 or None in numbers or numbers[2] not in (-1, RANK - 1) or numbers[3:] not in ([], [1]):
        return None
    return numbers[0], numbers[1]  # type: ignore[return-value]


def _table(value: ir.Value, x: ir.Value, half: int) -> ir.Value | None:
    """The `[batch, sequence, head_dim]` before an `Unsqueeze` of the heads' axis, if its halves are equal."""
    node = producer(value, "Unsqueeze")
    table = node.inputs[0] if node and number_of(node.inputs[1]) == 1 else None
    if table is None or table.shape is None or x.shape is None or rank(table) != RANK - 1:
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
