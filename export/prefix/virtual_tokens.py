"""Soft prompts -> keys and values: the graph itself runs once over the trained embeddings, its weights mapped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnx_ir.passes.common import RemoveUnusedNodesPass

from llmconv.errors import InputRefused, UnsupportedInput
from llmconv.export.prefix.adapter import KeyValue
from llmconv.export.rewrite.passes.node_editor import input_named
from llmconv.export.rewrite.passes.prefix import past_ports
from llmconv.runtime.onnxruntime.runner import SessionSettings
from llmconv.tensors import Array

EMBEDDED = "inputs_embeds"


def keys_and_values(model: ir.Model, embeddings: Array, folder: Path) -> list[KeyValue]:
    """Keys and values of virtual tokens at positions 0, 1, …, by layer.

    Args:
        model: a decoder, bound; it is left as it was.
        embeddings: float32 `[P, hidden]`, in the place of the embedding table's rows.
        folder: holds the weights.

    Raises:
        InputRefused: the embeddings are of another size than the model's.
        UnsupportedInput: the model does not begin with an embedding table.
    """
    model = model.clone()
    ports = past_ports(model.graph)
    _replace_embedding(model.graph, embeddings.shape[1])
    model.graph.outputs[:] = [value for value in model.graph.outputs if (value.name or "").startswith("present.")]
    RemoveUnusedNodesPass()(model)
    feeds = _feeds(model.graph, embeddings, ports)
    options = SessionSettings().options()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder.resolve()))
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, ["CPUExecutionProvider"])
    taken = {arg.name for arg in session.get_inputs()}
    present = session.run(None, {name: value for name, value in feeds.items() if name in taken})
    return [(key[0], value[0]) for key, value in zip(present[::2], present[1::2], strict=True)]


def require_width(graph: ir.Graph, width: int) -> ir.Node:
    """The node that looks tokens up, where its rows have `width` numbers.

    Raises:
        InputRefused: they have another number.
        UnsupportedInput: there is no such node.
    """
    tokens = input_named(graph, "input_ids")
    gathers = [node for node in graph if node.op_type == "Gather"]
    table = next((node for node in gathers if tokens is not None and _shaped(node.inputs[1]) is tokens), None)
    rows = table.inputs[0] if table else None
    while rows is not None and rows.shape is None and rows.producer() is not None:  # cast from half precision
        rows = rows.producer().inputs[0]  # type: ignore[union-attr]
    if table is None or rows is None or rows.shape is None:
        raise UnsupportedInput(
            "`--prefix`: this model does not begin with an embedding table", hint="give a prefix of keys and values"
        )
    if rows.shape[1] != width:
        raise InputRefused(
            f"the soft prompt has {width} numbers per token, the model {rows.shape[1]}",
            hint="it was trained on another model; give that one's prompt",
        )
    return table


def _shaped(value: ir.Value | None) -> ir.Value | None:
    """What a value was before its shape was changed."""
    while value is not None and (node := value.producer()) is not None and node.op_type == "Reshape":
        value = node.inputs[0]
    return value


def _replace_embedding(graph: ir.Graph, width: int) -> None:
    """What the embedding module makes of `input_ids` becomes the input `inputs_embeds`."""
    last = require_width(graph, width)
    while (follower := _next_of_module(last)) is not None:
        last = follower
    embedded = ir.Value(name=EMBEDDED, shape=ir.Shape(["batch_size", "sequence_length", width]))
    embedded.type = ir.TensorType(ir.DataType.FLOAT)
    graph.inputs.append(embedded)
    last.outputs[0].replace_all_uses_with(embedded)


def _next_of_module(node: ir.Node) -> ir.Node | None:
    """The node of the same module that alone reads a node, such as the scale of an embedding."""
    uses = list(node.outputs[0].uses())
    scope = (node.name or "").rpartition("/")[0]
    if len(uses) == 1 and (uses[0].node.name or "").rpartition("/")[0] == scope:
        return uses[0].node
    return None


def _feeds(graph: ir.Graph, embeddings: Array, ports: dict[str, ir.Value]) -> dict[str, Array]:
    length = len(embeddings)
    empty = {
        str(port.name): np.zeros((1, int(port.shape[1]), 0, int(port.shape[3])), np.float32)  # type: ignore
        for port in ports.values()
    }
    return {
        "input_ids": np.zeros((1, length), np.int64),
        "attention_mask": np.ones((1, length), np.int64),
        "position_ids": np.arange(length)[None],
        EMBEDDED: embeddings[None],
        **empty,
    }
