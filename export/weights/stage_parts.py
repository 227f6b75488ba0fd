"""The stages or graphs that read each stored tensor: in a new folder those that others do not read have own files."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from llmconv.export.traced_graph import TracedGraph
from llmconv.export.weights.parameter_sources import WeightSource, leaves


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
