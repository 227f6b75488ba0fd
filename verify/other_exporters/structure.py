"""What can be said of a foreign graph without running it: its cache against the model's, and inputs without effect."""

from __future__ import annotations

import onnx

from llmconv.runtime.onnxruntime.guard import nodes
from llmconv.verify.other_exporters.port_map import AXES, input_names
from llmconv.verify.other_exporters.session import CacheShapes, ForeignGraph
from llmconv.verify.results.report import Check


def check_ports(graph: ForeignGraph, cache_shapes: CacheShapes) -> Check:
    """One check: every layer has its key and value, with the model's heads and head size."""
    problems = [*_missing(graph, cache_shapes), *_sizes(graph, cache_shapes)]
    detail = "; ".join(problems[:5]) or f"ports as {graph.binding.port_map.title} names them"
    return Check("structure", graph.name, "", verdict="fail" if problems else "pass", detail=detail)


def _missing(graph: ForeignGraph, cache_shapes: CacheShapes) -> list[str]:
    """A cache is whole or absent."""
    problems = []
    for kind, found in (("past", graph.binding.past), ("present", graph.binding.present)):
        if found and found.keys() != cache_shapes.keys():
            odd = sorted(found.keys() ^ cache_shapes.keys())
            problems.append(f"its {kind} has {len(found)} of {len(cache_shapes)} keys and values, first odd: {odd[0]}")
    return problems


def _sizes(graph: ForeignGraph, cache_shapes: CacheShapes) -> list[str]:
    problems = []
    axes = graph.binding.port_map.axes
    for ports in (graph.binding.past, graph.binding.present):
        for name, port in ports.items():
            shape = graph.shapes[port]
            if len(shape) != len(AXES):
                problems.append(f"{port} has {len(shape)} axes, not {len(AXES)}")
                continue
            for letter, at in (("h", 1), ("d", 3)):
                size = shape[axes.index(letter)]
                if isinstance(size, int) and name in cache_shapes and size != cache_shapes[name][at]:
                    problems.append(f"{port} has axis {size}, the model {cache_shapes[name][at]}")
    return problems


def dead_inputs(model: onnx.ModelProto) -> list[str]:
    """Inputs that nothing in the graph reads."""
    used = {name for node in nodes(model) for name in node.input} | {port.name for port in model.graph.output}
    return [name for name in input_names(model) if name not in used]
