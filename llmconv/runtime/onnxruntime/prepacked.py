"""Sessions that pack their weights: fewer and larger products, in large pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
from onnx import helper

from llmconv.runtime.onnxruntime.guard import external_fields, external_tensors
from llmconv.runtime.onnxruntime.process_heap import large_pages
from llmconv.runtime.onnxruntime.time_limit import LimitedSession, TimeLimit

WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"


def open_packed(
    path: Path, model: onnx.ModelProto, options: ort.SessionOptions, providers: Sequence[Any], limit: TimeLimit
) -> LimitedSession:
    """A session that holds its own copy of the weights, in the order in which onnxruntime's kernels read them.

    Args:
        path: the graph's file, beside which its weights lie.
        model: what the file says, without the weights; it is changed.
        options: of the session.
        providers: what runs its operators, best first.
        limit: how long it may take.
    """
    if options.graph_optimization_level != ort.GraphOptimizationLevel.ORT_DISABLE_ALL:  # else nobody folds the matrices
        join_projections(model.graph)
    size = sum(int(external_fields(tensor).get("length", 0)) for tensor in external_tensors(model))
    with large_pages(size):
        return open_changed(path, model, options, providers, limit)


def open_changed(
    path: Path, model: onnx.ModelProto, options: ort.SessionOptions, providers: Sequence[Any], limit: TimeLimit
) -> LimitedSession:
    """A session of what `model` says in the place of the file at `path`, on the weights beside that."""
    folder = str(path.parent.absolute())
    try:
        known = options.get_session_config_entry(WEIGHTS_FOLDER)
    except Exception:  # onnxruntime raises for what was not said; said twice, it would warn
        known = ""
    if known != folder:
        options.add_session_config_entry(WEIGHTS_FOLDER, folder)
    return LimitedSession(model.SerializeToString(), options, providers, limit)


def join_projections(graph: onnx.GraphProto) -> None:
    """Query, key and value of an attention come from one product where three of the same states made them.

    `GroupQueryAttention` takes them side by side as its query. onnxruntime lays the three matrices behind one another
    when it opens the graph (constant folding), before it packs them.
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
    """Whether `parts` make query, key and value of one head size out of the same, for nobody else, and in one way."""
    if attention.op_type != "GroupQueryAttention" or [part.op_type for part in parts] != ["FusedMatMul"] * 3:
        return False
    settings = [{item.name: helper.get_attribute_value(item) for item in part.attribute} for part in parts]
    said = {item.name: helper.get_attribute_value(item) for item in attention.attribute}
    heads = said["num_heads"], said["kv_num_heads"], said["kv_num_heads"]
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
    """The nodes that take the place of `parts`; `attention` reads what they make."""
    name = parts[0].output[0] + "/joined"
    product = onnx.NodeProto.FromString(parts[0].SerializeToString())
    product.input[1], product.output[0] = name + "/weight", name
    attention.input[0], attention.input[1], attention.input[2] = name, "", ""
    return [helper.make_node("Concat", [part.input[1] for part in parts], [name + "/weight"], axis=0), product]
