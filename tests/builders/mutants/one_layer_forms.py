"""Mutants of one layer that have a form of their own: they name another layer, or change the folder's weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
from onnx import helper

from tests.builders.mutants.mutants import MUTANTS, Mutant
from tests.builders.mutants.one_layer import NoPlace, WholeGraph
from tests.builders.mutants.surgery import initializer, replace_input, weight_names
from tests.builders.mutants.weights import ATTENTION_OUT, flip_bit

OneLayerForm = Callable[[WholeGraph, int, Path], onnx.ModelProto]
"""The graph with a fault in one layer; it may change the weights in the folder, too."""


def neighbor_of(graph: WholeGraph, layer: int) -> int:
    """The next layer, or the one before the last."""
    return layer + 1 if layer + 1 < len(graph.parts.layers) else layer - 1


def weight_of_neighbor(graph: WholeGraph, layer: int, folder: Path) -> onnx.ModelProto:
    """The attention output uses the weight of the next layer."""
    model = graph.copied()
    names = [weight_names(model, ATTENTION_OUT.format(at))[0] for at in (layer, neighbor_of(graph, layer))]
    mine, other = (initializer(model, name) for name in names)
    assert mine is not None and other is not None
    del mine.external_data[:]
    mine.external_data.extend(other.external_data)
    return model


def past_of_neighbor(graph: WholeGraph, layer: int, folder: Path) -> onnx.ModelProto:
    """The layer reads the past keys of the next one; nothing shows while the past is empty."""
    model, other = graph.copied(), f"past_key_values.{neighbor_of(graph, layer)}.key"
    for at in graph.parts.layers[layer].nodes:
        replace_input(model.graph.node[at], f"past_key_values.{layer}.key", other)
    return model


def layer_skipped(graph: WholeGraph, layer: int, folder: Path) -> onnx.ModelProto:
    """The layer hands on what it reads; its cache is as it was."""
    model, mine = graph.copied(), graph.parts.layers[layer]
    at = graph.parts.index.producers[mine.exit]
    node = model.graph.node[at]
    node.output[:] = ["skipped" if name == mine.exit else name for name in node.output]
    model.graph.node.insert(at + 1, helper.make_node("Identity", [mine.entry], [mine.exit], name="mutant/skipped"))
    return model


def bit_flipped(bit: int) -> OneLayerForm:
    """One bit of a weight of the layer is flipped in the folder's file; the graph is right."""

    def apply(graph: WholeGraph, layer: int, folder: Path) -> onnx.ModelProto:
        flip_bit(bit, layer)(graph.model, folder)
        return graph.model

    return apply


FORMS: dict[str, OneLayerForm] = {
    "two layers' weights swapped": weight_of_neighbor,
    "two pasts swapped": past_of_neighbor,
    "last layer skipped": layer_skipped,
    "low bit of one weight flipped": bit_flipped(0),
    "exponent bit of one weight flipped": bit_flipped(23),
}
"""By the name of the mutant that each is a form of."""

BY_NAME = {mutant.name: mutant for mutant in MUTANTS}


def in_one_layer(mutant: Mutant, graph: WholeGraph, layer: int, folder: Path) -> onnx.ModelProto:
    """The graph with a mutant in one layer.

    Args:
        mutant: of the table.
        graph: of all layers.
        layer: number of the layer.
        folder: the folder of the weights, a copy that the mutant may change.

    Raises:
        NoPlace: the layer has no place for the mutant.
    """
    form = FORMS.get(mutant.name)
    return form(graph, layer, folder) if form else graph.mutated(mutant, layer, folder)


__all__ = ["BY_NAME", "FORMS", "NoPlace", "in_one_layer", "neighbor_of"]
