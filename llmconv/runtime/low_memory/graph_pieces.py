"""GraphPiece: a graph is cut into pieces that run one after another, so that only the weights of one are in memory.

Graphs compute in float32 with weights of any dtype: they cast each initializer, and onnxruntime folds the cast when it
opens a session. For a whole graph it would hold a float32 copy of every weight. A piece is opened, run for all calls,
and closed. Cuts lie between nodes in the graph's order; a node that depends on weights only goes where it is used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
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
ValueTypes = dict[str, tuple[str, Sequence[int | str | None]]]
"""onnxruntime's type name and the shape of values, by value name."""


@dataclass(frozen=True)
class GraphPiece:
    """Consecutive nodes of a graph.

    Attributes:
        nodes: nodes of this piece, including those that compute its constants.
        inputs: values from earlier pieces, or graph inputs.
        outputs: values that later pieces use, or graph outputs.
        weight_bytes: size of the weights in float32.
        shapes_only: inputs whose shape alone is used.
    """

    model: onnx.ModelProto
    nodes: tuple[onnx.NodeProto, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weight_bytes: int
    shapes_only: frozenset[str]

    def build(self, types: ValueTypes) -> onnx.ModelProto:
        """The piece as a separate graph; `types` has an entry for every input."""
        built = onnx.ModelProto(ir_version=self.model.ir_version, opset_import=self.model.opset_import)
        built.functions.extend(self.model.functions)
        graph = built.graph
        graph.name = self.model.graph.name or "piece"
        graph.node.extend(self.nodes)
        used = {name for node in self.nodes for name in values_read_by(node)}
        graph.initializer.extend(tensor for tensor in self.model.graph.initializer if tensor.name in used)
        for name in self.inputs:
            kind, shape = types[name]
            graph.input.append(onnx.helper.make_tensor_value_info(name, TYPES[kind], shape))
        graph.output.extend(onnx.ValueInfoProto(name=name) for name in self.outputs)  # onnxruntime infers the type
        return built


def cut_graph(model: onnx.ModelProto, limit: int) -> list[GraphPiece]:
    """The pieces of a graph, each with weights of at most `limit` bytes in float32, or one node with larger ones."""
    return _GraphCutter(model, limit).pieces()


class _GraphCutter:
    def __init__(self, model: onnx.ModelProto, limit: int) -> None:
        self._model, self._limit = model, limit
        self._sizes = {tensor.name: _float_bytes(tensor) for tensor in model.graph.initializer}
        constant = {*self._sizes, ""}
        wanted = {info.name for info in model.graph.output}
        self._producers: dict[str, int] = {}
        self._live: list[onnx.NodeProto] = []
        nodes = list(model.graph.node)
        for at, node in enumerate(nodes):
            if values_read_by(node) <= constant and not wanted & set(node.output):
                constant |= set(node.output)
                self._producers |= dict.fromkeys(node.output, at)
            else:
                self._live.append(node)
        self._nodes, self._constant = nodes, constant

    def pieces(self) -> list[GraphPiece]:
        """See `cut_graph`."""
        ends = self._ends()
        return [self._piece(start, stop) for start, stop in zip([0, *ends], [*ends, len(self._live)], strict=True)]

    def _ends(self) -> list[int]:
        """Node indices at which all pieces but the last end."""
        inside = self._inside_layers()
        ends: list[int] = []
        current: set[str] = set()
        allowed = start = 0
        for at, node in enumerate(self._live):
            if at not in inside:
                allowed = at
            current |= self._weights(node)
            if self._bytes(current) > self._limit and allowed > start:
                ends.append(allowed)
                start = allowed
                current = {name for one in self._live[start : at + 1] for name in self._weights(one)}
        return ends

    def _inside_layers(self) -> set[int]:
        """Node indices between the first use of a layer's past and the computation of its present.

        No cut lies there, because a call needs the whole present of the layer from the previous call.
        """
        indices: dict[int, list[int]] = defaultdict(list)
        for at, node in enumerate(self._live):
            past = {name for name in values_read_by(node) if is_past(name)} if node.op_type != "Shape" else set()
            for name in past | {name for name in node.output if is_present(name)}:
                indices[layer_of(name) or 0].append(at)
        return {at for found in indices.values() for at in range(min(found) + 1, max(found) + 1)}

    def _piece(self, start: int, stop: int) -> GraphPiece:
        mine = self._live[start:stop]
        constants = {at for node in mine for at in self._needed(node)}
        nodes = _gathered_first([*(self._nodes[at] for at in sorted(constants)), *mine], self._large())
        made = {name for node in mine for name in node.output}
        read = [name for node in mine for name in values_read_by(node)]
        inputs = tuple(dict.fromkeys(name for name in read if name not in made | self._constant))
        later = {name for node in self._live[stop:] for name in values_read_by(node)}
        later |= {info.name for info in self._model.graph.output}
        weights = {name for node in mine for name in self._weights(node)}
        seen = {name for node in mine if node.op_type != "Shape" for name in values_read_by(node)}
        return GraphPiece(
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
        """Indices of the nodes that compute the constants of a node."""
        found: set[int] = set()
        open_names = list(values_read_by(node))
        while open_names:
            at = self._producers.get(open_names.pop())
            if at is not None and at not in found:
                found.add(at)
                open_names += values_read_by(self._nodes[at])
        return found

    def _weights(self, node: onnx.NodeProto) -> set[str]:
        """The initializers that a node depends on, except large tables of which it gathers rows."""
        nodes = [node, *(self._nodes[at] for at in self._needed(node))]
        names = {name for one in nodes for name in values_read_by(one) if name in self._sizes}
        return names - self._large() if node.op_type == "Gather" else names

    def _bytes(self, names: Iterable[str]) -> int:
        return sum(self._sizes[name] for name in names)


def _gathered_first(nodes: Sequence[onnx.NodeProto], large: set[str]) -> list[onnx.NodeProto]:
    """Moves casts of a large table after the Gather of its rows: the same values, without a copy of the table."""
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
    used = {name for node in found for name in values_read_by(node)}
    return [node for node in found if node.output[0] not in casts or node.output[0] in used]


def values_read_by(node: onnx.NodeProto) -> set[str]:
    """Values that a node reads, including those that its subgraphs read from outside."""
    names = set(node.input)
    for attribute in node.attribute:
        for graph in [attribute.g] if attribute.HasField("g") else attribute.graphs:
            names |= _outer_values(graph)
    return names


def _outer_values(graph: onnx.GraphProto) -> set[str]:
    own = {tensor.name for tensor in graph.initializer} | {info.name for info in graph.input}
    own |= {name for node in graph.node for name in node.output}
    taken = {name for node in graph.node for name in values_read_by(node)} | {info.name for info in graph.output}
    return taken - own


def _float_bytes(tensor: onnx.TensorProto) -> int:
    """Bytes of an initializer: as float32 if it has a float type, else as stored."""
    is_float = tensor.data_type in FLOATS
    return int(prod(tensor.dims)) * (4 if is_float else onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
