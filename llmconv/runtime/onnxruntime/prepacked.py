"""Sessions with prepacked weights: fewer and larger matrix products, in huge pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
from onnx import helper

from llmconv.runtime.onnxruntime.guard import external_fields, external_tensors, nodes
from llmconv.runtime.onnxruntime.process_heap import huge_pages
from llmconv.runtime.onnxruntime.time_limit import LimitedSession, TimeLimit

WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
"""Option for the weight folder of a model in memory (onnxruntime_session_options_config_keys.h)."""


def open_packed(
    path: Path, model: onnx.ModelProto, options: ort.SessionOptions, providers: Sequence[Any], limit: TimeLimit
) -> LimitedSession:
    """A session with its own copy of the weights in the layout of onnxruntime's kernels.

    `model`, the graph to run, is without its weights, which are in the folder of `path`.
    """
    size = sum(int(external_fields(tensor).get("length", 0)) for tensor in external_tensors(model))
    with huge_pages(size):
        return open_changed(path, model, options, providers, limit)


def open_changed(
    path: Path, model: onnx.ModelProto, options: ort.SessionOptions, providers: Sequence[Any], limit: TimeLimit
) -> LimitedSession:
    """A session of `model`, without its weights, instead of the file at `path`, in whose folder the weights are."""
    model, weights = followed(model, path.parent.absolute())
    folder = str(weights)
    try:
        known = options.get_session_config_entry(WEIGHTS_FOLDER)
    except Exception:  # raised for an unset entry; setting one twice would warn
        known = ""
    if known != folder:
        options.add_session_config_entry(WEIGHTS_FOLDER, folder)
    return LimitedSession(model.SerializeToString(), options, providers, limit)


def join_projections(graph: onnx.GraphProto) -> None:
    """Replaces the three products of query, key and value with the same states by one product.

    `GroupQueryAttention` accepts the three concatenated as its query. onnxruntime concatenates the matrices when it
    opens the graph (constant folding), before it packs them.
    """
    makers = {output: node for node in graph.node for output in node.output}
    uses = Counter([name for node in graph.node for name in node.input] + [value.name for value in graph.output])
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    nodes: list[onnx.NodeProto] = []
    joined: set[str] = set()
    for node in graph.node:
        made = [makers.get(name) for name in node.input[:3]]
        parts = [part for part in made if part is not None]
        if _can_join(node, parts, uses, shapes):
            joined |= {part.output[0] for part in parts}
            nodes += _join(node, parts)
        nodes.append(node)
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes if node.output[0] not in joined]
    del graph.node[:]
    graph.node.extend(kept)


def _can_join(
    attention: onnx.NodeProto,
    parts: Sequence[onnx.NodeProto],
    uses: Mapping[str, int],
    shapes: Mapping[str, tuple[int, ...]],
) -> bool:
    """Whether `parts` compute query, key and value from the same states, alike, for one head size and no other node."""
    if attention.op_type != "GroupQueryAttention" or [part.op_type for part in parts] != ["FusedMatMul"] * 3:
        return False
    settings = [{item.name: helper.get_attribute_value(item) for item in part.attribute} for part in parts]
    fields = {item.name: helper.get_attribute_value(item) for item in attention.attribute}
    heads = fields["num_heads"], fields["kv_num_heads"], fields["kv_num_heads"]
    weights = [shapes.get(part.input[1], ()) for part in parts]
    return (
        settings[0] == settings[1] == settings[2]
        and settings[0].get("transB") == 1
        and len({part.input[0] for part in parts}) == 1
        and all(uses[part.output[0]] == 1 for part in parts)
        and all(len(weight) == 2 for weight in weights)
        and len({weight[0] / count for weight, count in zip(weights, heads, strict=True)}) == 1
    )


def _join(attention: onnx.NodeProto, parts: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """The nodes that replace `parts`; changes the inputs of `attention`."""
    name = parts[0].output[0] + "/joined"
    product = onnx.NodeProto.FromString(parts[0].SerializeToString())
    product.input[1], product.output[0] = name + "/weight", name
    attention.input[0], attention.input[1], attention.input[2] = name, "", ""
    return [helper.make_node("Concat", [part.input[1] for part in parts], [name + "/weight"], axis=0), product]


def followed(model: onnx.ModelProto, folder: Path) -> tuple[onnx.ModelProto, Path]:
    """A graph, or a copy, and the folder of its weights, after following links that all lead into one folder."""
    names = {external_fields(tensor)["location"] for tensor in external_tensors(model)}
    targets = {name: (folder / name).resolve() for name in names if (folder / name).is_symlink()}
    homes = {target.parent for target in targets.values()}
    if len(targets) < len(names) or len(homes) != 1:
        return model, folder
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for tensor in external_tensors(copy):
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = targets[entry.value].name
    return copy, homes.pop()


PACKED_ONLY = {"MatMulNBits", "QMoE", "DynamicQuantizeMatMul", "QuantizeLinear"}
"""Operators that dequantize the whole matrix at every call unless onnxruntime packs it when the graph is opened."""


def is_packed(model: onnx.ModelProto) -> bool:
    """Whether sessions of a graph pack its weights, whatever the settings are."""
    return bool(PACKED_ONLY & {node.op_type for node in nodes(model)})
