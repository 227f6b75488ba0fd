"""Rotary embeddings as one node each: `RotaryEmbedding` (opset 23) in the place of seven.

    x * cos + Concat(-x[..., half:], x[..., :half]) * sin  ->  RotaryEmbedding(x, cos[..., :half], sin[..., :half])

Only where cos and sin are made of two equal halves, which the graph has to show (`Concat(f, f)`).
Source: onnx docs/Operators.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from llmconv.export.rewrite.passes.node_editor import integers
from llmconv.export.traced_graph import TracedGraph

ELEMENTWISE = {"Cos", "Sin", "Cast", "Identity"}
"""Operators of one input that keep two equal halves equal."""
RANK = 4
"""Queries and keys: `[batch, heads, sequence, head_dim]`."""


def fuse_rotary(traced: TracedGraph) -> None:
    """Rewrites every rotary embedding of the graph in place."""
    graph = traced.model.graph
    found = [rotation for node in list(graph) if (rotation := _rotation(node)) is not None]
    halves: dict[ir.Value, ir.Value] = {}
    for rotation in found:
        _rewrite(graph, rotation, halves)
    if found:
        RemoveUnusedNodesPass()(traced.model)
        graph.sort()


@dataclass(frozen=True)
class _Rotation:
    """One rotation of `x`; `cos` and `sin` are `[batch, sequence, head_dim]`, `last` adds the two products."""

    last: ir.Node
    x: ir.Value
    cos: ir.Value
    sin: ir.Value
    half: int


def _rotation(last: ir.Node) -> _Rotation | None:
    """The rotation that ends with a node, whichever way round its sum and products are."""
    if last.op_type != "Add":
        return None
    for at in (0, 1):
        straight, turned = _product(last.inputs[at]), _product(last.inputs[1 - at])
        for x, cos in straight:
            for rotated, sin in turned:
                half = _half_turned(rotated, x)
                tables = _table(cos, x, half), _table(sin, x, half)
                if half and tables[0] is not None and tables[1] is not None:
                    return _Rotation(last, x, tables[0], tables[1], half)
    return None


def _product(value: ir.Value | None) -> list[tuple[ir.Value, ir.Value]]:
    """Both orders of a product's factors."""
    node = value.producer() if value is not None else None
    if node is None or node.op_type != "Mul" or node.inputs[0] is None or node.inputs[1] is None:
        return []
    return [(node.inputs[0], node.inputs[1]), (node.inputs[1], node.inputs[0])]


def _half_turned(rotated: ir.Value, x: ir.Value) -> int:
    """Half the size of a head, where `rotated` is `Concat(-x[..., half:], x[..., :half])`; otherwise 0."""
    size = x.shape[-1] if x.shape is not None and len(x.shape) == RANK else None
    node = rotated.producer()
    if not isinstance(size, int) or size % 2 or node is None or node.op_type != "Concat" or len(node.inputs) != 2:
        return 0
    negated = node.inputs[0].producer() if node.inputs[0] is not None else None
    if node.attributes.get_int("axis") not in (-1, RANK - 1) or negated is None or negated.op_type != "Neg":
        return 0
    half = size // 2
    upper, lower = _sliced(negated.inputs[0], x), _sliced(node.inputs[1], x)
    return half if upper is not None and lower == (0, half) and upper[0] == half and upper[1] >= size else 0


def _sliced(value: ir.Value | None, x: ir.Value) -> tuple[int, int] | None:
    """Start and end of a slice of the last axis of `x`."""
    node = value.producer() if value is not None else None
    if node is None or node.op_type != "Slice" or node.inputs[0] is not x:
        return None
    numbers = [_number(given) for given in node.inputs[1:]]
    if len(numbers) < 3 or None in numbers or numbers[2] not in (-1, RANK - 1) or numbers[3:] not in ([], [1]):
        return None
    return numbers[0], numbers[1]  # type: ignore[return-value]


def _table(value: ir.Value, x: ir.Value, half: int) -> ir.Value | None:
    """The `[batch, sequence, head_dim]` behind an `Unsqueeze` of the heads' axis, where its halves are equal."""
    node = value.producer()
    if node is None or node.op_type != "Unsqueeze" or _number(node.inputs[1]) != 1:
        return None
    table = node.inputs[0]
    if table is None or table.shape is None or x.shape is None or len(table.shape) != RANK - 1:
        return None
    # The operator takes no table that is broadcast over rows.
    fits = table.shape[0] == x.shape[0] and table.shape[-1] == 2 * half
    return table if fits and _has_equal_halves(table) else None


def _has_equal_halves(table: ir.Value) -> bool:
    """Whether a value is made, element by element, of `Concat(f, f)` along its last axis."""
    node = table.producer()
    while node is not None:
        if node.op_type == "Concat":
            last = len(node.outputs[0].shape or ()) - 1
            equal = len(node.inputs) == 2 and node.inputs[0] is node.inputs[1]
            return equal and node.attributes.get_int("axis") in (-1, last)
        scaled = node.op_type == "Mul" and node.inputs[1] is not None and _is_scalar(node.inputs[1])
        if not scaled and node.op_type not in ELEMENTWISE:
            return False
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    return False


def _is_scalar(value: ir.Value) -> bool:
    return value.const_value is not None and value.const_value.size == 1


def _number(value: ir.Value | None) -> int | None:
    content = value.const_value if value is not None else None
    return int(content.numpy().ravel()[0]) if content is not None and content.size == 1 else None


def _rewrite(graph: ir.Graph, rotation: _Rotation, halves: dict[ir.Value, ir.Value]) -> None:
    cos, sin = (_half(graph, table, rotation.half, halves) for table in (rotation.cos, rotation.sin))
    node = ir.node("RotaryEmbedding", [rotation.x, cos, sin])
    node.metadata_props.update(rotation.last.metadata_props)
    graph.insert_before(rotation.last, node)
    old, new = rotation.last.outputs[0], node.outputs[0]
    new.shape, new.type = old.shape, old.type
    old.replace_all_uses_with(new, replace_graph_outputs=True)


def _half(graph: ir.Graph, table: ir.Value, half: int, halves: dict[ir.Value, ir.Value]) -> ir.Value:
    """The first half of a table, cut once for all layers."""
    if table not in halves:
        producer = table.producer()
        assert producer is not None and table.shape is not None
        bounds = [integers(graph, number) for number in (0, half, -1)]
        node = ir.node("Slice", [table, *bounds])
        node.metadata_props.update(producer.metadata_props)
        graph.insert_after(producer, node)
        node.outputs[0].shape = ir.Shape([*table.shape[:-1], half])
        node.outputs[0].type = table.type
        halves[table] = node.outputs[0]
    return halves[table]
