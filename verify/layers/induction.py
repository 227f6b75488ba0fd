"""Induction: shows that a graph of any depth is the model, from its layers.

1. Structure: the graph in the file falls into a part before the layers, layers that are alike node by node within
   classes, and a part after them.
2. Weights: every initializer is the tensor that the model uses there (the audit of weights).
3. Numbers: one layer of each class, with the parts before and after, runs all scenarios; every other layer runs a few
   tokens by itself (`single_layers`).
4. Composition: the parts are the file, and values cross only where they may.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import onnx

from llmconv.errors import LlmconvError, UsageProblem
from llmconv.runtime.cache_names import is_past
from llmconv.runtime.low_memory.runner import StreamedRunner
from llmconv.verify.audit.weights import WeightSource, tensors_of
from llmconv.verify.bisect.replay import VerifiedFolder
from llmconv.verify.layers.classes import LayerClasses
from llmconv.verify.layers.graph_index import NUMBERED, NotLayered
from llmconv.verify.layers.graph_layers import GraphLayers
from llmconv.verify.layers.kept_layers import keep_layers
from llmconv.verify.layers.layer_kinds import layer_kinds, layer_names
from llmconv.verify.results.report import Check

ALL, CLASSES, SAMPLED = "all", "classes", "sampled:"

LAYERS, PARTS = "layers", "parts"
"""Names of the checks of structure and of composition."""


@dataclass(frozen=True)
class LayerChoice:
    """Which layers run by themselves.

    Attributes:
        text: `all`, `classes` (one of each class) or `sampled:K` (K more).
    """

    text: str = ALL

    def __post_init__(self) -> None:
        if self.text not in (ALL, CLASSES) and self._count < 1:
            raise UsageProblem(
                f"`{self.text[:40]}` names no layers", hint="give `all`, `classes` or `sampled:K`, K at least 1"
            )

    @property
    def _count(self) -> int:
        digits = self.text.removeprefix(SAMPLED) if self.text.startswith(SAMPLED) else ""
        return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 7 else 0

    def numbers(self, count: int, representatives: tuple[int, ...]) -> tuple[int, ...]:
        """Numbers of the layers, in order; sampled ones are evenly spread over the others.

        Args:
            count: number of layers.
            representatives: one layer of each class, which always run.
        """
        others = [number for number in range(count) if number not in representatives]
        if self.text == CLASSES:
            others = []
        elif self.text != ALL and self._count < len(others):
            others = [others[(2 * at + 1) * len(others) // (2 * self._count)] for at in range(self._count)]
        return tuple(sorted({*representatives, *others}))


@dataclass(frozen=True)
class Induction:
    """A model whose graphs fall into layers.

    Attributes:
        classes: the layers by class.
        choice: which layers run by themselves.
    """

    classes: LayerClasses
    choice: LayerChoice

    @classmethod
    def of(
        cls,
        models: Mapping[str, onnx.ModelProto],
        source: WeightSource,
        reference: Path,
        code: Path | None,
        choice: LayerChoice,
    ) -> Induction:
        """Cuts the graphs and compares their layers.

        Args:
            models: the graphs without their weights, by name.
            source: the weights that they may refer to.
            reference: the model's folder.
            code: the reference's folder where its own code is trusted.
            choice: which layers run by themselves.

        Raises:
            NotLayered: a graph or the model does not fall into layers.
        """
        graphs = {name: GraphLayers.of(model, tensors_of(model, source)) for name, model in models.items()}
        first = next(iter(graphs.values())).index
        if any(layers.index.number_of_layers != first.number_of_layers for layers in graphs.values()):
            raise NotLayered("the graphs have different numbers of layers")
        try:
            model = StreamedRunner(reference, "float32", code=code).model
        except LlmconvError as error:
            raise NotLayered(error.message) from error
        names = layer_names(model, first.number_of_layers, first.layer_list)
        return cls(LayerClasses(names, graphs, layer_kinds(model, names)), choice)

    @property
    def kept(self) -> tuple[int, ...]:
        """One layer of each class."""
        return self.classes.representatives

    @property
    def is_whole(self) -> bool:
        """Whether no two layers are alike, so that all layers run all scenarios."""
        return len(self.kept) == len(self.classes.names)

    @property
    def run(self) -> tuple[int, ...]:
        """The layers that run by themselves."""
        return self.choice.numbers(len(self.classes.names), self.kept)

    @property
    def runs_all(self) -> bool:
        """Whether every layer runs by itself."""
        return len(self.run) == len(self.classes.names)

    def runs_weight(self, name: str) -> bool:
        """Whether a tensor is one of a layer that runs, or of none."""
        match = NUMBERED.match(name)
        return match is None or match["list"] != self._layer_list or int(match["number"]) in self.run

    @property
    def _layer_list(self) -> str:
        return next(iter(self.classes.graphs.values())).index.layer_list

    def left_out(self, numbers: tuple[int, ...]) -> frozenset[str]:
        """Module names of all layers but those of the given numbers."""
        return frozenset(name for number, name in enumerate(self.classes.names) if number not in numbers)

    def shortened(self, verified: VerifiedFolder) -> VerifiedFolder:
        """The folder with graphs of one layer of each class."""
        return verified.changed(partial(keep_if_layered, kept=self.kept, tensors=self.tensors), verified.named)

    @property
    def tensors(self) -> dict[str, str]:
        """The tensor of the model that each initializer of any graph is known to be."""
        return {name: tensor for graph in self.classes.graphs.values() for name, tensor in graph.index.tensors.items()}

    def checks(self, *, alone: bool) -> list[Check]:
        """The checks of structure and composition.

        Args:
            alone: no numbers are compared, so that a layer unlike the others of its kind is a failure.
        """
        layers, parts = list[Check](), list[Check]()
        for name, graph in self.classes.graphs.items():
            odd = list(self.classes.odd_layers(name).values()) if alone else []
            detail = "; ".join(odd[:5]) or self._described(graph)
            layers.append(Check(LAYERS, name, "", verdict="fail" if odd else "pass", detail=detail))
            parts.append(Check(PARTS, name, "", detail=_composed(graph)))
        return layers + parts

    def odd_layers(self) -> dict[int, str]:
        """By number, the layers of any graph that differ from the others of their kind, in words."""
        found: dict[int, str] = {}
        for name in self.classes.graphs:
            for number, text in self.classes.odd_layers(name).items():
                found.setdefault(number, f"{name}: {text}")
        return dict(sorted(found.items()))

    def _described(self, graph: GraphLayers) -> str:
        classes = self.classes.classes
        sizes = ", ".join(f"{len(numbers)} like layer {numbers[0]}" for numbers in classes[:4])
        more = f" and {len(classes) - 4} more" if len(classes) > 4 else ""
        outside = f"{len(graph.prologue)} nodes before and {len(graph.epilogue)} after them"
        return f"{len(graph.layers)} layers, alike node by node: {sizes}{more}; {outside}"


def keep_if_layered(model: onnx.ModelProto, kept: tuple[int, ...], tensors: Mapping[str, str]) -> None:
    """`keep_layers` of a graph with a cache; other graphs, such as embeddings, stay as they are.

    Args:
        model: the graph without its weights, changed in place.
        kept: numbers of the layers to keep.
        tensors: the tensor of the model that each initializer is known to be.
    """
    if any(is_past(port.name) for port in model.graph.input):
        keep_layers(model, kept, tensors)


def _composed(graph: GraphLayers) -> str:
    parts = len(graph.layers) + 2
    return f"{len(graph.index.nodes)} nodes, each in one of {parts} parts; one hidden state crosses each cut"
