"""Tiny models are traced once: torch takes seconds for each, and hundreds of tests export the same few."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

Trace = Callable[..., Any]


def trace_once() -> None:
    """From here on a config and a form are traced once in this process; who asks again gets a copy to work on."""
    graph: Any = importlib.import_module(
        "llmconv.export.decoder_graph"
    )  # it brings torch: only tests that export pay for it
    if not hasattr(graph.trace, "__wrapped__"):
        graph.trace = remembered(graph.trace)


def remembered(trace: Trace) -> Trace:
    """The function; what it raises is not remembered, nor a model of somebody's own code."""
    found: dict[Any, Any] = {}

    @wraps(trace)
    def traced(config: Any, input_map: Any, form: Any) -> Any:
        if not type(config).__module__.startswith("transformers."):
            return trace(config, input_map, form)
        key = type(config), config.to_json_string(use_diff=False), repr(input_map), form
        if key not in found:
            found[key] = trace(config, input_map, form)
        return copied(found[key])

    return traced


def copied(traced: Any) -> Any:
    """A `TracedGraph` with a model of its own."""
    model = traced.model.clone()
    weights = {value.name: value for value in model.graph.inputs if value.name in traced.weights}
    return replace(traced, model=model, weights=weights, tied=dict(traced.tied), unused=dict(traced.unused))
