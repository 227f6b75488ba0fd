"""Findings on wires: the cache or the output of another place, a term that is missing, a constant."""

from __future__ import annotations

from llmconv.runtime.cache_names import layer_of
from llmconv.verify.findings.suspect import Finding, Suspect
from llmconv.verify.scopes import layer_of_scope


def other_cache(suspect: Suspect) -> Finding | None:
    """A layer that reads the cache of another."""
    for node in suspect.nodes:
        own = layer_of_scope(suspect.scope(node))
        for name in node.input:
            layer = layer_of(name)
            if layer is not None and own is not None and layer != own and name in suspect.replay.feeds:
                return Finding(f"reads `{name}`, the cache of layer {layer}", node)
    return None


def missing_term(suspect: Suspect) -> Finding | None:
    """A node that hands on one of the terms that the model adds."""
    expected = suspect.piece.expected if suspect.piece else None
    for node in suspect.nodes:
        if node.op_type == "Identity" and expected is not None and "add" in expected.op:
            return Finding(f"hands on `{node.input[0]}` alone, the model adds to it", node)
    return None


def other_output(suspect: Suspect) -> Finding | None:
    """Outputs under each other's names: every node is right, but not what its value is called."""
    name = suspect.where.output
    found = suspect.trail.values.get(name)
    if suspect.piece or found is None:
        return None
    for other, record in suspect.replay.outputs().items():
        if other != name and suspect.trail.comparison.agrees(record, found):
            return Finding(f"`{name}` holds what the model has as `{other}`")
    return None


def optimised(suspect: Suspect) -> Finding | None:
    """The graph is right, what onnxruntime makes of it is not."""
    name = suspect.where.output
    record, found = suspect.replay.outputs().get(name), suspect.trail.values.get(name)
    if suspect.piece or record is None or found is None or not suspect.trail.comparison.agrees(record, found):
        return None
    return Finding("the graph agrees while onnxruntime's graph optimisation is off: one of its rewrites is wrong here")


def constant(suspect: Suspect) -> Finding | None:
    """The number that the first node works with."""
    for node in suspect.nodes[:1]:
        for name in node.input:
            value = suspect.constant(name)
            if value is not None and value.size == 1 and value.dtype.kind == "f":
                return Finding(f"`{node.name}` has the constant {float(value.reshape(())):.8g}", node)
    return None
