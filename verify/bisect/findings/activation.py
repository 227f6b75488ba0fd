"""Finds another activation function, by comparing values with known functions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from llmconv.tensors import Array
from llmconv.verify.bisect.findings.suspect import Finding, Suspect
from llmconv.verify.bisect.recording import IN, OUT

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu (erf)": torch.nn.functional.gelu,
    "gelu (tanh)": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": torch.nn.functional.silu,
    "relu": torch.relu,
    "squared relu": lambda x: torch.relu(x) ** 2,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": torch.nn.functional.softplus,
    "identity": lambda x: x,
}
CLOSE = 2e-6
"""Relative tolerance for a function computed in float32."""


def activation(suspect: Suspect) -> Finding | None:
    """An activation function other than the model's."""
    for node in suspect.nodes:
        scope = suspect.scope(node)
        ports = {record.op: record.exact for record in suspect.trace.ports if record.scope == scope}
        if IN not in ports or OUT not in ports or ports[IN].shape != ports[OUT].shape:
            continue
        if next(suspect.replay.model.get_submodule(scope).parameters(), None) is not None:
            continue
        wanted, found = _named(ports[IN], ports[OUT]), _graph_function(suspect, scope, ports[IN].size)
        if wanted and found != wanted:
            return Finding(f"activation {found or _form(suspect)} in the graph, {wanted} in the model", node)
    return None


def _form(suspect: Suspect) -> str:
    """Describes an unknown function by its first constant."""
    numbers = (value for name in suspect.nodes[0].input if (value := suspect.constant(name)) is not None)
    number = next((float(value.reshape(())) for value in numbers if value.size == 1), None)
    return "of another form" if number is None else f"of another form (constant {number:.6g})"


def _graph_function(suspect: Suspect, scope: str, size: int) -> str:
    """Name of the function that the graph computes in the module; empty if it is unknown."""
    trace = suspect.trace
    nodes = [node for node in trace.index.nodes if trace.scopes.of(node) == scope]
    made = {name for node in nodes for name in node.output}
    given = [n for node in nodes for n in node.input if n not in made and _size(suspect, n) == size]
    handed = [n for n in made if any(trace.scopes.of(u) != scope for u in trace.index.users[n])]
    pairs = ((trace.values[a], trace.values[b]) for a in given for b in handed if _size(suspect, b) == size)
    return next((name for a, b in pairs if (name := _named(a.astype(np.float64), b))), "")


def _size(suspect: Suspect, name: str) -> int:
    value = suspect.trace.values.get(name)
    return -1 if value is None else value.size


def _named(given: Array, made: Array) -> str:
    """Name of the function that maps one array to the other; empty if it is not in the table."""
    inputs = torch.from_numpy(np.ascontiguousarray(given, dtype=np.float64)).reshape(-1)
    scale = float(np.sqrt(np.mean(np.square(made, dtype=np.float64)))) or 1.0
    for name, function in FUNCTIONS.items():
        error = function(inputs).numpy() - made.reshape(-1)
        if float(np.sqrt(np.mean(np.square(error, dtype=np.float64)))) < CLOSE * scale:
            return name
    return ""
