"""Config -> the whole decoder as a graph without weights: trace few layers, replicate the rest."""

from __future__ import annotations

from typing import Any

from llmconv.export.fake_model import build, depth, period, refusing, shortened
from llmconv.export.gemm import bind_linear_layers
from llmconv.export.input_maps import InputMap
from llmconv.export.layer_kinds import factors, first_alike, layer_kinds
from llmconv.export.naming import name_everything
from llmconv.export.replicate import NotIsomorphic, replicate, warm_up
from llmconv.export.trace import TracedGraph, trace
from llmconv.progress import say


def build_graph(config: Any, input_map: InputMap) -> tuple[TracedGraph, int]:
    """The graph of all layers, and how many of them were traced.

    Three periods of layers are traced and the last is replicated; where the periods differ, all layers are traced.

    Args:
        config: a transformers config.
        input_map: the row of its `model_type`.

    Raises:
        UnsupportedInput: transformers or torch cannot build or trace the model.
    """
    with refusing("trace this model"):
        return _build(config, input_map)


def _build(config: Any, input_map: InputMap) -> tuple[TracedGraph, int]:
    total = depth(config)
    replicated = _replicated(config, input_map)
    if replicated is not None:
        return replicated
    traced = trace(config, input_map)
    bind_linear_layers(traced)
    name_everything(traced.model)
    return traced, total


def _replicated(config: Any, input_map: InputMap) -> tuple[TracedGraph, int] | None:
    """The grown graph and how many layers were traced; None where that saves nothing, or layers are not alike.

    The first layers may be others than the rest (dense ones before those with experts): they are traced too. Where that
    does not show in their modules, one more period goes in front of those that are compared.
    """
    total, repeat = depth(config), period(config)
    whole = build(config)
    kinds = layer_kinds(whole)
    few = warm_up(total, repeat, first_alike(kinds, repeat)) + 2 * repeat
    difference: NotIsomorphic | None = None
    for traced_layers in (few, few + repeat):
        if traced_layers < total:
            short = shortened(config, traced_layers)
            few_layers = build(short)
            if (
                layer_kinds(few_layers) != kinds[:traced_layers]
                or not factors(few_layers).items() <= factors(whole).items()
            ):
                difference = NotIsomorphic("with fewer of them the first ones are made otherwise")
                continue
            traced = trace(short, input_map)
            bind_linear_layers(traced)
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
