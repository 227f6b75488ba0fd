"""GraphLayers: a graph as a part before the layers, its layers, and a part after them, with one value at every cut.

Layers are compared by forms: a form is what a value computes, as a digest that is equal for values computed alike,
whatever their names. It is built from the leaves up: sources (weights, inputs, shared values) have forms that the
caller gives, and a node's form is the digest of its operator, attributes and the forms of its inputs. So two layers are
isomorphic, node by node, if the forms of their outputs and of all their nodes are equal.

Layers must also agree in the graph's declarations (types of values, order of its inputs and outputs), which onnxruntime
and callers read, but parts of a graph run without.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import onnx
from onnx import numpy_helper

from llmconv.runtime.extra_inputs import INPUTS_EMBEDS, is_past, is_present, layer_of
from llmconv.runtime.onnxruntime.guard import external_fields, is_external, refill
from llmconv.verify.layers.graph_index import NO_LAYER, NUMBERED, GraphIndex, NotLayered

TRIED = 64
"""Nodes that are tried as the last before a cut: those after it, such as parts of a norm without weights, are few."""


class LayerForm(NamedTuple):
    """What a layer computes: equal for layers that are isomorphic, node by node."""

    outputs: tuple[Form, ...]  # forms of its hidden state (empty where it could not be found) and of its cache outputs
    nodes: tuple[Form, ...]  # the form of every node, sorted
    declared: tuple[Form, ...] = ()  # types of its caches, in the order of the file, and of its values


@dataclass(frozen=True)
class Layer:
    """One layer of a graph."""

    number: int  # from 0
    nodes: tuple[int, ...]  # indices of its nodes
    entry: str  # the hidden state that it reads
    exit: str  # the one that it computes
    form: LayerForm  # what it computes, up to the names of its weights and its number


@dataclass(frozen=True)
class GraphLayers:
    """A graph as parts, each indices of nodes."""

    index: GraphIndex  # of the whole graph
    prologue: tuple[int, ...]  # embedding, mask, positions and shapes
    layers: tuple[Layer, ...]  # in order
    epilogue: tuple[int, ...]  # last norm and head

    @classmethod
    def of(cls, model: onnx.ModelProto, tensors: Mapping[str, str] | None = None) -> GraphLayers:
        """The parts of a graph without its weights.

        `tensors` has the tensor of the model that each initializer is known to be; others are compared by content.
        Raises NotLayered: it does not fall into such parts; the text says why.
        """
        return _Cutter(GraphIndex.of(model, tensors or {})).layers()

    def nodes_of(self, numbers: Sequence[int]) -> list[onnx.NodeProto]:
        return [self.index.nodes[at] for at in numbers]

    def source_of(self, layer: Layer) -> Sources:
        """The forms of the values that a layer reads, see `forms_of`."""
        return LayerSources(self.index, self.nodes_of(self.prologue)).of(layer.number, layer.entry)


class LayerSources:
    """Forms of the values that layers read from elsewhere; `prologue` has the graph's nodes before the layers."""

    def __init__(self, index: GraphIndex, prologue: Sequence[onnx.NodeProto]) -> None:
        self._index = index
        self._shared, _ = forms_of(prologue, partial(self._outer, NO_LAYER))

    def of(self, number: int, entry: str) -> Sources:
        """Those that a layer reads; `entry` is its hidden state."""

        def source(name: str) -> Form:
            if name == entry:
                return "hidden state"
            if name in self._shared:
                return f"shared {self._shared[name]}"
            return f"`{name}`" if name in self._index.producers else self._outer(number, name)

        return source

    def _outer(self, number: int, name: str) -> Form:
        """The form of an input or an initializer, for a layer of some number."""
        if name in self._index.inputs.keys() - self._index.initializers.keys():
            return self._input(number, name)
        tensor = self._index.initializers[name]
        kind = f"{onnx.TensorProto.DataType.Name(tensor.data_type)}{list(tensor.dims)}"
        if name in self._index.inputs:  # a default, see `runtime.onnxruntime.lora_names`
            return f"default {self._role(number, name)} {tensor_form(tensor)}"
        if bound := self._index.tensors.get(name, name if tensor.external_data else ""):
            return f"weight {self._role(number, name)} as {self._role(number, bound)} {kind}"
        return f"constant {tensor_form(tensor)}"

    def _role(self, number: int, name: str) -> str:
        """A name of a tensor, relative to a layer."""
        match = NUMBERED.match(name)
        if match is None or match["list"] != self._index.layer_list:
            return name
        rest = match["rest"].replace(f"+{match['list']}{number}.", "+own ")  # several tensors, joined in one
        return f"{'own' if int(match['number']) == number else match['number']} {rest}"

    def _input(self, number: int, name: str) -> Form:
        if not is_past(name):
            return f"input {name}"
        declared = bytes(self._index.inputs[name].type.SerializeToString(deterministic=True)).hex()
        whose = "" if number == NO_LAYER else "own" if layer_of(name) == number else f"layer {layer_of(name)}"
        return f"past {whose} {role(name)} {declared}"


class _Cutter:
    """Cuts a graph: first by the weights and caches that nodes depend on, then at the one value that all paths pass."""

    def __init__(self, index: GraphIndex) -> None:
        self._index = index
        self._part = list(index.layers)
        self._members: dict[int, set[int]] = defaultdict(set)
        for at, part in enumerate(self._part):
            self._members[part].add(at)
        self._sources = LayerSources(
            index, [node for node, layer in zip(index.nodes, self._part, strict=True) if layer == NO_LAYER]
        )

    def layers(self) -> GraphLayers:
        index, last = self._index, self._index.number_of_layers - 1
        self._move_late(NO_LAYER)
        several = self._crossing(NO_LAYER)
        cuts = [self._cut(after) for after in range(NO_LAYER, last)]
        entries = dict(enumerate(cuts))
        exits = {number: entries[number + 1] for number in range(last)}
        forms = {number: self._form(number, entries[number], exits[number]) for number in range(last)}
        if len(several) > 1 and forms[0] not in [form for number, form in forms.items() if number]:
            raise NotLayered(f"layer 0 reads {len(several)} values of the part before the layers")
        exits[last] = self._last_exit(last, entries[last], {form.outputs[0] for form in forms.values()})
        forms[last] = self._form(last, entries[last], exits[last])
        layers = tuple(
            Layer(number, self._nodes(number), entries[number], exits[number], forms[number])
            for number in range(last + 1)
        )
        self._move(self._constants_of(last + 1), last + 1)
        found = GraphLayers(index, self._nodes(NO_LAYER), layers, self._nodes(last + 1))
        require_composed(found)
        return found

    def _nodes(self, part: int) -> tuple[int, ...]:
        return tuple(sorted(self._members[part]))

    def _cut(self, part: int) -> str:
        """The one value through which the next layer depends on a part; nodes after it move into that layer.

        Raises NotLayered: there is none.
        """
        index = self._index
        self._move_late(part)
        crossing = self._crossing(part)
        if part == NO_LAYER and not crossing and {self._part[at] for at in index.readers.get(INPUTS_EMBEDS, ())} == {0}:
            return INPUTS_EMBEDS
        nodes = self._nodes(part)
        own = {name for at in nodes for name in index.nodes[at].output}
        own = own & index.token_values if part == NO_LAYER else own
        for at in self._before(part, crossing)[:TRIED]:
            for name in index.nodes[at].output:
                after = self._after(nodes[bisect_right(nodes, at) :], name, own)
                if crossing <= {name, *(out for one in after for out in index.nodes[one].output)}:
                    self._move(after, part + 1)
                    return str(name)
        raise NotLayered(
            f"layer {part + 1} reads {len(crossing)} values of {_part_name(part, index.number_of_layers)}"
            + (f", first `{min(crossing)}`" if crossing else "")
        )

    def _before(self, part: int, crossing: Collection[str]) -> list[int]:
        """Nodes of a part that one of the crossing values needs, the last first: each cut is one of them."""
        index, found = self._index, set[int]()
        open_names = [min(crossing)] if crossing else []
        while open_names:
            at = index.producers.get(open_names.pop())
            if at is not None and at not in found and self._part[at] == part:
                found.add(at)
                open_names += index.reads[at]
        return sorted(found, reverse=True)

    def _move_late(self, part: int) -> None:
        """Moves nodes that only later layers read into the next one: what a layer hands on without its own weights."""
        index = self._index
        for at in reversed(self._nodes(part)):
            names = set(index.nodes[at].output)
            readers = {self._part[reader] for name in names for reader in index.readers.get(name, ())}
            own = part != NO_LAYER or names <= index.token_values
            if own and readers and min(readers) > part + 1 and not names & set(index.outputs):
                self._move({at}, part + 1)

    def _crossing(self, part: int) -> set[str]:
        """Values of a part that the next layer reads, of the first part those that depend on tokens.

        Raises NotLayered: a later layer reads them, too.
        """
        index, found = self._index, set[str]()
        for at in self._nodes(part):
            for name in index.nodes[at].output:
                readers = {self._part[reader] for reader in index.readers.get(name, ())} - {part}
                if not readers or (part == NO_LAYER and name not in index.token_values):
                    continue
                if beyond := sorted(reader for reader in readers if reader != part + 1):
                    whose = _part_name(part, index.number_of_layers)
                    raise NotLayered(f"layer {beyond[0]} reads `{name}` of {whose}")
                found.add(name)
        return found

    def _after(self, nodes: Sequence[int], value: str, own: Collection[str]) -> set[int]:
        """Those nodes that depend on a value; empty if one of them also depends on another of the part's `own`."""
        index, found = self._index, set[int]()
        computed = {value}
        for at in nodes:
            if index.reads[at] & computed:
                if any(name in own and name not in computed for name in index.reads[at]):
                    return set()
                found.add(at)
                computed.update(index.nodes[at].output)
        return found

    def _move(self, nodes: Collection[int], part: int) -> None:
        for at in nodes:
            self._members[self._part[at]].discard(at)
            self._members[part].add(at)
            self._part[at] = part

    def _last_exit(self, last: int, entry: str, known: set[Form]) -> str:
        """The hidden state after the last layer: computed as in another layer, or before weights of no layer."""
        index = self._index
        values, _ = forms_of([index.nodes[at] for at in self._nodes(last)], self._sources.of(last, entry))
        alike = [name for name, form in values.items() if form in known and index.readers.get(name)]
        if len(alike) == 1:
            self._move(self._after_exit(last, alike[0]), last + 1)
            return alike[0]
        return self._before_shared_weights(last)

    def _after_exit(self, last: int, value: str) -> set[int]:
        """Nodes of the last part that neither the exit nor the layer's cache needs."""
        index = self._index
        needed, open_names = set[int](), [value, *(name for name in index.outputs if layer_of(name) == last)]
        while open_names:
            at = index.producers.get(open_names.pop())
            if at is not None and at not in needed:
                needed.add(at)
                open_names += index.reads[at]
        return set(self._nodes(last)) - needed

    def _before_shared_weights(self, last: int) -> str:
        index, after, computed = self._index, set[int](), self._outer_weights()
        for at in self._nodes(last):
            if index.reads[at] & computed:
                after.add(at)
                computed.update(index.nodes[at].output)
        self._move(after, last + 1)
        read = {name for at in after for name in index.reads[at]}
        crossing = {name for name in read if index.producers.get(name) in self._members[last]}
        if len(crossing) != 1:
            raise NotLayered(f"the part after the layers reads {len(crossing)} values of layer {last}")
        return crossing.pop()

    def _outer_weights(self) -> set[str]:
        """Stored weights outside the layers, and what is computed from them before the layers without tokens."""
        index = self._index
        stored = {name for name, tensor in index.initializers.items() if tensor.external_data and len(tensor.dims) > 0}
        found = {name for name in stored if index.layer_of_weight(name) == NO_LAYER}
        for at in self._nodes(NO_LAYER):
            if index.reads[at] & found:
                found |= set(index.nodes[at].output) - index.token_values
        return found

    def _constants_of(self, part: int) -> set[int]:
        """Nodes before the layers that compute constants from weights, such as casts, for one later part only."""
        index, found = self._index, set[int]()
        constant = set(index.initializers)
        for at, names in enumerate(index.reads):
            constant |= set(index.nodes[at].output) if names <= constant else set()
        for at in reversed(self._nodes(NO_LAYER)):
            outputs = set(index.nodes[at].output)
            readers = {reader for name in outputs for reader in index.readers.get(name, ())}
            mine = all(self._part[reader] == part or reader in found for reader in readers)
            if outputs <= constant and readers and mine:
                found.add(at)
        return found

    def _form(self, number: int, entry: str, exit_: str) -> LayerForm:
        nodes = [self._index.nodes[at] for at in self._nodes(number)]
        values, found = forms_of(nodes, self._sources.of(number, entry))
        cached = sorted(name for name in self._index.outputs if layer_of(name) == number)
        outputs = [values.get(exit_, ""), *(f"{role(name)} {values.get(name, 'elsewhere')}" for name in cached)]
        graph = self._index.model.graph
        caches = [port for port in graph.input if is_past(port.name)] + [p for p in graph.output if is_present(p.name)]
        declared = [f"{role(port.name)} {described(port)}" for port in caches if layer_of(port.name) == number]
        ports = (port for port in graph.value_info if port.name in values)
        declared += sorted(f"{values[port.name]} {described(port)}" for port in ports)
        return LayerForm(tuple(outputs), tuple(sorted(found)), tuple(declared))


def _part_name(part: int, count: int) -> str:
    if part == NO_LAYER:
        return "the part before the layers"
    return f"layer {part}" if part < count else "the part after the layers"


SUMMING = {"SkipLayerNormalization", "SkipSimplifiedLayerNormalization"}
"""onnxruntime's norms of a sum (docs/ContribOperators.md): the next layer reads both terms, its residual and output."""


def add_before_norms(model: onnx.ModelProto) -> None:
    """Adds the two terms before every norm of a sum, which then adds zeros, once, in place: for one value per cut.

    Terms of different shapes, which the norm refuses and `Add` repeats, cannot be joined, and fail when they run.
    """
    nodes = []
    for node in model.graph.node:
        total, nothing, both, *terms = (f"{node.output[0]}:{name}" for name in ("total", "nothing", "both", "a", "b"))
        if node.op_type in SUMMING and len(node.input) > 1 and node.input[1] != nothing:
            nodes.append(onnx.helper.make_node("Concat", node.input[:2], [both], axis=0, name=both))
            nodes.append(onnx.helper.make_node("Split", [both], terms, axis=0, num_outputs=2, name=f"{both}:split"))
            nodes.append(onnx.helper.make_node("Add", terms, [total], name=total))
            nodes.append(onnx.helper.make_node("Sub", [total, total], [nothing], name=nothing))
            node.input[0], node.input[1] = total, nothing
        nodes.append(node)
    refill(model.graph.node, nodes)


def require_composed(layers: GraphLayers) -> None:
    """Raises NotLayered if a node is in no part or in several, or a value crosses where it may not."""
    index = layers.index
    if problem := declaration_problem(index):
        raise NotLayered(problem)
    parts = [layers.prologue, *(layer.nodes for layer in layers.layers), layers.epilogue]
    counted = Counter(at for nodes in parts for at in nodes)
    if counted != Counter(range(len(index.nodes))):
        raise NotLayered("a node is in no part, or in several")
    shared = {name for node in layers.nodes_of(layers.prologue) for name in node.output}
    free = {*index.initializers, *index.inputs, *shared}
    entries = ["", *(layer.entry for layer in layers.layers), layers.layers[-1].exit]
    for number, (nodes, entry) in enumerate(zip(parts, entries, strict=True), start=NO_LAYER):
        own = {name for node in layers.nodes_of(nodes) for name in node.output}
        for at in nodes:
            if odd := index.reads[at] - own - free - {entry}:
                raise NotLayered(f"{_part_name(number, len(layers.layers))} reads `{min(odd)}`")
            if cache := _foreign_caches(index, at, number):
                raise NotLayered(f"{_part_name(number, len(layers.layers))} reads or computes `{cache}`")


def _foreign_caches(index: GraphIndex, at: int, part: int) -> str:
    """A cache of another layer that a node reads (other than its shape) or computes; empty if there is none."""
    node = index.nodes[at]
    read = () if node.op_type == "Shape" and not node.domain else index.reads[at]
    caches = [name for name in read if name in index.inputs and is_past(name)]
    caches += [name for name in node.output if is_present(name)]
    return next((name for name in caches if layer_of(name) != part), "")


def role(name: str) -> str:
    """A cache input or output without the number of its layer."""
    return ".".join(part for part in name.split(".") if not part.isdigit())


def declaration_problem(index: GraphIndex) -> str:
    """Why the declarations are not those of layers in order; empty if they are."""
    graph = index.model.graph
    computed = [name for node in index.nodes for name in node.output if name]
    stored = [tensor.name for tensor in graph.initializer]
    names = Counter([*computed, *index.inputs.keys() - index.initializers.keys(), *stored])
    if twice := sorted(name for name, count in names.items() if count > 1):
        return f"`{twice[0]}` is computed or declared twice"
    for ports in (graph.input, graph.output):
        if odd := _out_of_order([port.name for port in ports]):
            return f"the cache `{odd}` is not in the order of the layers"
    return ""


def _out_of_order(names: Sequence[str]) -> str:
    """The first cache after one of the same role of a later layer."""
    last: dict[str, int] = {}
    for name in names:
        number = layer_of(name)
        if number is None or not (is_past(name) or is_present(name)):
            continue
        if number <= last.get(role(name), -1):
            return name
        last[role(name)] = number
    return ""


def described(port: onnx.ValueInfoProto) -> str:
    """Element type and sizes; axes with names are alike."""
    tensor = port.type.tensor_type
    sizes: Iterable[object] = (axis.dim_value if axis.HasField("dim_value") else "?" for axis in tensor.shape.dim)
    return f"{tensor.elem_type}[{', '.join(map(str, sizes)) if tensor.HasField('shape') else '…'}]"


Form = str  # A digest, or a readable text for a source

Sources = Callable[[str], Form]  # the form of a value that no node of the part computes


def forms_of(nodes: Iterable[onnx.NodeProto], source: Sources) -> tuple[dict[str, Form], list[Form]]:
    """The form of each value that nodes compute, by name, and the form of each node.

    Every value is computed before it is read; `source` has the forms of all other values.
    """
    values: dict[str, Form] = {}
    found: list[Form] = []

    def value(name: str) -> Form:
        return values[name] if name in values else source(name)

    for node in nodes:
        parts = [node.domain or "ai.onnx", node.op_type, node.overload, str(len(node.output))]
        parts += [value(name) if name else "-" for name in node.input]
        by_name = sorted(node.attribute, key=lambda attribute: attribute.name)
        parts += [f"{attribute.name}={_attribute_form(attribute, value)}" for attribute in by_name]
        found.append(f"{node.op_type}:{_digest([part.encode() for part in parts])}")
        values |= {name: f"{found[-1]}.{at}" for at, name in enumerate(node.output) if name}
    return values, found


def tensor_form(tensor: onnx.TensorProto) -> Form:
    """The form of a constant by its content; of external data by its place."""
    kind = f"{onnx.TensorProto.DataType.Name(tensor.data_type)}{list(tensor.dims)}"
    if is_external(tensor):
        return f"{kind} {sorted(external_fields(tensor).items())}"
    return f"{kind} {_digest([numpy_helper.to_array(tensor).tobytes()])}"


def _attribute_form(attribute: onnx.AttributeProto, value: Sources) -> Form:
    kinds = onnx.AttributeProto
    if attribute.type in (kinds.GRAPH, kinds.GRAPHS):
        graphs = [attribute.g] if attribute.type == kinds.GRAPH else attribute.graphs
        return ",".join(_graph_form(graph, value) for graph in graphs)
    if attribute.type in (kinds.TENSOR, kinds.TENSORS):
        tensors = [attribute.t] if attribute.type == kinds.TENSOR else attribute.tensors
        return ",".join(tensor_form(tensor) for tensor in tensors)
    return _digest([attribute.SerializeToString(deterministic=True)])


def _graph_form(graph: onnx.GraphProto, outer: Sources) -> Form:
    """The form of a subgraph, whose own names do not count."""
    own: Mapping[str, Form] = {
        **{tensor.name: tensor_form(tensor) for tensor in graph.initializer},
        **{port.name: f"input {at}" for at, port in enumerate(graph.input)},
    }
    values, nodes = forms_of(graph.node, lambda name: own[name] if name in own else outer(name))
    known = {**own, **values}
    results = [known.get(port.name) or outer(port.name) for port in graph.output]
    return _digest([part.encode() for part in (*results, "|", *sorted(nodes))])


def _digest(parts: Iterable[bytes]) -> str:
    content = hashlib.sha256()
    for part in parts:
        content.update(len(part).to_bytes(8, "little") + part)
    return content.hexdigest()[:24]
