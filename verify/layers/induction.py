"""Induction: shows that a graph of any depth is the model, from its layers.

1. Structure: the graph in the file falls into a part before the layers, layers that are alike node by node within
   classes, and a part after them.
2. Weights: every initializer is the tensor that the model uses there (the audit of weights).
3. Numbers: one layer of each class, with the parts before and after, runs all scenarios; every other layer runs a few
   tokens by itself (`single_layers`).
4. Composition: the parts are the file, and values cross only where they may.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import onnx

from llmconv.errors import LlmconvError, UsageProblem
from llmconv.runtime.extra_inputs import INPUTS_EMBEDS, is_past, is_present, layer_of
from llmconv.runtime.low_memory.runner import EmptyRunner
from llmconv.runtime.onnxruntime.guard import attributes, refill, values_read_by
from llmconv.tensors import lists_by_key
from llmconv.verify.audit.weights import WeightSource, tensors_of
from llmconv.verify.bisect.replay import VerifiedFolder
from llmconv.verify.layers.graph_index import NUMBERED, Kind, NotLayered, layer_kinds, layer_names
from llmconv.verify.layers.graph_layers import GraphLayers, Layer, add_before_norms, forms_of, role, tensor_form
from llmconv.verify.reference.eager import ComputedModel
from llmconv.verify.results import Check, audited

ALL, CLASSES, SAMPLED = "all", "classes", "sampled:"
LAYERS, PARTS = "layers", "parts"  # names of the checks of structure and of composition


@dataclass(frozen=True)
class LayerChoice:
    """Which layers run by themselves: `all`, `classes` (one of each class) or `sampled:K` (K more)."""

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
        """Numbers of the layers, in order: the representatives, and samples evenly spread over the others."""
        others = [number for number in range(count) if number not in representatives]
        if self.text == CLASSES:
            others = []
        elif self.text != ALL and self._count < len(others):
            others = [others[(2 * at + 1) * len(others) // (2 * self._count)] for at in range(self._count)]
        return tuple(sorted({*representatives, *others}))


@dataclass(frozen=True)
class Induction:
    """A model whose graphs fall into layers, and which of them run by themselves."""

    classes: LayerClasses
    choice: LayerChoice

    @classmethod
    def of(
        cls,
        models: Mapping[str, onnx.ModelProto],
        source: WeightSource,
        reference: ComputedModel,
        code: Path | None,
        choice: LayerChoice,
    ) -> Induction:
        """Cuts the graphs, by name and without their weights, and compares their layers.

        Raises NotLayered: a graph or the model does not fall into layers.
        """
        graphs = {name: GraphLayers.of(model, tensors_of(model, source)) for name, model in models.items()}
        first = next(iter(graphs.values())).index
        if any(layers.index.number_of_layers != first.number_of_layers for layers in graphs.values()):
            raise NotLayered("the graphs have different numbers of layers")
        try:
            model = EmptyRunner(reference.folder, "float32", **reference.options(code)).model
        except LlmconvError as error:
            raise NotLayered(error.message) from error
        names = layer_names(model, first.number_of_layers, first.layer_list)
        return cls(LayerClasses(names, graphs, layer_kinds(model, names)), choice)

    @property
    def kept(self) -> tuple[int, ...]:
        return self.classes.representatives

    @property
    def is_whole(self) -> bool:
        return len(self.kept) == len(self.classes.names)

    @property
    def run(self) -> tuple[int, ...]:
        return self.choice.numbers(len(self.classes.names), self.kept)

    @property
    def runs_all(self) -> bool:
        return len(self.run) == len(self.classes.names)

    def runs_weight(self, name: str) -> bool:
        """Whether a tensor is one of a layer that runs, or of none."""
        match = NUMBERED.match(name)
        layer_list = next(iter(self.classes.graphs.values())).index.layer_list
        return match is None or match["list"] != layer_list or int(match["number"]) in self.run

    def left_out(self, numbers: tuple[int, ...]) -> frozenset[str]:
        """Module names of all layers but those of the given numbers."""
        return frozenset(name for number, name in enumerate(self.classes.names) if number not in numbers)

    def shortened(self, verified: VerifiedFolder) -> VerifiedFolder:
        return verified.changed(partial(keep_if_layered, kept=self.kept, tensors=self.tensors), verified.named)

    @property
    def tensors(self) -> dict[str, str]:
        """The tensor of the model that each initializer of any graph is known to be."""
        return {name: tensor for graph in self.classes.graphs.values() for name, tensor in graph.index.tensors.items()}

    def checks(self, *, alone: bool) -> list[Check]:
        """Structure and composition; if `alone`, without numbers, a layer unlike the others of its kind fails."""
        layers, parts = list[Check](), list[Check]()
        for name, graph in self.classes.graphs.items():
            odd = list(self.classes.odd_layers(name).values()) if alone else []
            layers.append(audited(LAYERS, name, odd, self._described(graph)))
            counts = f"{len(graph.index.nodes)} nodes, each in one of {len(graph.layers) + 2} parts"
            parts.append(Check(PARTS, name, "", detail=f"{counts}; one hidden state crosses each cut"))
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
    """`keep_layers` of a graph with a cache; other graphs, such as embeddings, stay as they are."""
    if any(is_past(port.name) for port in model.graph.input):
        keep_layers(model, kept, tensors)


LEAST = 3  # minimum number of layers of a kind of which one can be the odd one out


@dataclass(frozen=True)
class LayerClasses:
    """The layers of a model by class: module names in order, the parts of each graph by its name, and their kinds."""

    names: tuple[str, ...]
    graphs: Mapping[str, GraphLayers]
    kinds: Sequence[Kind]

    @property
    def classes(self) -> list[list[int]]:
        """Numbers of the layers that are alike, in the order of the first of each."""
        numbered = enumerate(self.kinds)
        forms = (((kind, *(one.layers[at].form for one in self.graphs.values())), at) for at, kind in numbered)
        return list(lists_by_key(forms).values())

    @property
    def representatives(self) -> tuple[int, ...]:
        return tuple(numbers[0] for numbers in self.classes)

    def odd_layers(self, graph: str) -> dict[int, str]:
        """Layers of a graph that differ from most layers of their kind, each with the first node that differs."""
        found: dict[int, str] = {}
        layers = self.graphs[graph].layers
        for numbers in lists_by_key((kind, number) for number, kind in enumerate(self.kinds)).values():
            forms = Counter(layers[number].form for number in numbers)
            usual, count = forms.most_common(1)[0]
            if len(numbers) >= LEAST and len(numbers) > count > len(numbers) / 2:
                alike = next(layers[number] for number in numbers if layers[number].form == usual)
                odd = [layers[number] for number in numbers if layers[number].form != usual]
                found |= {one.number: self._difference(graph, one, alike, count) for one in odd}
        return dict(sorted(found.items()))

    def _difference(self, graph: str, odd: Layer, usual: Layer, count: int) -> str:
        parts = self.graphs[graph]
        nodes, known = parts.nodes_of(odd.nodes), Counter(usual.form.nodes)
        _, forms = forms_of(nodes, parts.source_of(odd))
        what = "it lacks a node, or its outputs or their types are others"
        for node, form in zip(nodes, forms, strict=True):
            if known[form] == 0:
                what = f"node `{node.name}` ({node.op_type})"
                break
            known[form] -= 1
        return f"layer {odd.number} differs from the {count} others of its kind: {what}"


def keep_layers(model: onnx.ModelProto, kept: Collection[int], tensors: Mapping[str, str] | None = None) -> None:
    """Removes all layers of a graph but `kept`, in place; each reads the hidden state of the kept one before it.

    `tensors` as for `GraphLayers.of`. Raises NotLayered: the graph does not fall into layers, or reads the length of a
    cache that no kept layer has.
    """
    add_before_norms(model)
    layers = GraphLayers.of(model, tensors)
    removed, renamed = set[int](), _lengths(layers, kept)
    for layer in layers.layers:
        if layer.number not in kept:
            removed.update(layer.nodes)
            renamed[layer.exit] = renamed.get(layer.entry, layer.entry)
    nodes = [with_names(node, renamed) for at, node in enumerate(layers.index.nodes) if at not in removed]
    graph = model.graph
    refill(graph.node, nodes)
    refill(graph.input, [port for port in graph.input if not is_past(port.name) or layer_of(port.name) in kept])
    refill(graph.output, [port for port in graph.output if not is_present(port.name) or layer_of(port.name) in kept])
    drop_unused(model)


def drop_unused(model: onnx.ModelProto) -> None:
    """Removes the initializers and declared shapes of values that no node reads or computes, and inputs of defaults."""
    defaults = {tensor.name for tensor in model.graph.initializer}
    used = {name for node in model.graph.node for name in (*node.input, *node.output)}
    used |= {name for node in model.graph.node if node.attribute for name in values_read_by(node)}
    refill(model.graph.initializer, [tensor for tensor in model.graph.initializer if tensor.name in used])
    ports = [port for port in model.graph.input if port.name in used or port.name not in defaults]
    refill(model.graph.input, ports)
    refill(model.graph.value_info, [info for info in model.graph.value_info if info.name in used])


def join_parts(model: onnx.ModelProto, handed_on: Collection[str]) -> None:
    """Makes the parts of a graph that were stages share what each computes again, such as the mask, in place.

    `handed_on` are the hidden states between stages [batch, tokens, features], which layers read. Their first two sizes
    are those of the tokens, which the checks of layers show, and sizes of a cache those of others of its kind and type.
    """
    ports = {port.name: port for port in model.graph.input}
    tokens = next((name for name in ("input_ids", INPUTS_EMBEDS) if name in ports), "")
    read = {name for node in model.graph.node if node.op_type != "Shape" for name in node.input}
    first: dict[tuple[str, bytes], str] = {}
    for name in filter(is_past, ports):
        first.setdefault((role(name), ports[name].type.SerializeToString(deterministic=True)), name)
    for node in model.graph.node:
        if node.op_type != "Shape" or node.domain:
            continue
        name, given = node.input[0], attributes(node)
        is_of_tokens = given.get("start", 0) >= 0 and 0 < given.get("end", 3) <= 2
        if name in handed_on and name in read and tokens and is_of_tokens:
            node.input[0] = tokens
        elif name in ports and is_past(name):
            node.input[0] = first[role(name), ports[name].type.SerializeToString(deterministic=True)]
    _merge_equal(model)


def _merge_equal(model: onnx.ModelProto) -> None:
    """Drops nodes that compute what an earlier node computes, in place."""
    known = {tensor.name: tensor_form(tensor) for tensor in model.graph.initializer}
    _, forms = forms_of(model.graph.node, lambda name: known.get(name, f"`{name}`"))
    results = {port.name for port in model.graph.output}
    first: dict[str, Sequence[str]] = {}
    renamed: dict[str, str] = {}
    nodes = []
    for node, form in zip(model.graph.node, forms, strict=True):
        known_outputs = first.setdefault(form, node.output)
        differs = list(map(bool, known_outputs)) != list(map(bool, node.output))  # in which outputs it omits
        if known_outputs is node.output or results & set(node.output) or differs:
            nodes.append(with_names(node, renamed))
        else:
            renamed |= zip(node.output, known_outputs, strict=True)
    refill(model.graph.node, nodes)
    drop_unused(model)


def _lengths(layers: GraphLayers, kept: Collection[int]) -> dict[str, str]:
    """The cache of a kept layer for each removed one whose shape is read: one with the same declared shape."""
    index, outside = layers.index, {*layers.prologue, *layers.epilogue}
    ports = {name: port for name, port in index.inputs.items() if is_past(name)}
    past = {name: bytes(port.type.SerializeToString(deterministic=True)) for name, port in ports.items()}
    alike = {kind: name for name, kind in reversed(past.items()) if layer_of(name) in kept}
    found: dict[str, str] = {}
    for name, kind in past.items():
        if layer_of(name) in kept:
            continue
        if kind not in alike and outside & set(index.readers.get(name, ())):
            raise NotLayered(f"the shape of `{name}` is that of no other cache")
        found |= {name: alike[kind]} if kind in alike else {}
    return found


def with_names(node: onnx.NodeProto, names: dict[str, str]) -> onnx.NodeProto:
    """A copy of a node that reads other values, also in its subgraphs."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    for at, name in enumerate(copy.input):
        copy.input[at] = names.get(name, name)
    for attribute in copy.attribute:
        for graph in [attribute.g] if attribute.HasField("g") else attribute.graphs:
            own = {name for one in graph.node for name in one.output}
            inner = [with_names(one, {old: new for old, new in names.items() if old not in own}) for one in graph.node]
            refill(graph.node, inner)
    return copy
