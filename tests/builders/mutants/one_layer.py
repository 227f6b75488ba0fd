"""Mutants of one layer: a mutant of the table, restricted to one layer of a graph of any depth.

The mutant is applied to a copy of the graph that has that layer alone, renumbered to the one that the mutant looks
for. What the layer then computes replaces the layer in the whole graph. Shared values that the mutant changed, such as
a mask, are computed a second time for this layer, so that all other layers stay as they were.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from llmconv.runtime.extra_inputs import is_present, layer_of
from llmconv.runtime.onnxruntime.guard import values_read_by
from llmconv.verify.layers.graph_layers import GraphLayers
from llmconv.verify.layers.induction import drop_unused, keep_layers
from tests.builders.mutants.mutants import Mutant
from tests.builders.mutants.weights import Surgery

NUMBER = r"\b(layers|h|past_key_values|present)\.{}\b"
"""A layer's number in the names of its nodes, weights and caches."""


class NoPlace(Exception):
    """The mutant changes nothing that the layer computes, or more than the layer."""


@dataclass(frozen=True)
class WholeGraph:
    """A graph of all layers.

    Attributes:
        model: the graph without its weights.
        parts: its layers.
    """

    model: onnx.ModelProto
    parts: GraphLayers

    @classmethod
    def load(cls, path: Path) -> WholeGraph:
        """The graph of a file."""
        model = onnx.load(path, load_external_data=False)
        return cls(model, GraphLayers.of(model))

    def copied(self) -> onnx.ModelProto:
        """A copy that may be changed."""
        return _copied(self.model)

    def mutated(self, mutant: Mutant, layer: int, folder: Path) -> onnx.ModelProto:
        """A copy of the graph with a mutant in one layer.

        Args:
            mutant: of the table.
            layer: number of the layer.
            folder: the folder of the weights, a copy that the mutant may change.

        Raises:
            NoPlace: the layer has no place for the mutant.
        """
        surgery = mutant.apply
        found = self.with_surgery(surgery, layer, mutant.layer or 1, folder)
        if _content(found) == _content(self.model):
            raise NoPlace("it changes nothing that the layer reads or computes")
        return found

    def with_surgery(self, surgery: Surgery, layer: int, number: int, folder: Path) -> onnx.ModelProto:
        """The graph after a surgery on one layer; equal to the graph if that changes nothing.

        Args:
            surgery: changes a graph in place.
            layer: number of the layer.
            number: the number that the surgery looks for.
            folder: the folder of the weights.

        Raises:
            NoPlace: the surgery finds no place, or one outside of the layer.
        """
        copy = _copied(self.model)
        keep_layers(copy, {layer})
        _renumber(copy.graph, layer, number)
        before = _copied(copy)
        try:
            applied = surgery(copy, folder)
        except (AssertionError, IndexError, StopIteration, ValueError) as error:
            raise NoPlace("it needs more than one layer, or another family") from error
        if not applied:
            raise NoPlace("it has no place")
        changed = _changed(before, copy)
        _renumber(before.graph, number, layer)
        _renumber(copy.graph, number, layer)
        return self._grafted(copy, {_numbered(name, number, layer) for name in changed}, layer)

    def _grafted(self, copy: onnx.ModelProto, changed: set[str], layer: int) -> onnx.ModelProto:
        """The graph with what a layer computes in a copy of one layer.

        Args:
            copy: the changed copy.
            changed: names of its values that are new or computed in another way.
            layer: number of the layer.
        """
        mine = self.parts.layers[layer]
        entry = self.parts.layers[0].entry
        cached = [port.name for port in self.model.graph.output if is_present(port.name)]
        roots = [mine.exit, *(name for name in cached if layer_of(name) == layer)]
        shared = {name for node in self.parts.nodes_of(self.parts.prologue) for name in node.output} - changed
        nodes = _needed(copy, roots, {entry, *shared})
        names = {**self._second_names(nodes, changed, layer), entry: mine.entry}
        found = _copied(self.model)
        old = set(mine.nodes)
        kept = [node for at, node in enumerate(self.model.graph.node) if at not in old]
        first = sum(at not in old for at in range(min(old)))
        _replace(found.graph.node, [*kept[:first], *(_renamed(node, names) for node in nodes), *kept[first:]])
        read = {name for node in nodes for name in values_read_by(node)}
        _add_tensors(found, copy, read & changed, names)
        _sort(found)
        drop_unused(found)
        return found

    def _second_names(self, nodes: Iterable[onnx.NodeProto], changed: set[str], layer: int) -> dict[str, str]:
        """Names for changed values that other parts of the graph still read as they were."""
        own = set(self.parts.layers[layer].nodes)
        read = {name for at, names in enumerate(self.parts.index.reads) if at not in own for name in names}
        read |= {port.name for port in self.model.graph.output}
        mine = {name for at in own for name in self.model.graph.node[at].output}
        used = {name for node in nodes for name in (*values_read_by(node), *node.output)}
        return {name: f"{name}/of_layer_{layer}" for name in sorted(used & changed & read - mine)}


def _add_tensors(found: onnx.ModelProto, copy: onnx.ModelProto, chosen: set[str], names: Mapping[str, str]) -> None:
    """Adds initializers that the layer reads, in place of those of the same name."""
    tensors = {tensor.name: tensor for tensor in found.graph.initializer}
    for tensor in copy.graph.initializer:
        if tensor.name in chosen:
            added = onnx.TensorProto.FromString(tensor.SerializeToString())
            added.name = names.get(tensor.name, tensor.name)
            tensors[added.name] = added
    _replace(found.graph.initializer, tensors.values())


def _copied(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def _changed(before: onnx.ModelProto, after: onnx.ModelProto) -> set[str]:
    """Names of values and initializers that are new, or that are not what they were."""
    known = {tensor.name: _bytes(tensor) for tensor in before.graph.initializer}
    known |= {name: _bytes(node) for node in before.graph.node for name in node.output}
    found = {tensor.name for tensor in after.graph.initializer if known.get(tensor.name) != _bytes(tensor)}
    for node in after.graph.node:
        new = any(known.get(name) != _bytes(node) for name in node.output)
        if new or found & set(values_read_by(node)):
            found.update(node.output)
    return found


def _needed(model: onnx.ModelProto, roots: Collection[str], given: Collection[str]) -> list[onnx.NodeProto]:
    """The nodes that values depend on, in order, without those that compute given values."""
    makers = {name: at for at, node in enumerate(model.graph.node) for name in node.output}
    if missing := [name for name in roots if name not in makers]:
        raise NoPlace(f"`{missing[0]}` has no node that computes it")
    ports = {port.name for port in model.graph.input} | {tensor.name for tensor in model.graph.initializer}
    found, waiting = set[int](), list(roots)
    while waiting:
        name = waiting.pop()
        if name not in makers and name not in ports and name not in given and name:
            raise NoPlace(f"`{name}` is of another layer")
        if name not in given and name in makers and makers[name] not in found:
            found.add(makers[name])
            waiting += values_read_by(model.graph.node[makers[name]])
    return [model.graph.node[at] for at in sorted(found)]


def _renamed(node: onnx.NodeProto, names: Mapping[str, str]) -> onnx.NodeProto:
    """A copy of a node with other names of values, also in its subgraphs."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    _rename(copy, lambda name: names.get(name, name))
    copy.name += "/again" if set(node.output) & names.keys() else ""
    return copy


def _rename(node: onnx.NodeProto, change: Callable[[str], str]) -> None:
    node.input[:] = [change(name) for name in node.input]
    node.output[:] = [change(name) for name in node.output]
    for attribute in node.attribute:
        for graph in [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]:
            for inner in graph.node:
                _rename(inner, change)


def _numbered(name: str, old: int, new: int) -> str:
    return re.sub(NUMBER.format(old), rf"\g<1>.{new}", name)


def _renumber(graph: onnx.GraphProto, old: int, new: int) -> None:
    """Gives the only layer of a graph another number, in all names."""
    for node in graph.node:
        node.name = _numbered(node.name, old, new)
        _rename(node, lambda name: _numbered(name, old, new))
    for item in (*graph.initializer, *graph.input, *graph.output, *graph.value_info):
        item.name = _numbered(item.name, old, new)


def _sort(model: onnx.ModelProto) -> None:
    """Puts nodes behind those that compute what they read; the order stays where it may."""
    made = {tensor.name for tensor in model.graph.initializer} | {port.name for port in model.graph.input} | {""}
    waiting, ordered = list(model.graph.node), list[onnx.NodeProto]()
    while waiting:
        late = list[onnx.NodeProto]()
        for node in waiting:
            ready = set(values_read_by(node)) <= made
            (ordered if ready else late).append(node)
            made.update(node.output if ready else ())
        assert len(late) < len(waiting), "the nodes read each other"
        waiting = late
    _replace(model.graph.node, ordered)


def _content(model: onnx.ModelProto) -> list[bytes]:
    """The nodes and initializers in any order."""
    return sorted(map(_bytes, (*model.graph.node, *model.graph.initializer)))


def _bytes(item: onnx.NodeProto | onnx.TensorProto) -> bytes:
    return bytes(item.SerializeToString(deterministic=True))


def _replace(field: Any, items: Iterable[Any]) -> None:
    """Replaces the content of a repeated protobuf field, which may own the items."""
    copies = [type(item).FromString(item.SerializeToString()) for item in items]
    del field[:]
    field.extend(copies)
