"""Tiny models are traced once: torch takes seconds for each, and hundreds of tests export the same few."""

from __future__ import annotations

import hashlib
import importlib
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

Trace = Callable[..., Any]

SHARED = "LLMCONV_TEST_TRACES"
"""Environment variable: a folder of traces that the processes of a test run share; tests/conftest.py makes it."""


def trace_once() -> None:
    """From here on a config and a form are traced once in this test run; who asks again gets a copy to work on."""
    graph: Any = importlib.import_module(
        "llmconv.export.language_model"
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
            found[key] = _shared(repr(key)) or trace(config, input_map, form)
            _share(repr(key), found[key])
        return copied(found[key])

    return traced


def _place(key: str) -> Path | None:
    """The file of a trace; None for a key that holds an address, which means something else in another process."""
    folder = os.environ.get(SHARED)
    return Path(folder, hashlib.sha256(key.encode()).hexdigest()) if folder and " at 0x" not in key else None


def _shared(key: str) -> Any:
    import onnx  # noqa: PLC0415 - only tests that export pay for it
    from onnx_ir import serde  # noqa: PLC0415

    path = _place(key)
    if path is None or not path.exists():
        return None
    graph, rest, names = pickle.loads(path.read_bytes())
    model = serde.deserialize_model(onnx.load_from_string(graph))
    inputs = {value.name: value for value in model.graph.inputs}
    return replace(rest, model=model, weights={name: inputs[value] for name, value in names.items()})


def _share(key: str, traced: Any) -> None:
    from onnx_ir import serde  # noqa: PLC0415

    path = _place(key)
    if path is None or path.exists():
        return
    names = {name: value.name for name, value in traced.weights.items()}
    graph = serde.serialize_model(traced.model).SerializeToString()
    part = path.with_suffix(f".{os.getpid()}")
    part.write_bytes(pickle.dumps((graph, replace(traced, model=None, weights={}), names)))
    part.replace(path)


def copied(traced: Any) -> Any:
    """A `TracedGraph` with a model of its own."""
    model = traced.model.clone()
    weights = {value.name: value for value in model.graph.inputs if value.name in traced.weights}
    return replace(traced, model=model, weights=weights, tied=dict(traced.tied), unused=dict(traced.unused))
