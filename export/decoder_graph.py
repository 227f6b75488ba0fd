"""The graph of a whole decoder, its weights still inputs: a few layers are traced, the others replicated.

The filled length of a static cache becomes the input `nonpad_kv_seqlen` of every `Attention` node (opset 24). The mask
hides the unfilled slots already, so results are equal; a runtime that knows the length can skip them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from llmconv.export.graph_spec import FLOAT32, GROWING, GraphSpec
from llmconv.export.input_map import InputMap
from llmconv.export.rewrite.fused_operators import fuse_for_target
from llmconv.export.rewrite.grouped_query import use_grouped_query_attention
from llmconv.export.rewrite.norms import fuse_norms, rewrite_linear_layers
from llmconv.export.rewrite.replicate import NotIsomorphic, name_everything, replicate, warm_up
from llmconv.export.traced_graph import NodeEditor, TracedGraph, integers, producer, value_named
from llmconv.export.tracing.fake_model import (
    build,
    depth,
    factors,
    first_alike,
    layer_kinds,
    period,
    refusing,
    shortened,
)
from llmconv.export.tracing.trace import trace, trace_embeddings
from llmconv.progress import say
from llmconv.runtime.onnxruntime.shared_buffers import WRITE_INDICES


def build_graph(config: Any, input_map: InputMap, spec: GraphSpec = GROWING) -> tuple[TracedGraph, int]:
    """The graph of all layers, and the number of layers that were traced.

    Three periods of layers are traced and the last is replicated; if the periods differ, all layers are traced. Raises
    UnsupportedInput: transformers or torch cannot build or trace the model.
    """
    with refusing("trace this model"):
        replicated = _replicated(config, input_map, spec)
        if replicated is not None:
            return replicated
        traced = trace(config, input_map, spec)
        _rewrite(traced, causal=not input_map.both_ways(config))
        name_everything(traced.model)
        return traced, depth(config)


def build_embeddings(config: Any, precision: str = FLOAT32, placeholders: Sequence[int] = ()) -> TracedGraph:
    """The graph of the embedding table; the tokens `placeholders` are embedded as padding.

    Raises UnsupportedInput: transformers or torch cannot build or trace the model.
    """
    with refusing("trace this model"):
        traced = trace_embeddings(shortened(config, period(config)), precision, placeholders)
        name_everything(traced.model)
        return traced


def _replicated(config: Any, input_map: InputMap, spec: GraphSpec) -> tuple[TracedGraph, int] | None:
    """The extended graph and the number of traced layers; None if that saves nothing, or layers are not alike.

    If the first layers differ from the others (dense layers before layers with experts), they are traced too. If their
    modules do not show a difference, one more period is traced in front of the compared ones.
    """
    total, repeat = depth(config), period(config)
    whole = build(config, task=spec.task)
    first = max(first_alike(layer_kinds(whole), repeat), input_map.first_layers)
    few = warm_up(total, repeat, first) + 2 * repeat
    difference: NotIsomorphic | None = None
    for traced_layers in (few, few + repeat):
        if traced_layers < total:
            short = shortened(config, traced_layers)
            if not _is_part(build(short, task=spec.task), whole):
                difference = NotIsomorphic("the first layers of a shorter model differ")
                continue
            traced = trace(short, input_map, spec)
            _rewrite(traced, causal=not input_map.both_ways(config))
            try:
                replicate(traced, total, repeat)
            except NotIsomorphic as found:
                difference = found
            else:
                name_everything(traced.model)
                return traced, traced_layers
    if difference is not None:
        say(f"tracing all {total} layers: the layers are not alike ({difference})")
    return None


def _is_part(short: Any, whole: Any) -> bool:
    kinds = layer_kinds(short)
    return kinds == layer_kinds(whole)[: len(kinds)] and factors(short).items() <= factors(whole).items()


def _rewrite(traced: TracedGraph, *, causal: bool) -> None:
    rewrite_linear_layers(traced)
    fuse_norms(traced)
    add_filled_length(traced)
    if traced.spec.cache == "shared-buffer" and causal:  # as the fused operator is
        use_grouped_query_attention(traced)
    fuse_for_target(traced)


NONPAD = 6  # index of the input of `Attention`: after query, key, value, mask, past key and past value


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
