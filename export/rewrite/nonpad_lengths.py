"""`nonpad_kv_seqlen`: the filled length of a static cache as an input of every `Attention` node (opset 24).

The mask hides the unfilled slots already, so results are equal; a runtime that knows the length can skip them.
"""

from __future__ import annotations

import onnx_ir as ir

from llmconv.export.node_editor import NodeEditor, integers, producer, value_named
from llmconv.export.traced_graph import TracedGraph
from llmconv.runtime.onnxruntime.shared_buffers import WRITE_INDICES

NONPAD = 6
"""Index of the input of `Attention`: after query, key, value, mask, past key and past value."""


def add_filled_length(traced: TracedGraph) -> None:
    """Adds the seventh input to the nodes that read whole `TensorScatter` buffers, in place."""
    graph = traced.model.graph
    write_indices = value_named(graph.inputs, WRITE_INDICES)
    reading = [node for node in graph if node.op_type == "Attention" and producer(node.inputs[1], "TensorScatter")]
    if write_indices is None or not reading:
        return
    length = _filled(graph, write_indices)
    for node in reading:
        node.resize_inputs(NONPAD + 1)
        node.replace_input_with(NONPAD, length)


def _filled(graph: ir.Graph, write_indices: ir.Value) -> ir.Value:
    """`write_indices + sequence_length`, int64 `[batch]`."""
    tokens = graph.inputs[0]
    assert tokens.shape is not None
    editor, new = NodeEditor(graph, graph[0]), tokens.shape[1]
    fixed = integers(graph, new) if isinstance(new, int) else None
    count = fixed or editor.one("Shape", [tokens], {"start": 1, "end": 2})
    return editor.one("Add", [write_indices, count])
