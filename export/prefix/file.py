"""The safetensors file that a prefix adds to a folder: the trained tensor, and the keys and values that graphs map."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnx_ir.passes.common import RemoveUnusedNodesPass

from llmconv.errors import InputRefused, UnsupportedInput
from llmconv.export.node_editor import value_named
from llmconv.export.rewrite.passes.prefix import cache_shapes, past_ports, prepend_prefix
from llmconv.export.traced_graph import TracedGraph
from llmconv.export.weights.bind import bind, require_dtype
from llmconv.export.weights.parameter_sources import WeightSource, leaves
from llmconv.files.safetensors_file import FileTensor, encode_header
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.runtime.onnxruntime.shared_buffers import INPUTS_EMBEDS
from llmconv.runtime.prefix.trained import KeyValue, Prefix
from llmconv.tensors import BY_NAME, Array, LazyTensor

TRAINED = "adapter"
"""Name of the trained tensor of the adapter; the verifier computes its own keys and values from it."""


@dataclass(frozen=True)
class PrefixFile:
    """A safetensors file of float32 tensors: `adapter`, then `prefix.{i}.key` and `prefix.{i}.value` by layer.

    Its name contains part of the content's hash, so that graphs of several prefixes may share a folder. `places` has
    offset and shape of each key and value: `0.key`, `0.value`, …
    """

    prefix: Prefix
    name: str
    content: bytes
    places: dict[str, tuple[int, tuple[int, ...]]]

    @classmethod
    def make(
        cls,
        prefix: Prefix,
        traced: TracedGraph,
        matches: Mapping[str, WeightSource],
        sources: Mapping[str, FileTensor],
        weights: Mapping[str, FileTensor],
    ) -> PrefixFile:
        """The file of a prefix for the decoder's graph, which is not bound to weights yet.

        Only a soft prompt reads `sources`, tensors in files; `weights` have the dtypes in which the graph will map
        them.

        Raises:
            InputRefused: the prefix is of another model.
            UnsupportedInput: the model keeps more than keys and values.
        """
        shapes = cache_shapes(traced.model.graph)
        if prefix.kind == "soft_prompt":
            layers = keys_and_values(traced, matches, sources, weights, prefix.content)
        else:
            layers = prefix.keys_and_values(shapes)
        arrays: dict[str, Array] = {TRAINED: prefix.content}
        for layer, (key, value) in enumerate(layers):
            arrays |= {f"prefix.{layer}.key": key[None], f"prefix.{layer}.value": value[None]}
        header = encode_header({name: (BY_NAME["float32"], array.shape) for name, array in arrays.items()})
        places, position = {}, len(header)
        for name, array in arrays.items():
            places[name.removeprefix("prefix.")] = (position, array.shape)
            position += array.nbytes
        del places[TRAINED]
        content = header + b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values())
        return cls(prefix, f"prefix-{hashlib.sha256(content).hexdigest()[:8]}.safetensors", content, places)

    def prepend(self, model: ir.Model) -> None:
        """Puts the prefix before every prompt of a graph, in place."""
        tensors = {
            name: ir.ExternalTensor(
                self.name,
                offset,
                4 * int(np.prod(shape)),
                ir.DataType.FLOAT,
                shape=ir.Shape(shape),
                name=f"prefix.{name}",
            )
            for name, (offset, shape) in self.places.items()
        }
        prepend_prefix(model, tensors, self.prefix.first_position)

    def manifest_fields(self) -> dict[str, Any]:
        """Fields of the manifest entry of a graph with this prefix."""
        prefix = self.prefix
        fields = {"file": self.name, "kind": prefix.kind, "length": prefix.length}
        return {"prefix": {**fields, "first_position": prefix.first_position}}


def keys_and_values(
    traced: TracedGraph,
    matches: Mapping[str, WeightSource],
    sources: Mapping[str, FileTensor],
    weights: Mapping[str, LazyTensor],
    embeddings: Array,
) -> list[KeyValue]:
    """Keys and values of virtual tokens at positions 0, 1, …, by layer.

    `embeddings`, float32 `[P, hidden]`, replace rows of the embedding table. The decoder's graph is not bound to
    weights yet and not changed; values are rounded to the dtypes of `weights`.

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
