"""LayerClasses: which layers of a model are alike, in the eager model and in every graph, node by node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmconv.verify.layers.forms import forms_of
from llmconv.verify.layers.graph_layers import GraphLayers, Layer
from llmconv.verify.layers.layer_kinds import Kind

LEAST = 3
"""Minimum number of layers of a kind of which one can be the odd one out."""


@dataclass(frozen=True)
class LayerClasses:
    """The layers of a model by class.

    Attributes:
        names: module names of the layers, in order.
        graphs: the parts of each graph, by its name.
        kinds: of the layers of the eager model.
    """

    names: tuple[str, ...]
    graphs: Mapping[str, GraphLayers]
    kinds: Sequence[Kind]

    @property
    def classes(self) -> list[list[int]]:
        """Numbers of the layers that are alike, in the order of the first of each."""
        found: dict[object, list[int]] = {}
        for number, kind in enumerate(self.kinds):
            forms = tuple(layers.layers[number].form for layers in self.graphs.values())
            found.setdefault((kind, forms), []).append(number)
        return list(found.values())

    @property
    def representatives(self) -> tuple[int, ...]:
        """The first layer of each class."""
        return tuple(numbers[0] for numbers in self.classes)

    def odd_layers(self, graph: str) -> dict[int, str]:
        """Layers of a graph that differ from most layers of their kind, each with the first node that differs."""
        found: dict[int, str] = {}
        layers = self.graphs[graph].layers
        for numbers in self._by_kind().values():
            forms = Counter(layers[number].form for number in numbers)
            usual, count = forms.most_common(1)[0]
            if len(numbers) >= LEAST and len(numbers) > count > len(numbers) / 2:
                alike = next(layers[number] for number in numbers if layers[number].form == usual)
                odd = [layers[number] for number in numbers if layers[number].form != usual]
                found |= {one.number: self._difference(graph, one, alike, count) for one in odd}
        return dict(sorted(found.items()))

    def _by_kind(self) -> dict[Kind, list[int]]:
        kinds: dict[Kind, list[int]] = {}
        for number, kind in enumerate(self.kinds):
            kinds.setdefault(kind, []).append(number)
        return kinds

    def _difference(self, graph: str, odd: Layer, usual: Layer, count: int) -> str:
        """In words, how a layer differs from one of the others."""
        parts = self.graphs[graph]
        nodes, known = parts.nodes_of(odd.nodes), Counter(usual.form.nodes)
        _, forms = forms_of(nodes, parts.source_of(odd))
        first = None
        for node, form in zip(nodes, forms, strict=True):
            if known[form] == 0:
                first = node
                break
            known[form] -= 1
        what = (
            f"node `{first.name}` ({first.op_type})"
            if first
            else "it lacks a node, or its outputs or their types are others"
        )
        return f"layer {odd.number} differs from the {count} others of its kind: {what}"
