"""Replicates layers: the last two traced periods are matched node by node, then the last one is cloned.

    warm-up layers | period A | period B | clone 1 | clone 2 | …  | epilogue

Each input of a node of B must be related to the same input in A: the same value (shared), weights or past inputs whose
names differ by the layer number (numbered), or a result of the period before (carried: the hidden state). Otherwise
the periods are not isomorphic, and the caller traces all layers instead. A node is then named after its module, such
as `model.layers.7.self_attn.q_proj/Gemm`; the exporter's metadata have local paths, which differ between machines.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

import onnx_ir as ir

from llmconv.export.traced_graph import TracedGraph, producer, scopes, value_named
from llmconv.runtime.extra_inputs import CACHE_NAME, cache_order

PROLOGUE, EPILOGUE = -1, 1 << 30


class NotIsomorphic(Exception):
    """Two periods differ; the message contains the place."""


@dataclass
class _Periods:
    """The matched periods: their nodes in order, and the value in B of each value in A."""

    first: list[ir.Node]
    second: list[ir.Node]
    counterpart: dict[ir.Value, ir.Value]


def warm_up(num_layers: int, period: int, first: int = 0) -> int:
    """Number of layers before period A: at least one whole period, which creates the values shared by all layers.

    `first` is the number of layers before the repeating pattern of length `period` begins.
    """
    before = first + period
    return before + (num_layers - before) % period


def replicate(traced: TracedGraph, num_layers: int, period: int) -> None:
    """Extends the graph of a few layers to `num_layers` in place; `period` is the length of the repeating pattern.

    Raises NotIsomorphic: the last two periods differ in more than names.
    """
    layer_of = _layers_of_nodes(traced)
    start = traced.num_layers - 2 * period
    periods = _match(traced, layer_of, start, period)
    last = set(periods.counterpart.values())
    for node, layer in layer_of.items():  # the clones could not replace other layers than the last
        for value in node.inputs if layer == EPILOGUE else ():
            source = producer(value)
            if source is not None and value not in last and layer_of[source] not in (PROLOGUE, EPILOGUE):
                raise NotIsomorphic(f"`{node.name}` reads a layer before the last")
    latest = {value: value for value in periods.counterpart.values()}
    for first_layer in range(traced.num_layers, num_layers, period):
        latest = _clone(traced, periods, latest, first_layer - start - period)
        _number_unused(traced, period, first_layer - start - period)
    for node, layer in layer_of.items():
        for index, value in enumerate(node.inputs) if layer == EPILOGUE else ():
            if value in latest:
                node.replace_input_with(index, latest[value])
    graph = traced.model.graph  # the cache last, layers in order, key before value, states after both
    for ports in (graph.inputs, graph.outputs):
        ports[:] = sorted(ports, key=lambda port: cache_order(port.name or ""))
    traced.model.graph.sort()
    traced.num_layers = num_layers


def _layers_of_nodes(traced: TracedGraph) -> dict[ir.Node, int]:
    """The layer of every node: PROLOGUE before the first layer, EPILOGUE after the last."""
    pattern = re.compile(re.escape(traced.layers_name) + r"\.(\d+)(\.|$)")
    layers: dict[ir.Node, int] = {}
    for node in traced.model.graph:
        numbers = [int(match[1]) for name in scopes(node) if (match := pattern.match(name))]
        inherited = max((layers[source] for source in node.predecessors()), default=PROLOGUE)
        if numbers:
            layers[node] = numbers[0]
        elif not scopes(node) or inherited == PROLOGUE:
            layers[node] = inherited
        else:
            layers[node] = EPILOGUE
    return layers


def _match(traced: TracedGraph, layer_of: dict[ir.Node, int], start: int, period: int) -> _Periods:
    first = [node for node, layer in layer_of.items() if start <= layer < start + period]
    second = [node for node, layer in layer_of.items() if start + period <= layer < start + 2 * period]
    if len(first) != len(second):
        raise NotIsomorphic(f"{len(first)} nodes, then {len(second)}")
    counterpart: dict[ir.Value, ir.Value] = {}
    in_first = set(first)

    def matches(a: ir.Value | None, b: ir.Value | None) -> bool:
        if a is None or b is None or a in counterpart or a is b:
            return b is counterpart.get(a, a) if a is not None else b is None
        carried = a.producer() is not None and a.producer() not in in_first and b.producer() in in_first
        numbered = a.name is not None and shift(a.name, traced.layers_name, period) == b.name
        return carried or numbered or (a.const_value is not None and _content(a.const_value) == _content(b.const_value))

    for left, right in zip(first, second, strict=True):
        if _kind(left) != _kind(right):
            raise NotIsomorphic(f"`{left.name}` ({left.op_type}), then `{right.name}` ({right.op_type})")
        if not all(matches(a, b) for a, b in zip(left.inputs, right.inputs, strict=True)):
            raise NotIsomorphic(f"an input of `{left.name}` ({left.op_type})")
        counterpart.update(zip(left.outputs, right.outputs, strict=True))
    return _Periods(first, second, counterpart)


def _kind(node: ir.Node) -> tuple[object, ...]:
    values = {name: attribute.value for name, attribute in node.attributes.items()}
    attributes = {
        name: _content(value) if isinstance(value, ir.TensorProtocol) else value for name, value in values.items()
    }
    return node.domain, node.op_type, len(node.inputs), len(node.outputs), attributes


def _content(tensor: ir.TensorProtocol | None) -> tuple[object, ...]:
    """Comparable content: tensors of equal content do not compare equal."""
    return (tensor.dtype, tuple(tensor.shape), tensor.tobytes()) if tensor is not None else ()


def shift(name: str, layers_name: str, by: int) -> str | None:
    """The name of a weight or cache tensor `by` layers later; None if it contains no layer number.

    `layers_name` is the name of the list of layers, such as `model.layers`.
    """
    for pattern in (re.compile(re.escape(layers_name) + r"\.(\d+)\."), CACHE_NAME):
        match = pattern.match(name)
        if match:
            start, stop = match.span(match.lastindex or 0)
            return f"{name[:start]}{int(match[match.lastindex or 0]) + by}{name[stop:]}"
    return None


def _clone(
    traced: TracedGraph, periods: _Periods, latest: dict[ir.Value, ir.Value], by: int
) -> dict[ir.Value, ir.Value]:
    """Appends one more period, `by` layers after B; returns its value of each value in B."""
    graph, layers_name = traced.model.graph, traced.layers_name
    copies: dict[ir.Value, ir.Value] = {}
    numbers = re.compile(rf"(?<={re.escape(layers_name)}\.)\d+")

    def cloned(a: ir.Value | None, b: ir.Value | None) -> ir.Value | None:
        if b is None or a is b or b in copies:
            return copies.get(b, b) if b is not None else None
        if b in periods.counterpart:  # computed in A: the hidden state that enters B
            return latest[periods.counterpart[b]]
        name = shift(b.name or "", layers_name, by)
        return b if name is None else _numbered_input(traced, b, name)

    for left, right in zip(periods.first, periods.second, strict=True):
        inputs = [cloned(a, b) for a, b in zip(left.inputs, right.inputs, strict=True)]
        attributes = list(right.attributes.values())
        node = ir.Node(right.domain, right.op_type, inputs, attributes, num_outputs=len(right.outputs))
        for key, text in right.metadata_props.items():
            node.metadata_props[key] = numbers.sub(lambda found: str(int(found[0]) + by), text)
        graph.append(node)
        for old, new in zip(right.outputs, node.outputs, strict=True):
            new.shape, new.type = old.shape, old.type
            copies[old] = new
            if old.is_graph_output() and old.name is not None:
                new.name = shift(old.name, layers_name, by)
                graph.outputs.append(new)
    return copies


def _numbered_input(traced: TracedGraph, like: ir.Value, name: str) -> ir.Value:
    """The weight or past input `name`, created with the type and shape of that of another layer."""
    graph = traced.model.graph
    existing = traced.weights.get(name) or value_named(graph.inputs, name)
    if existing is not None:
        return existing
    value = ir.Value(name=name, shape=like.shape, type=like.type)
    graph.inputs.append(value)
    if not CACHE_NAME.match(name):
        traced.weights[name] = value
    return value


def _number_unused(traced: TracedGraph, period: int, by: int) -> None:
    """Adds the parameters of one more period that no node reads, like those of the last traced period."""
    last = range(traced.num_layers - period, traced.num_layers)
    for name, shape in list(traced.unused.items()):
        if any(name.startswith(f"{traced.layers_name}.{layer}.") for layer in last):
            traced.unused[shift(name, traced.layers_name, by) or name] = shape


def name_everything(model: ir.Model) -> None:
    """Names nodes, inner values and constants in graph order, and removes all metadata, in place."""
    graph, counts = model.graph, Counter[str]()
    outputs = set(graph.outputs)

    def unique(name: str) -> str:
        counts[name] += 1
        return name if counts[name] == 1 else f"{name}_{counts[name]}"

    for node in graph:
        scope = next(reversed([name for name in scopes(node) if name and not name.startswith("_")]), "graph")
        node.name = unique(f"{scope}/{node.op_type}")
        for index, value in enumerate(node.outputs):
            if value not in outputs:
                value.name = f"{node.name}:{index}"
            value.metadata_props.clear()
        node.metadata_props.clear()
        node.doc_string = None
    for name, value in list(graph.initializers.items()):
        graph.initializers.pop(name)
        value.name = unique("constant")
        graph.initializers[value.name] = value
    model.producer_name, model.producer_version, model.domain, model.doc_string = "llmconv", None, None, None
    model.metadata_props.clear()
    graph.metadata_props.clear()
    graph.name, graph.doc_string = "decoder", None
