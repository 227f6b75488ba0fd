"""`--prefix`: with an empty past, a graph begins with the keys and values of a prefix.

To the client the model has no prefix, except that the cache is P tokens longer: with an empty past the graph prepends
the prefix, extends the mask and shifts the positions itself; any other past contains the prefix already, and the mask
covers it like every past.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnx_ir.passes.common import RemoveUnusedNodesPass

from llmconv.errors import InputRefused, UnsupportedInput
from llmconv.export.traced_graph import NodeEditor, TracedGraph, constant, integers, replace_uses, value_named
from llmconv.export.weights import WeightSource, bind, leaves, require_dtype
from llmconv.files.safetensors_file import encode_header
from llmconv.files.weight_ranges import Mapped, placed
from llmconv.runtime.extra_inputs import INPUTS_EMBEDS
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.runtime.prefix import KeyValue, Prefix
from llmconv.tensors import BY_NAME, Array, LazyTensor

PAST = re.compile(r"past_key_values\.(\d+)\.(key|value)")
PRESENT_LENGTH = "present_sequence_length"
"""The symbol of a cache length that is not `past_sequence_length + sequence_length`."""

LENGTH_AXIS = 2


def past_ports(graph: ir.Graph) -> dict[str, ir.Value]:
    """The past inputs by layer and part: `0.key`, `0.value`, `1.key` and so on."""
    found = {name[1] + "." + name[2]: port for port in graph.inputs if (name := PAST.fullmatch(port.name or ""))}
    if not found or any((port.name or "").startswith("past_") and port not in found.values() for port in graph.inputs):
        raise UnsupportedInput(
            "`--prefix`: this model keeps more than keys and values", hint="export it without `--prefix`"
        )
    return found


class _PrefixInserter:
    """Prepends the prefix to past, mask and positions of a graph: P tokens with an empty past, otherwise none."""

    def __init__(self, graph: ir.Graph, length: int) -> None:
        self._graph = graph
        self._edit = NodeEditor(graph, graph[0], "prefix")
        first = next(iter(past_ports(graph).values()))
        past = self._edit.one("Shape", [first], {"start": LENGTH_AXIS, "end": LENGTH_AXIS + 1})
        is_empty = self._edit.one("Equal", [past, integers(graph, 0)])
        self._count = self._edit.one("Where", [is_empty, integers(graph, length), integers(graph, 0)])
        tokens = value_named(graph.inputs, "input_ids")
        assert tokens is not None
        self._batch = self._edit.one("Shape", [tokens], {"start": 0, "end": 1})
        self._rows = self._edit.one("Concat", [self._batch, integers(graph, 1, 1, 1)], {"axis": 0})
        self._own = {past.producer()}

    def before_past(self, port: ir.Value, stored: ir.Value, scope: str) -> None:
        """Makes users of a past input read the prefix and the past, and users of its shape the sum of the lengths."""
        uses = [use for use in port.uses() if use.node not in self._own]
        edit = NodeEditor(self._graph, self._graph[0], scope)
        some = edit.one("Slice", [stored, integers(self._graph, 0), self._count, integers(self._graph, LENGTH_AXIS)])
        both = edit.one("Concat", [edit.one("Expand", [some, self._rows]), port], {"axis": LENGTH_AXIS})
        for node, index in uses:
            if node.op_type != "Shape":
                node.replace_input_with(index, both)
                continue
            start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", 4)
            if start <= LENGTH_AXIS < end:
                result, reading = node.outputs[0], list(node.outputs[0].uses())
                where = np.array([axis == LENGTH_AXIS for axis in range(start, end)], dtype=np.int64)
                edit = NodeEditor(self._graph, self._graph[0], f"prefix/{node.name}")
                mask = constant(self._graph, f"int64_axes_{start}_{end}", where)
                replace_uses(reading, edit.one("Add", [result, edit.one("Mul", [self._count, mask])]))

    def before_tokens(self, first_position: int) -> None:
        """Extends the mask, and shifts the positions unless the first token after the prefix has position 0."""
        mask, positions = (value_named(self._graph.inputs, name) for name in ("attention_mask", "position_ids"))
        assert mask is not None
        uses = list(mask.uses())
        shape = self._edit.one("Concat", [self._batch, self._count], {"axis": 0})
        ones = self._edit.one("Expand", [integers(self._graph, 1), shape])
        replace_uses(uses, self._edit.one("Concat", [ones, mask], {"axis": 1}))
        if first_position and positions is not None:
            uses = list(positions.uses())
            replace_uses(uses, self._edit.one("Add", [positions, self._count]))


TRAINED = "adapter"  # name of the trained tensor of the adapter; the verifier computes its own keys and values from it


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
        sources: Mapping[str, Mapped],
        weights: Mapping[str, Mapped],
    ) -> PrefixFile:
        """The file of a prefix for the decoder's graph, which is not bound to weights yet.

        Only a soft prompt reads `sources`, tensors in files; `weights` have the dtypes in which the graph will map
        them. Raises InputRefused: the prefix is of another model; UnsupportedInput: the model keeps more than keys and
        values.
        """
        ports = past_ports(traced.model.graph)
        shapes = {name: (int(port.shape[1]), int(port.shape[3])) for name, port in ports.items()}  # type: ignore
        keys = [shapes[f"{layer}.key"] for layer in range(len(shapes) // 2)]
        if keys != [shapes[f"{layer}.value"] for layer in range(len(shapes) // 2)]:
            raise UnsupportedInput("`--prefix`: keys and values differ in shape", hint="export without `--prefix`")
        if prefix.kind == "soft_prompt":
            layers = keys_and_values(traced, matches, sources, weights, prefix.content)
        else:
            layers = prefix.keys_and_values(keys)
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
        """Prepends the prefix to an empty past of a decoder's graph for prompts, in place."""
        graph, kind = model.graph, ir.DataType.FLOAT
        inserter = _PrefixInserter(graph, next(iter(self.places.values()))[1][LENGTH_AXIS])
        for name, port in past_ports(graph).items():
            (offset, shape), label = self.places[name], f"prefix.{name}"
            content = ir.ExternalTensor(self.name, offset, 4 * prod(shape), kind, shape=ir.Shape(shape), name=label)
            stored = ir.val(label, kind, content.shape, const_value=content)
            graph.register_initializer(stored)
            inserter.before_past(port, stored, label)
        inserter.before_tokens(self.prefix.first_position)
        for output in graph.outputs:
            if (output.name or "").startswith("present.") and output.shape is not None:
                axes = list(output.shape)
                output.shape = ir.Shape([*axes[:LENGTH_AXIS], PRESENT_LENGTH, *axes[LENGTH_AXIS + 1 :]])
        graph.sort()

    def manifest_fields(self) -> dict[str, Any]:
        prefix = self.prefix
        fields = {"file": self.name, "kind": prefix.kind, "length": prefix.length}
        return {"prefix": {**fields, "first_position": prefix.first_position}}


def keys_and_values(
    traced: TracedGraph,
    matches: Mapping[str, WeightSource],
    sources: Mapping[str, Mapped],
    weights: Mapping[str, LazyTensor],
    embeddings: Array,
) -> list[KeyValue]:
    """Keys and values of virtual tokens at positions 0, 1, …, by layer.

    `embeddings`, float32 `[P, hidden]`, replace rows of the embedding table. The decoder's graph is not bound to
    weights yet and not changed; values are rounded to the dtypes of `weights`. Raises InputRefused: the hidden sizes of
    the embeddings and of the model differ; UnsupportedInput: the model does not begin with an embedding table.
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
    # the weights in one folder, links followed: onnxruntime maps no link
    files = {name: placed(tensor, tensor.path.resolve()) for name, tensor in sources.items()}
    folder, *others = {tensor.path.parent for tensor in files.values()}
    if others:
        raise InputRefused(
            "`--prefix`: the weights are links into several folders, which onnxruntime cannot map together",
            hint="copy the model into one folder",
        )
    bind(traced, matches, files, weights)
    model.graph.outputs[:] = [value for value in model.graph.outputs if (value.name or "").startswith("present.")]
    RemoveUnusedNodesPass()(model)
    length = len(embeddings)
    feeds = {
        "input_ids": np.zeros((1, length), np.int64),
        "attention_mask": np.ones((1, length), np.int64),
        "position_ids": np.arange(length)[None],
        INPUTS_EMBEDS: embeddings[None],
    }
    for port in ports.values():
        feeds[str(port.name)] = np.zeros((1, int(port.shape[1]), 0, int(port.shape[3])), np.float32)  # type: ignore
    options = SessionSettings().options()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, ["CPUExecutionProvider"])
    inputs = {arg.name for arg in session.get_inputs()}
    present = session.run(None, {name: value for name, value in feeds.items() if name in inputs})
    return [(key[0], value[0]) for key, value in zip(present[::2], present[1::2], strict=True)]


def _replace_embedding(graph: ir.Graph, width: int) -> None:
    """Makes the output of the embedding module the input `inputs_embeds`, in place."""
    last = _embedding(graph, width)
    while len(uses := list(last.outputs[0].uses())) == 1 and _module(uses[0].node) == _module(last):
        last = uses[0].node  # such as the scale of an embedding
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


def _module(node: ir.Node) -> str:
    return (node.name or "").rpartition("/")[0]
