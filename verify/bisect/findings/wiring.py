"""Finds wrong connections: another layer's cache, a missing term, exchanged inputs or outputs, a constant."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import onnx

from llmconv.runtime.cache_names import layer_of
from llmconv.tensors import Array
from llmconv.verify.bisect.findings.suspect import Finding, Suspect
from llmconv.verify.bisect.module_scopes import layer_of_scope

ATTEMPTS = 60
"""Maximum number of values that are tried in place of an input."""


def other_cache(suspect: Suspect) -> Finding | None:
    """A layer that reads the cache of another layer."""
    for node in suspect.nodes:
        own = layer_of_scope(suspect.scope(node))
        for name in node.input:
            layer = layer_of(name)
            if layer is not None and own is not None and layer != own and name in suspect.replay.feeds:
                return Finding(f"reads `{name}`, the cache of layer {layer}", node)
    return None


def missing_term(suspect: Suspect) -> Finding | None:
    """A node that passes on one term of a sum in the model."""
    for node in suspect.nodes:
        if node.op_type == "Identity" and _adds(suspect, node):
            return Finding(f"passes on `{node.input[0]}` only, the model adds to it", node)
    return None


def _adds(suspect: Suspect, node: onnx.NodeProto) -> bool:
    """Whether the model has an addition in the node's module with the size of the value or a multiple of it."""
    value = suspect.trace.values.get(node.output[0])
    places = suspect.trace.by_place.items() if value is not None and value.size else ()
    return any(
        scope == suspect.scope(node) and value is not None and size % value.size == 0 and "add" in record.op
        for (scope, size), records in places
        for record in records
    )


def swapped_inputs(suspect: Suspect) -> Finding | None:
    """A single node that agrees once two of its inputs are exchanged."""
    node = _alone(suspect)
    for first, second in combinations(range(len(node.input)), 2) if node is not None else ():
        names = [node.input[first], node.input[second]] if node is not None else []
        if node is not None and all(names) and _is_right(suspect, node, {first: names[1], second: names[0]}):
            return Finding(f"reads `{names[0]}` and `{names[1]}` in exchanged order", node)
    return None


def other_input(suspect: Suspect) -> Finding | None:
    """A single node that agrees once it reads another value of the same shape, computed nearby."""
    node, values = _alone(suspect), suspect.trace.values
    if node is None:
        return None
    near = _values_near(suspect, node)
    pairs = [
        (place, other)
        for place, name in enumerate(node.input)
        for other in near
        if name in values and other not in node.input and near[other].shape == values[name].shape
    ]
    for place, other in pairs[:ATTEMPTS]:
        if _is_right(suspect, node, {place: other}, near):
            return Finding(f"reads `{node.input[place]}`, but agrees with `{other}` instead", node)
    return None


def _values_near(suspect: Suspect, node: onnx.NodeProto) -> dict[str, Array]:
    """Values computed before the node in its layer or outside the layers, nearest first."""
    index, layer = suspect.trace.index, layer_of_scope(suspect.scope(node))
    before = index.nodes[: index.order[id(node)]]
    made = [n for n in reversed(before) if not index.is_shape(n) and layer_of_scope(suspect.scope(n)) in (layer, None)]
    made.sort(key=lambda n: layer_of_scope(suspect.scope(n)) is None)
    names = [name for n in made for name in n.output if name][: 2 * ATTEMPTS]
    return suspect.replay.probe.read(suspect.replay.feeds, names)


def _alone(suspect: Suspect) -> onnx.NodeProto | None:
    """The node of a piece with a single node."""
    return suspect.nodes[0] if len(suspect.nodes) == 1 else None


def _is_right(
    suspect: Suspect, node: onnx.NodeProto, inputs: Mapping[int, str], more: Mapping[str, Array] | None = None
) -> bool:
    """Whether the node agrees once it reads these inputs instead, whose values may be in `more`."""
    piece = suspect.piece
    if piece is None or piece.expected is None:
        return False
    changed = onnx.NodeProto.FromString(node.SerializeToString())
    changed.input[:] = [inputs.get(place, name) for place, name in enumerate(node.input)]
    values = {**(more or {}), **suspect.replay.feeds, **suspect.trace.values}
    found = suspect.replay.probe.run_piece([changed], values, piece.output)
    return found is not None and suspect.trace.comparison.agrees(piece.expected, found)


def other_output(suspect: Suspect) -> Finding | None:
    """Exchanged names of outputs, with all nodes correct."""
    name = suspect.where.output
    found = suspect.trace.values.get(name)
    if suspect.piece or found is None:
        return None
    for other, record in suspect.replay.outputs().items():
        if other != name and suspect.trace.comparison.agrees(record, found):
            return Finding(f"`{name}` contains the model's `{other}`")
    return None


def optimized(suspect: Suspect) -> Finding | None:
    """A correct graph that onnxruntime's optimization breaks."""
    name = suspect.where.output
    record, found = suspect.replay.outputs().get(name), suspect.trace.values.get(name)
    if suspect.piece or record is None or found is None or not suspect.trace.comparison.agrees(record, found):
        return None
    return Finding("the graph agrees with onnxruntime's graph optimization off: one of its rewrites is wrong here")


def constant(suspect: Suspect) -> Finding | None:
    """The constants of the first node, if other nodes of its operator have different ones."""
    for node in suspect.nodes[:1]:
        numbers = _numbers(suspect, node)
        others = (one for one in suspect.trace.index.nodes if one.op_type == node.op_type and one is not node)
        if numbers and not any(_numbers(suspect, other) == numbers for other in others):
            listed = " and ".join(f"{number:.8g}" for number in numbers)
            return Finding(f"`{node.name}` has the constant{'s' * (len(numbers) > 1)} {listed}", node)
    return None


def _numbers(suspect: Suspect, node: onnx.NodeProto) -> list[float]:
    """The single-element float constants of a node."""
    values = [suspect.constant(name) for name in node.input]
    return [float(v.reshape(())) for v in values if v is not None and v.size == 1 and v.dtype.kind == "f"]
