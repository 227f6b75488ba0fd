"""Pieces: a graph cut into several that run one after another, so that the weights of one are there at a time.

Graphs compute in float32 on weights of any type, by a Cast of the initializer that onnxruntime folds when it opens a
session: of a whole graph it would hold a float32 copy of every weight. A piece is opened, run for all calls, and
dropped. Cuts are made between nodes in the graph's own order; what only depends on weights goes where it is used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import onnx
from onnx import TensorProto

from llmconv.runtime.cache_names import is_past, is_present, layer_of

FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16}
TYPES = {
    "tensor(float)": TensorProto.FLOAT,
    "tensor(float16)": TensorProto.FLOAT16,
    "tensor(bfloat16)": TensorProto.BFLOAT16,
    "tensor(double)": TensorProto.DOUBLE,
    "tensor(int64)": TensorProto.INT64,
    "tensor(int32)": TensorProto.INT32,
    "tensor(bool)": TensorProto.BOOL,
}
Ports = Mapping[str, tuple[str, Sequence[int | str | None]]]
"""By name: onnxruntime's name of the type, and the shape."""


@dataclass(frozen=True)
class Piece:
    """Some nodes of a graph, in order.

    Attributes:
        model: the graph.
        nodes: of this piece, with all that they need of constants.
        inputs, outputs: values from before, and those that are used after.
        weight_bytes: of the weights in float32.
        shapes_only: inputs of which the piece asks nothing but their shape.
    """

    model: onnx.ModelProto
    nodes: tuple[onnx.NodeProto, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weight_bytes: int
    shapes_only: frozenset[str]

    def build(self, ports: Ports) -> onnx.ModelProto:
        """A graph of its own.

        Args:
            ports: of every input.
        """
        built = onnx.ModelProto(ir_version=self.model.ir_version, opset_import=self.model.opset_import)
        built.functions.extend(self.model.functions)
        graph = built.graph
        graph.name = self.model.graph.name or "piece"
        graph.node.extend(self.nodes)
        used = {name for node in self.nodes for name in taken_by(node)}
        graph.initializer.extend(tensor for tensor in self.model.graph.initializer if tensor.name in used)
        for name in self.inputs:
            kind, shape = ports[name]
            graph.input.append(onnx.helper.make_tensor_value_info(name, TYPES[kind], shape))
        graph.output.extend(onnx.ValueInfoProto(name=name) for name in self.outputs)  # onnxruntime finds the type
        return built


def cut(model: onnx.ModelProto, limit: int) -> list[Piece]:
    """The pieces of a graph.

    Args:
        model: without its weights.
        limit: bytes of weights, in float32, that a piece should not exceed; a node with more is a piece of its own.
    """
    return _Cutting(model, limit).pieces()


class _Cutting:
    def __init__(self, model: onnx.ModelProto, limit: int) -> None:
        self._model, self._limit = model, limit
        self._sizes = {tensor.name: _float_bytes(tensor) for tensor in model.graph.initializer}
        constant = {*self._sizes, ""}
        wanted = {port.name for port in model.graph.output}
        self._makers: dict[str, int] = {}
        self._live: list[onnx.NodeProto] = []
        nodes = list(model.graph.node)
        for at, node in enumerate(nodes):
            if taken_by(node) <= constant and not wanted & set(node.output):
                constant |= set(node.output)
                self._makers |= dict.fromkeys(node.output, at)
            else:
                self._live.append(node)
        self._nodes, self._constant = nodes, constant

    def pieces(self) -> list[Piece]:
        """See `cut`."""
        ends = self._ends()
        return [self._piece(start, stop) for start, stop in zip([0, *ends], [*ends, len(self._live)], strict=True)]

    def _ends(self) -> list[int]:
        """Where pieces end, but for the last."""
        inside = self._inside_layers()
        ends: list[int] = []
        there: set[str] = set()
        allowed = start = 0
        for at, node in enumerate(self._live):
            if at not in inside:
                allowed = at
            there |= self._weights(node)
            if self._bytes(there) > self._limit and allowed > start:
                ends.append(allowed)
                start = allowed
                there = {name for one in self._live[start : at + 1] for name in self._weights(one)}
        return ends

    def _inside_layers(self) -> set[int]:
        """Places between a node that takes a layer's past and one that makes its present: no cut comes there, because a
        call needs the layer's whole present of the call before."""
        places: dict[int, list[int]] = defaultdict(list)
        for at, node in enumerate(self._live):
            past = {name for name in taken_by(node) if is_past(name)} if node.op_type != "Shape" else set()
            for name in past | {name for name in node.output if is_present(name)}:
                places[layer_of(name) or 0].append(at)
        return {at for found in places.values() for at in range(min(found) + 1, max(found) + 1)}

    def _piece(self, start: int, stop: int) -> Piece:
        mine = self._live[start:stop]
        constants = {at for node in mine for at in self._needed(node)}
        nodes = _gathered_first([*(self._nodes[at] for at in sorted(constants)), *mine], self._large())
        made = {name for node in mine for name in node.output}
        taken = [name for node in mine for name in taken_by(node)]
        inputs = tuple(dict.fromkeys(name for name in taken if name not in made | self._constant))
        later = {name for node in self._live[stop:] for name in taken_by(node)}
        later |= {port.name for port in self._model.graph.output}
        weights = {name for node in mine for name in self._weights(node)}
        seen = {name for node in mine if node.op_type != "Shape" for name in taken_by(node)}
        return Piece(
            self._model,
            tuple(nodes),
            inputs,
            tuple(name for node in mine for name in node.output if name in later),
            self._bytes(weights),
            frozenset(set(inputs) - seen),
        )

    def _large(self) -> set[str]:
        return {name for name, size in self._sizes.items() if size > self._limit}

    def _needed(self, node: onnx.NodeProto) -> set[int]:
        """The nodes that make the constants which a node takes."""
        found: set[int] = set()
        open_names = list(taken_by(node))
        while open_names:
            at = self._makers.get(open_names.pop())
            if at is not None and at not in found:
                found.add(at)
                open_names += taken_by(self._nodes[at])
        return found

    def _weights(self, node: onnx.NodeProto) -> set[str]:
        """The initializers behind what a node takes, but for tables of which it takes rows."""
        nodes = [node, *(self._nodes[at] for at in self._needed(node))]
        names = {name for one in nodes for name in taken_by(one) if name in self._sizes}
        return names - self._large() if node.op_type == "Gather" else names

    def _bytes(self, names: Iterable[str]) -> int:
        return sum(self._sizes[name] for name in names)


def _gathered_first(nodes: Sequence[onnx.NodeProto], large: set[str]) -> list[onnx.NodeProto]:
    """Casts of a large table come after the rows are taken from it: the same values, without a copy of the table."""
    casts = {node.output[0]: node for node in nodes if node.op_type == "Cast" and node.input[0] in large}
    found: list[onnx.NodeProto] = []
    for node in nodes:
        cast = casts.get(node.input[0]) if node.op_type == "Gather" else None
        if cast is None:
            found.append(node)
            continue
        rows, after = onnx.NodeProto(), onnx.NodeProto()
        rows.CopyFrom(node)
        after.CopyFrom(cast)
        rows.input[0], rows.output[0] = cast.input[0], f"{node.output[0]}:stored"
        after.input[0], after.output[0], after.name = rows.output[0], node.output[0], f"{node.name}/Cast"
        found += [rows, after]
    used = {name for node in found for name in taken_by(node)}
    return [node for node in found if node.output[0] not in casts or node.output[0] in used]


def taken_by(node: onnx.NodeProto) -> set[str]:
    """Values that a node takes, those that its subgraphs take from outside too."""
    names = set(node.input)
    for attribute in node.attribute:
        for graph in [attribute.g] if attribute.HasField("g") else attribute.graphs:
            names |= _taken_from_outside(graph)
    return names


def _taken_from_outside(graph: onnx.GraphProto) -> set[str]:
    own = {tensor.name for tensor in graph.initializer} | {port.name for port in graph.input}
    own |= {name for node in graph.node for name in node.output}
    taken = {name for node in graph.node for name in taken_by(node)} | {port.name for port in graph.output}
    return taken - own


def _float_bytes(tensor: onnx.TensorProto) -> int:
    """Bytes of an initializer once it is float32, or as it is where it is none."""
    is_float = tensor.data_type in FLOATS
    return int(prod(tensor.dims)) * (4 if is_float else onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
