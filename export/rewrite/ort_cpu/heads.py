"""Keeps heads side by side around `GroupQueryAttention`, which takes and returns `[batch, sequence, heads * head_dim]`.

The trace moves heads in front of tokens and back; between a projection and this operator these steps cancel out.
"""

from __future__ import annotations

from math import prod

import onnx_ir as ir

from llmconv.export.node_editor import NodeEditor, integers, producer, rank, remove_unused
from llmconv.export.traced_graph import TracedGraph

SWAP = [0, 2, 1, 3]
RANK = 3


def flatten_heads(traced: TracedGraph) -> None:
    """Removes the transposes and reshapes around every `GroupQueryAttention`, in place."""
    graph = traced.model.graph
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
        remove_unused(traced.model)


def _flat_input(editor: NodeEditor, value: ir.Value | None, heads: int) -> ir.Value | None:
    """The same heads without transposes; None if they are computed in another way."""
    reshape = producer(value, "Reshape")
    swapped = _before_swap(reshape.inputs[0]) if reshape else None
    rotation = producer(swapped, "RotaryEmbedding")
    unswapped = _before_swap(rotation.inputs[0] if rotation else swapped)
    if unswapped is None:
        return None
    flat = _side_by_side(editor, unswapped)
    if rotation is None:
        return flat
    return editor.one("RotaryEmbedding", [flat, *rotation.inputs[1:]], {"num_heads": heads})


def _before_swap(value: ir.Value | None) -> ir.Value | None:
    """The input of a transpose of heads and tokens."""
    node = producer(value, "Transpose")
    return node.inputs[0] if node and list(node.attributes.get_ints("perm")) == SWAP else None


def _side_by_side(editor: NodeEditor, value: ir.Value) -> ir.Value:
    """`[batch, sequence, heads, head_dim]` with its last two axes merged, as a projection returns them."""
    reshape = producer(value, "Reshape")
    projected = reshape.inputs[0] if reshape else None
    if projected is not None and _width(projected) == _width(value) != 0:
        return projected
    return editor.one("Reshape", [value, integers(editor.graph, 0, 0, -1)])


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
                if _before_swap(back.outputs[0]) is not None and _before_swap(swap.outputs[0]) is not None:
                    _join(output, back.outputs[0])


def _join(output: ir.Value, heads: ir.Value) -> None:
    for last, _ in list(heads.uses()):
        result = last.outputs[0]
        if last.op_type == "Reshape" and rank(result) == RANK and _width(result) == _width(heads) != 0:
            result.replace_all_uses_with(output)
            output.shape, output.type = result.shape, result.type
