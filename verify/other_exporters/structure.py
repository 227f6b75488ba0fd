"""Checks an external graph without running it: shapes of its cache, and inputs without effect."""

from __future__ import annotations

import onnx

from llmconv.runtime.onnxruntime.guard import nodes
from llmconv.verify.other_exporters.external_graph import CacheShapesByName, ExternalGraph
from llmconv.verify.other_exporters.port_map import AXES, input_names
from llmconv.verify.results.report import Check


def check_cache(graph: ExternalGraph, cache_shapes: CacheShapesByName) -> Check:
    """Checks that every layer has a key and a value with the model's heads and head size."""
    problems = [*_missing(graph, cache_shapes), *_sizes(graph, cache_shapes)]
    detail = "; ".join(problems[:5]) or f"inputs and outputs named as by {graph.binding.port_map.title}"
    return Check("structure", graph.name, "", verdict="fail" if problems else "pass", detail=detail)


def _missing(graph: ExternalGraph, cache_shapes: CacheShapesByName) -> list[str]:
    """Problems of an incomplete cache; no cache at all is allowed."""
    problems = []
    for kind, found in (("past", graph.binding.past), ("present", graph.binding.present)):
        if found and found.keys() != cache_shapes.keys():
            odd = sorted(found.keys() ^ cache_shapes.keys())
            problems.append(
                f"its {kind} has {len(found)} of {len(cache_shapes)} keys and values, first difference: {odd[0]}"
            )
    return problems


def _sizes(graph: ExternalGraph, cache_shapes: CacheShapesByName) -> list[str]:
    problems = []
    axes = graph.binding.port_map.axes
    for ports in (graph.binding.past, graph.binding.present):
        for name, port in ports.items():
            shape = graph.shapes[port]
            if len(shape) != len(AXES):
                problems.append(f"{port} has {len(shape)} axes, expected {len(AXES)}")
                continue
            for letter, at in (("h", 1), ("d", 3)):
                size = shape[axes.index(letter)]
                if isinstance(size, int) and name in cache_shapes and size != cache_shapes[name][at]:
                    problems.append(f"{port} has an axis of size {size}, expected {cache_shapes[name][at]}")
    return problems


def dead_inputs(model: onnx.ModelProto) -> list[str]:
    """Inputs that no node reads."""
    used = {name for node in nodes(model) for name in node.input} | {port.name for port in model.graph.output}
    return [name for name in input_names(model) if name not in used]
