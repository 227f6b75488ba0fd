"""Heads stay side by side around `GroupQueryAttention`: it takes and gives `[batch, sequence, heads * head_dim]`.

The trace moves heads in front of tokens and back; between a projection and this operator all of that cancels out.
"""

from __future__ import annotations

from math import prod

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from llmconv.export.rewrite.passes.node_editor import integers
from llmconv.export.traced_graph import TracedGraph

SWAP = [0, 2, 1, 3]
RANK = 3


def flatten_heads(traced: TracedGraph) -> None:
    """Takes the transposes and reshapes around every `GroupQueryAttention` out, in place."""
    graph = traced.model.graph
    nodes = [node for node in graph if node.op_type == "GroupQueryAttention"]
    for node in nodes:
        heads = node.attributes.get_int("num_heads"), *[node.attributes.get_int("kv_num_heads")] * 2
        for at, number in enumerate(heads):
            flat = _flat_input(graph, node, node.inputs[at], number)
            if flat is not None:
                node.replace_input_with(at, flat)
        _flatten_output(node)
    if nodes:
        RemoveUnusedNodesPass()(traced.model)
        graph.sort()


def _flat_input(graph: ir.Graph, attention: ir.Node, value: ir.Value | None, heads: int) -> ir.Value | None:
    """The same heads without the detour; None where they come another way."""
    swapped = _swap(_before(value, "Reshape"))
    source = swapped.producer() if swapped is not None else None
    if swapped is None or source is None:
        return None
    if source.op_type == "RotaryEmbedding":
        unswapped = _swap(source.inputs[0])
        if unswapped is None:
            return None
        flat = _side_by_side(graph, attention, unswapped)
        node = ir.node("RotaryEmbedding", [flat, *source.inputs[1:]], attributes={"num_heads": heads})
        return _insert(graph, attention, node)
    unswapped = _swap(swapped)
    return None if unswapped is None else _side_by_side(graph, attention, unswapped)


def _before(value: ir.Value | None, op_type: str) -> ir.Value | None:
    """The first input of the node that gives `value`, where that is an `op_type`."""
    node = value.producer() if value is not None else None
    return node.inputs[0] if node is not None and node.op_type == op_type else None


def _swap(value: ir.Value | None) -> ir.Value | None:
    """What a transpose of heads and tokens was given."""
    node = value.producer() if value is not None else None
    if node is None or node.op_type != "Transpose" or list(node.attributes.get_ints("perm")) != SWAP:
        return None
    return node.inputs[0]


def _side_by_side(graph: ir.Graph, attention: ir.Node, value: ir.Value) -> ir.Value:
    """`[batch, sequence, heads, head_dim]` with its last two axes as one; a projection has them so."""
    projected = _before(value, "Reshape")
    if projected is not None and _width(projected) == _width(value) and _width(value):
        return projected
    return _insert(graph, attention, ir.node("Reshape", [value, integers(graph, 0, 0, -1)]))


def _width(value: ir.Value) -> int:
    """Numbers per token; 0 where the trace does not tell."""
    axes = list(value.shape[2:]) if value.shape is not None and len(value.shape) >= RANK else []
    numbers = [axis for axis in axes if isinstance(axis, int)]
    return prod(numbers) if axes and len(numbers) == len(axes) else 0


def _flatten_output(attention: ir.Node) -> None:
    """Users of the heads side by side read them from the operator."""
    output = attention.outputs[0]
    for reshape, _ in list(output.uses()):
        for swap, _ in list(reshape.outputs[0].uses()):
            for back, _ in list(swap.outputs[0].uses()):
                if _swap(back.outputs[0]) is not None and _swap(swap.outputs[0]) is not None:
                    _join(output, back.outputs[0])


def _join(output: ir.Value, heads: ir.Value) -> None:
    for last, _ in list(heads.uses()):
        result = last.outputs[0]
        flat = last.op_type == "Reshape" and result.shape is not None and len(result.shape) == RANK
        if flat and _width(result) == _width(heads) != 0:
            result.replace_all_uses_with(output)
            output.shape, output.type = result.shape, result.type


def _insert(graph: ir.Graph, attention: ir.Node, node: ir.Node) -> ir.Value:
    node.metadata_props.update(attention.metadata_props)
    graph.insert_before(attention, node)
    return node.outputs[0]
