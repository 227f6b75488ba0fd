"""Config -> the whole decoder as a graph without weights: trace few layers, replicate the rest."""

from __future__ import annotations

from typing import Any

from llmconv.export.fake_model import period, refusing, shortened
from llmconv.export.form import GROWING, Form
from llmconv.export.fused_norms import fuse_norms
from llmconv.export.gemm import bind_linear_layers
from llmconv.export.grouped_query import share_buffers
from llmconv.export.input_maps import InputMap
from llmconv.export.naming import name_everything
from llmconv.export.nonpad import tell_length
from llmconv.export.replicate import NotIsomorphic, replicate, warm_up
from llmconv.export.trace import TracedGraph, trace, trace_embeddings
from llmconv.progress import say


def build_graph(config: Any, input_map: InputMap, form: Form = GROWING) -> tuple[TracedGraph, int]:
    """The graph of all layers, and how many of them were traced.

    Three periods of layers are traced and the last is replicated; where the periods differ, all layers are traced.

    Args:
        config: a transformers config.
        input_map: the row of its `model_type`.
        form: how the cache is kept, and which axes are numbers.

    Raises:
        UnsupportedInput: transformers or torch cannot build or trace the model.
    """
    with refusing("trace this model"):
        return _build(config, input_map, form)


def build_embeddings(config: Any) -> TracedGraph:
    """The graph of the embedding table.

    Raises:
        UnsupportedInput: transformers or torch cannot build or trace the model.
    """
    with refusing("trace this model"):
        traced = trace_embeddings(config)
        name_everything(traced.model)
        return traced


def _build(config: Any, input_map: InputMap, form: Form) -> tuple[TracedGraph, int]:
    total = config.num_hidden_layers
    traced = _replicated(config, input_map, form)
    if traced is not None:
        return traced, warm_up(total, period(config)) + 2 * period(config)
    traced = trace(config, input_map, form)
    _improve(traced)
    name_everything(traced.model)
    return traced, total


def _replicated(config: Any, input_map: InputMap, form: Form) -> TracedGraph | None:
    """None where the model is too shallow to save anything, or its layers are not alike."""
    total, repeat = config.num_hidden_layers, period(config)
    few = warm_up(total, repeat) + 2 * repeat
    if few >= total:
        return None
    traced = trace(shortened(config, few), input_map, form)
    _improve(traced)
    try:
        replicate(traced, total, repeat)
    except NotIsomorphic as difference:
        say(f"tracing all {total} layers: the layers are not alike ({difference})")
        return None
    name_everything(traced.model)
    return traced


def _improve(traced: TracedGraph) -> None:
    """What the exporter's nodes become, in place."""
    bind_linear_layers(traced)
    tell_length(traced)
    if traced.form.cache == "shared-buffer":
        share_buffers(traced)
    if traced.form.target == "ort-cpu":
        fuse_norms(traced)
