"""`nonpad_kv_seqlen`: tells every `Attention` node over a static cache how much of it is filled (opset 24).

The mask hides the same slots already, so results are equal; a runtime that knows the length need not read the rest.
"""

from __future__ import annotations

import onnx_ir as ir

from llmconv.export.rewrite.passes.node_editor import integers
from llmconv.export.traced_graph import TracedGraph
from llmconv.runtime.onnxruntime.shared_buffers import WRITE_INDICES

NONPAD = 6
"""Which input of `Attention` it is: after query, key, value, mask, past key and past value."""


def tell_length(traced: TracedGraph) -> None:
    """Gives the nodes that read whole `TensorScatter` buffers their seventh input, in place."""
    graph = traced.model.graph
    write_indices = next((port for port in graph.inputs if port.name == WRITE_INDICES), None)
    reading = [node for node in graph if node.op_type == "Attention" and _is_scattered(node.inputs[1])]
    if write_indices is None or not reading:
        return
    length = _filled(graph, write_indices)
    for node in reading:
        node.resize_inputs(NONPAD + 1)
        node.replace_input_with(NONPAD, length)


def _is_scattered(value: ir.Value | None) -> bool:
    producer = value.producer() if value is not None else None
    return producer is not None and producer.op_type == "TensorScatter"


def _filled(graph: ir.Graph, write_indices: ir.Value) -> ir.Value:
    """`write_indices + sequence_length`, int64 `[batch]`."""
    shape = graph.inputs[0].shape
    assert shape is not None
    first = graph[0]
    if isinstance(shape[1], int):
        count = integers(graph, shape[1])
    else:
        axis = ir.node("Shape", [graph.inputs[0]], attributes={"start": 1, "end": 2})
        graph.insert_before(first, axis)
        count = axis.outputs[0]
    add = ir.node("Add", [write_indices, count])
    graph.insert_before(first, add)
    return add.outputs[0]
