"""`--stages K`: divides a graph into a chain of K graphs, each with some of the layers.

Values that depend on tokens alone (masks, rotary tables, shapes) are cheap, so each stage computes them again; values
that also depend on weights are computed once and passed on. Each stage maps the weights of its own layers only. Values
keep their names in every stage; the hidden state that enters layer 8 is called `hidden_states.8`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

import onnx
import onnx_ir as ir

from llmconv.errors import UsageProblem
from llmconv.export.traced_graph import TracedGraph
from llmconv.export.weights import WeightSource, leaves
from llmconv.runtime.onnxruntime.guard import refill, rename, values_read_by

CACHE_LAYER = re.compile(r"(?:past|present|prefix)\w*\.(\d+)\.")


def split(model: onnx.ModelProto, count: int, layers_name: str, num_layers: int) -> list[onnx.ModelProto]:
    """The stages of a graph, in order; each gets `num_layers / count` layers, rounded.

    `model` is a whole decoder with mapped weights, its nodes named after their modules; `layers_name` is the name of
    its list of layers, such as `model.layers`; `count` is at most `num_layers`.
    """
    splitter = _Splitter(model, layers_name, first_layers(count, num_layers))
    return [splitter.stage(index) for index in range(count)]


def first_layers(count: int, num_layers: int) -> list[int]:
    """The first layer of each of `count` stages, at most `num_layers`."""
    return [-(-index * num_layers // count) for index in range(count)]


def require_stages(count: int, num_layers: int) -> None:
    if not 1 <= count <= num_layers:
        raise UsageProblem(
            f"`--stages {count}` is invalid for a model of {num_layers} layers",
            hint=f"every stage needs a layer: give 1 to {num_layers}",
        )


class _Splitter:
    """Analyzes the graph once, then extracts one stage after another."""

    def __init__(self, model: onnx.ModelProto, layers_name: str, starts: list[int]) -> None:
        self._model, self._starts = model, starts
        self._layer = re.compile(re.escape(layers_name) + r"\.(\d+)[./]")
        self._ports = {port.name: port for port in model.graph.input}
        self._weights = {tensor.name for tensor in model.graph.initializer if tensor.external_data}
        self._maker = {name: node for node in model.graph.node for name in node.output}
        self._stages: dict[str, int] = {}  # of the nodes that are computed once, by name
        self._made: dict[str, int] = {}  # of the values that are computed once, by name
        self._assign()
        stages = range(len(starts))
        self._roots = [[node for node in model.graph.node if self._stages.get(node.name) == at] for at in stages]
        self._carried = self._carry()
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph if self._carried else model.graph
        found = {value.name: value for value in (*inferred.value_info, *inferred.output) if value.name in self._carried}
        self._types = {name: _described(name, found.get(name)) for name in self._carried}

    def stage(self, index: int) -> onnx.ModelProto:
        nodes, _ = self._closure(index)
        made = {name for node in nodes for name in node.output}
        part = onnx.ModelProto()
        part.CopyFrom(self._model)
        graph = part.graph
        for repeated in (graph.node, graph.input, graph.output, graph.initializer):
            refill(repeated, ())
        graph.node.extend(self._with_own_ports(node, index) for node in nodes)
        read = {name for node in graph.node for name in values_read_by(node) - {""}}
        graph.initializer.extend(tensor for tensor in self._model.graph.initializer if tensor.name in read)
        graph.input.extend(port for name, port in self._ports.items() if name in read)
        graph.input.extend(self._types[name] for name in self._carried if name in read and name not in made)
        returned = {port.name for port in self._model.graph.output if self._made[port.name] == index}
        graph.output.extend(port for port in self._model.graph.output if port.name in returned)
        graph.output.extend(self._types[name] for name in self._carried if self._made[name] == index)
        rename(graph, {name: passed for name, passed in self._carried.items() if name not in returned})
        for name in sorted(returned & self._carried.keys()):  # a cache that layers of a later stage read, too
            graph.node.append(onnx.helper.make_node("Identity", [name], [self._carried[name]], name=f"{name}/passed"))
            next(port for port in reversed(graph.output) if port.name == name).name = self._carried[name]
        return part

    def _assign(self) -> None:
        """Finds the nodes that are computed once; every stage computes the other nodes that it needs."""
        tokens: dict[str, bool] = {}
        weighs: dict[str, bool] = {}
        for node in self._model.graph.node:
            sources = values_read_by(node) - {""}
            on_tokens = any(tokens.get(name, name in self._ports) for name in sources)
            on_weights = any(weighs.get(name, name in self._weights) for name in sources)
            stages = [self._made[name] for name in sources if name in self._made]
            for name in node.output:
                tokens[name], weighs[name] = on_tokens, on_weights
            if stages or (on_tokens and on_weights) or self._holds_cache(node):
                found = max([*stages, self._stage_of(self._layer_of(node))])
                self._stages[node.name] = found
                self._made.update(dict.fromkeys(node.output, found))
        for port in self._model.graph.output:
            self._made.setdefault(port.name, 0)

    def _layer_of(self, node: onnx.NodeProto) -> int:
        """The layer in the name or an input of a node; 0 if there is none."""
        texts = (node.name, *node.input)
        found = (pattern.match(text) for text in texts for pattern in (self._layer, CACHE_LAYER))
        return next((int(match[1]) for match in found if match), 0)

    def _stage_of(self, layer: int) -> int:
        return max(index for index, start in enumerate(self._starts) if start <= layer)

    def _holds_cache(self, node: onnx.NodeProto) -> bool:
        """Whether a node reads a past, apart from its length, which any other past of the same shape has too."""
        pasts = [name for name in node.input if name in self._ports and CACHE_LAYER.match(name)]
        stages = range(len(self._starts)) if node.op_type == "Shape" else ()
        return any(not stages or not all(self._own(name, index) for index in stages) for name in pasts)

    def _own(self, name: str, stage: int) -> str:
        """The first past input of a stage with the axes of the past input `name`; empty if there is none."""
        for other, port in self._ports.items():
            layer = CACHE_LAYER.match(other)
            if layer and self._stage_of(int(layer[1])) == stage and _axes(port) == _axes(self._ports[name]):
                return str(other)
        return ""

    def _closure(self, stage: int) -> tuple[list[onnx.NodeProto], set[str]]:
        """The nodes that a stage computes, in order, and the names of the values that they read."""
        wanted = {node.name for node in self._roots[stage]}
        outputs = {port.name for port in self._model.graph.output if self._made[port.name] == stage}
        waiting = [*self._roots[stage], *(self._maker[name] for name in outputs if name in self._maker)]
        read: set[str] = set(outputs)
        while waiting:
            for name in values_read_by(waiting.pop()) - {""}:
                read.add(name)
                maker = self._maker.get(name)
                if maker is not None and maker.name not in wanted and maker.name not in self._stages:
                    wanted.add(maker.name)
                    waiting.append(maker)
        return [node for node in self._model.graph.node if node.name in wanted], read

    def _carry(self) -> dict[str, str]:
        """Values that are passed between stages, in graph order, and their names there."""
        crossing: set[str] = set()
        for stage in range(len(self._starts)):
            _, read = self._closure(stage)
            crossing |= {name for name in read if self._made.get(name, stage) < stage}
        names: dict[str, str] = {}
        counts: dict[int, int] = {}
        for node in self._model.graph.node:
            for name in (name for name in node.output if name in crossing):
                border = self._starts[self._made[name] + 1]
                number = counts[border] = counts.get(border, -1) + 1
                names[name] = f"hidden_states.{border}" + (f".{number}" if number else "")
        return names

    def _with_own_ports(self, node: onnx.NodeProto, stage: int) -> onnx.NodeProto:
        """A copy of the node; it reads lengths from inputs that the stage has."""
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        if node.op_type != "Shape" or node.input[0] not in self._ports:
            return copy
        name = node.input[0]
        if CACHE_LAYER.match(name):
            copy.input[0] = self._own(name, stage) or name
        elif name == "input_ids" and stage:  # `[batch_size, sequence_length]` of the only hidden state that comes in
            incoming = [name for name in self._carried if self._made[name] == stage - 1]
            if len(incoming) == 1 and len(self._types[incoming[0]].type.tensor_type.shape.dim) == 3:
                copy.input[0] = incoming[0]
                if not any(attribute.name == "end" for attribute in copy.attribute):
                    copy.attribute.append(onnx.helper.make_attribute("end", 2))
        return copy


def _axes(port: onnx.ValueInfoProto) -> list[object]:
    return [axis.dim_param or axis.dim_value for axis in port.type.tensor_type.shape.dim]


def _described(name: str, found: onnx.ValueInfoProto | None) -> onnx.ValueInfoProto:
    """The declaration of a value passed between stages, without symbols invented by shape inference."""
    kind = found.type.tensor_type.elem_type if found is not None else onnx.TensorProto.FLOAT
    if found is None or not found.type.tensor_type.HasField("shape"):
        return onnx.helper.make_tensor_value_info(name, kind, None)
    axes = [axis.dim_value if axis.HasField("dim_value") else None for axis in found.type.tensor_type.shape.dim]
    if len(axes) == 3 and axes[2]:
        return onnx.helper.make_tensor_value_info(name, kind, ["batch_size", "sequence_length", axes[2]])
    return onnx.helper.make_tensor_value_info(name, kind, axes)


def stage_parts(
    graphs: Sequence[tuple[TracedGraph, Mapping[str, WeightSource]]], starts: Sequence[int]
) -> dict[str, int]:
    """A number for every tensor, equal for those that the same stages read; `starts` has each stage's first layer."""
    readers: dict[str, set[int]] = defaultdict(set)
    for traced, matches in graphs:
        reading = _Reading(traced, starts)
        for parameter, source in matches.items():
            for leaf in leaves(source):
                readers[leaf.name] |= reading.of(parameter)
    return _numbers(readers)


def graph_parts(graphs: Sequence[Mapping[str, WeightSource]]) -> dict[str, int]:
    """A number for every tensor: equal for tensors that the same graphs read."""
    readers: dict[str, set[int]] = defaultdict(set)
    for number, matches in enumerate(graphs):
        for leaf in (leaf for source in matches.values() for leaf in leaves(source)):
            readers[leaf.name].add(number)
    return _numbers(readers)


def _numbers(readers: Mapping[str, set[int]]) -> dict[str, int]:
    order = {each: number for number, each in enumerate(sorted({tuple(sorted(found)) for found in readers.values()}))}
    return {name: order[tuple(sorted(found))] for name, found in readers.items()}


class _Reading:
    """The stages that read each weight of a graph."""

    def __init__(self, traced: TracedGraph, starts: Sequence[int]) -> None:
        self._traced, self._starts = traced, starts
        self._layer = re.compile(re.escape(traced.layers_name) + r"\.(\d+)[./]")
        self._computed: dict[str, int] = {}  # stage by name of a value that depends on tokens
        weights = {value.name for value in traced.weights.values()}
        ports = {value.name: 0 for value in traced.model.graph.inputs if value.name not in weights}
        for node in traced.model.graph:
            inputs = [str(value.name) for value in node.inputs if value is not None]
            known = [self._computed.get(name, ports.get(name)) for name in inputs]
            if stages := [stage for stage in known if stage is not None]:
                own = [self._stage(name) for name in (str(node.name), *inputs)]
                self._computed.update(dict.fromkeys((str(value.name) for value in node.outputs), max(*stages, *own)))

    def of(self, parameter: str) -> set[int]:
        """The stages that read a parameter: that of its layer, else those of the nodes that read it."""
        if self._layer.match(f"{parameter}."):
            return {self._stage(f"{parameter}.")}
        return self._readers(self._traced.weights[parameter]) or {0}

    def _readers(self, value: ir.Value) -> set[int]:
        found: set[int] = set()
        for use in value.uses():
            outputs = use[0].outputs
            stage = self._computed.get(str(outputs[0].name))
            found |= {stage} if stage is not None else set().union(*map(self._readers, outputs))
        return found

    def _stage(self, name: str) -> int:
        """The stage of the layer in a name; 0 if there is none."""
        match = self._layer.match(name)
        layer = int(match[1]) if match else 0
        return max(index for index, start in enumerate(self._starts) if start <= layer)
