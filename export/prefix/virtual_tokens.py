"""Keys and values of a soft prompt: the graph itself runs once on the trained embeddings, its weights mapped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnx_ir.passes.common import RemoveUnusedNodesPass

from llmconv.errors import InputRefused, UnsupportedInput
from llmconv.export.node_editor import value_named
from llmconv.export.rewrite.passes.prefix import past_ports
from llmconv.export.traced_graph import TracedGraph
from llmconv.export.weights.bind import bind, require_dtype
from llmconv.export.weights.parameter_sources import WeightSource, leaves
from llmconv.files.safetensors_file import FileTensor
from llmconv.runtime.onnxruntime.embeddings import INPUTS_EMBEDS
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.runtime.prefix.trained import KeyValue
from llmconv.tensors import Array, LazyTensor


def keys_and_values(
    traced: TracedGraph,
    matches: Mapping[str, WeightSource],
    sources: Mapping[str, FileTensor],
    weights: Mapping[str, LazyTensor],
    embeddings: Array,
) -> list[KeyValue]:
    """Keys and values of virtual tokens at positions 0, 1, …, by layer.

    Args:
        traced: the decoder's graph, not bound to weights yet; it is not changed.
        matches: the stored tensors of each of its weights.
        sources: the tensors in files that can be read.
        weights: the tensors with the dtypes that values are rounded to.
        embeddings: float32 `[P, hidden]`, used instead of rows of the embedding table.

    Raises:
        InputRefused: the hidden sizes of the embeddings and of the model differ.
        UnsupportedInput: the model does not begin with an embedding table.
    """
    traced = traced.copy()
    model, ports = traced.model, past_ports(traced.model.graph)
    _replace_embedding(model.graph, embeddings.shape[1])
    for name in {leaf.name for source in matches.values() for leaf in leaves(source)}:
        if name not in sources:
            raise UnsupportedInput(
                f"`--prefix`: keys and values of a soft prompt cannot be computed, because `{name}` is quantized",
                hint="give the model before it was quantized, with `--quant`; or an adapter of prefix tuning",
            )
        require_dtype(name, sources[name])
    folder, files = _in_one_folder(sources)
    bind(traced, matches, files, weights)
    model.graph.outputs[:] = [value for value in model.graph.outputs if (value.name or "").startswith("present.")]
    RemoveUnusedNodesPass()(model)
    feeds = _feeds(embeddings, ports)
    options = SessionSettings().options()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, ["CPUExecutionProvider"])
    inputs = {arg.name for arg in session.get_inputs()}
    present = session.run(None, {name: value for name, value in feeds.items() if name in inputs})
    return [(key[0], value[0]) for key, value in zip(present[::2], present[1::2], strict=True)]


def _in_one_folder(tensors: Mapping[str, FileTensor]) -> tuple[Path, dict[str, FileTensor]]:
    """The folder of the weights, links followed (onnxruntime maps no link), and the tensors in its files."""
    files = {n: FileTensor(t.path.resolve(), t.offset, t.dtype, t.shape) for n, t in tensors.items()}
    folders = {tensor.path.parent for tensor in files.values()}
    if len(folders) > 1:
        raise InputRefused(
            "`--prefix`: the weights are links into several folders, which onnxruntime cannot map together",
            hint="copy the model into one folder",
        )
    return folders.pop(), files


def _replace_embedding(graph: ir.Graph, width: int) -> None:
    """Makes the output of the embedding module the input `inputs_embeds`, in place."""
    last = _embedding(graph, width)
    while (follower := _next_of_module(last)) is not None:
        last = follower
    embedded = ir.Value(name=INPUTS_EMBEDS, shape=ir.Shape(["batch_size", "sequence_length", width]))
    embedded.type = ir.TensorType(ir.DataType.FLOAT)
    graph.inputs.append(embedded)
    last.outputs[0].replace_all_uses_with(embedded)


def _embedding(graph: ir.Graph, width: int) -> ir.Node:
    """The node that looks up the embeddings of tokens, which must have `width` numbers."""
    tokens = value_named(graph.inputs, "input_ids")
    gathers = [node for node in graph if node.op_type == "Gather"]
    table = next((node for node in gathers if tokens is not None and _before_reshapes(node.inputs[1]) is tokens), None)
    rows = table.inputs[0] if table else None
    if table is None or rows is None or rows.shape is None:
        raise UnsupportedInput(
            "`--prefix`: this model does not begin with an embedding table", hint="give a prefix of keys and values"
        )
    if rows.shape[1] != width:
        raise InputRefused(
            f"hidden size mismatch: the soft prompt has {width}, the model {rows.shape[1]}",
            hint="it was trained on another model; give the prompt of this one",
        )
    return table


def _before_reshapes(value: ir.Value | None) -> ir.Value | None:
    while value is not None and (node := value.producer()) is not None and node.op_type == "Reshape":
        value = node.inputs[0]
    return value


def _next_of_module(node: ir.Node) -> ir.Node | None:
    """The only user of a node, if it is of the same module, such as the scale of an embedding."""
    uses = list(node.outputs[0].uses())
    scope = (node.name or "").rpartition("/")[0]
    if len(uses) == 1 and (uses[0].node.name or "").rpartition("/")[0] == scope:
        return uses[0].node
    return None


def _feeds(embeddings: Array, ports: dict[str, ir.Value]) -> dict[str, Array]:
    length = len(embeddings)
    empty = {
        str(port.name): np.zeros((1, int(port.shape[1]), 0, int(port.shape[3])), np.float32)  # type: ignore
        for port in ports.values()
    }
    return {
        "input_ids": np.zeros((1, length), np.int64),
        "attention_mask": np.ones((1, length), np.int64),
        "position_ids": np.arange(length)[None],
        INPUTS_EMBEDS: embeddings[None],
        **empty,
    }
