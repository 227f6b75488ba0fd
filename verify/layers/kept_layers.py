"""Cuts layers out of a graph: what remains is the graph of a model of fewer layers, of nodes of the file itself."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import onnx

from llmconv.runtime.cache_names import is_past, is_present, layer_of
from llmconv.runtime.low_memory.graph_pieces import values_read_by
from llmconv.verify.layers.graph_index import NotLayered
from llmconv.verify.layers.graph_layers import GraphLayers


def keep_layers(model: onnx.ModelProto, kept: Collection[int], tensors: Mapping[str, str] | None = None) -> None:
    """Removes all other layers of a graph in place; each kept layer reads the hidden state of the kept one before it.

    Args:
        model: the graph without its weights.
        kept: numbers of the layers to keep.
        tensors: as for `GraphLayers.of`.

    Raises:
        NotLayered: the graph does not fall into layers, or reads the length of a cache that no kept layer has.
    """
    layers = GraphLayers.of(model, tensors)
    removed = {at for layer in layers.layers if layer.number not in kept for at in layer.nodes}
    renamed = {**_bypassed(layers, kept), **_lengths(layers, kept)}
    nodes = [_renamed(node, renamed) for at, node in enumerate(layers.index.nodes) if at not in removed]
    graph = model.graph
    _replace(graph.node, nodes)
    _replace(graph.input, [port for port in graph.input if not is_past(port.name) or layer_of(port.name) in kept])
    _replace(graph.output, [port for port in graph.output if not is_present(port.name) or layer_of(port.name) in kept])
    drop_unused(model)


def drop_unused(model: onnx.ModelProto) -> None:
    """Removes the initializers and declared shapes of values that no node reads or computes, and inputs of defaults."""
    defaults = {tensor.name for tensor in model.graph.initializer}
    used = {name for node in model.graph.node for name in (*node.input, *node.output)} | _inner_names(model)
    _replace(model.graph.initializer, [tensor for tensor in model.graph.initializer if tensor.name in used])
    ports = [port for port in model.graph.input if port.name in used or port.name not in defaults]
    _replace(model.graph.input, ports)
    _replace(model.graph.value_info, [info for info in model.graph.value_info if info.name in used])


def _bypassed(layers: GraphLayers, kept: Collection[int]) -> dict[str, str]:
    """The hidden state that replaces that of each removed layer."""
    found: dict[str, str] = {}
    for layer in layers.layers:
        if layer.number not in kept:
            found[layer.exit] = found.get(layer.entry, layer.entry)
    return found


def _lengths(layers: GraphLayers, kept: Collection[int]) -> dict[str, str]:
    """The cache of a kept layer for each removed one whose shape is read: one with the same declared shape."""
    index, outside = layers.index, {*layers.prologue, *layers.epilogue}
    past = {name: _type_of(port) for name, port in index.inputs.items() if is_past(name)}
    alike = {kind: name for name, kind in reversed(past.items()) if layer_of(name) in kept}
    found: dict[str, str] = {}
    for name, kind in past.items():
        if layer_of(name) in kept:
            continue
        if kind not in alike and outside & set(index.readers.get(name, ())):
            raise NotLayered(f"the shape of `{name}` is that of no other cache")
        found |= {name: alike[kind]} if kind in alike else {}
    return found


def _type_of(port: onnx.ValueInfoProto) -> bytes:
    return bytes(port.type.SerializeToString(deterministic=True))


def _renamed(node: onnx.NodeProto, names: dict[str, str]) -> onnx.NodeProto:
    """A copy of a node that reads other values, also in its subgraphs."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    for at, name in enumerate(copy.input):
        copy.input[at] = names.get(name, name)
    for attribute in copy.attribute:
        for graph in [attribute.g] if attribute.HasField("g") else attribute.graphs:
            own = {name for one in graph.node for name in one.output}
            inner = [_renamed(one, {old: new for old, new in names.items() if old not in own}) for one in graph.node]
            _replace(graph.node, inner)
    return copy


def _inner_names(model: onnx.ModelProto) -> set[str]:
    return {name for node in model.graph.node if node.attribute for name in values_read_by(node)}


def _replace(field: Any, items: Iterable[Any]) -> None:
    """Replaces the content of a repeated protobuf field."""
    copies = list(items)
    del field[:]
    field.extend(copies)
