"""Checks the interface of a graph: names, element types and axes of inputs and outputs, unused inputs."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from llmconv.runtime.extra_inputs import (
    HIDDEN,
    INPUTS_EMBEDS,
    MAX_LENGTH,
    POSITIONS,
    WRITE_INDICES,
    ExtraInput,
    is_recurrent,
    is_state,
    past_of,
)
from llmconv.runtime.onnxruntime.graph import OrtGraph
from llmconv.runtime.onnxruntime.guard import nodes
from llmconv.verify.results import Check, audited

Axes = dict[str, list[str | int | None]]  # expected axes by name of an input or output; None for any

AXES: Axes = {
    INPUTS_EMBEDS: ["batch_size", "sequence_length", None],
    "input_ids": ["batch_size", "sequence_length"],
    "attention_mask": ["batch_size", "total_sequence_length"],
    "position_ids": ["batch_size", "sequence_length"],
}
PAST_LENGTH, TOTAL_LENGTH = "past_sequence_length", "total_sequence_length"
CacheShapes = Mapping[str, tuple[int, ...]]
"""Shapes of the eager model's cache for one sequence and one token, by output name."""

OPEN_AXES = ("kv_heads", "head_dim")
"""Symbolic axes of the past in graphs for optimum, which determine the shape themselves."""

TOKEN_INPUTS = ("input_ids", "attention_mask")


def check_structure(
    graph: OrtGraph,
    model: onnx.ModelProto,
    cache_shapes: CacheShapes,
    extras: Mapping[str, ExtraInput],
    *,
    heeds_positions: bool = False,
) -> Check:
    """Compares the graph's inputs and outputs with the documented interface and the eager model.

    With `heeds_positions`, the eager model's logits depend on `position_ids`, so the graph must take them, as it must
    take the resolved `extras`.
    """
    lengths = (MAX_LENGTH, MAX_LENGTH) if graph.sizes else (PAST_LENGTH, TOTAL_LENGTH)
    others: Axes = {name: list(extra.axes) for name, extra in extras.items()}  # type: ignore[arg-type]
    problems = [
        *(["missing input: position_ids"] if heeds_positions and not graph.takes_positions else []),
        *name_problems(graph, cache_shapes, extras),
        *_axis_problems(graph, {**AXES, **others, **_cache_axes(cache_shapes, lengths)}),
        *_result_problems(graph),
        *_type_problems(graph),
        *dead_inputs(model),
    ]
    return audited("structure", graph.name, problems)


def name_problems(graph: OrtGraph, cache_shapes: CacheShapes, extras: Collection[str]) -> list[str]:
    """Errors for missing, unexpected or reordered inputs and outputs; such a graph is not run."""
    first = INPUTS_EMBEDS if INPUTS_EMBEDS in graph.inputs else "input_ids"
    plain = graph.takes_positions and POSITIONS not in extras
    tokens = [first, "attention_mask", *([POSITIONS] if plain else [])]
    if graph.sizes and graph.sizes.indexed:
        tokens.append(WRITE_INDICES)
    tokens += extras
    problems = []
    for kind, found, wanted in (
        ("inputs", list(graph.inputs), tokens + [past_of(name) for name in cache_shapes]),
        ("outputs", list(graph.outputs), [*results_of(graph), *cache_shapes]),
    ):
        if found != wanted:
            odd = next((a for a, b in zip(found, wanted, strict=False) if a != b), f"{len(found)} of {len(wanted)}")
            problems.append(f"{kind} are not those of the model, in its order: {odd}")
    return problems


def results_of(graph: OrtGraph) -> list[str]:
    results = ["tokens", "scores"] if graph.entry.postprocess else ["logits"]
    return [*results, *([HIDDEN] if HIDDEN in graph.outputs else [])]


def _result_problems(graph: OrtGraph) -> list[str]:
    """Errors for results with all positions where the manifest records the last only, or the reverse."""
    if graph.entry.last_logits is None:
        return []
    problems = []
    for name in results_of(graph):
        positions = graph.outputs.get(name, ["", ""])[1]
        single = next(iter(graph.inputs.values()))[1] == 1  # then the last position is all of them
        if not single and (positions == 1) != graph.entry.last_logits:
            wanted = "1" if graph.entry.last_logits else "sequence_length"
            problems.append(f"shape mismatch for {name}: expected axis {wanted}, got {positions}")
    return problems


def _axis_problems(graph: OrtGraph, wanted_axes: Axes) -> list[str]:
    problems, static = [], graph.sizes is not None and graph.sizes.indexed
    for name, shape in [*graph.inputs.items(), *graph.outputs.items()]:
        for found, wanted in zip(shape, wanted_axes.get(name, shape), strict=False):
            if not _axis_fits(found, wanted, static, is_output=name in graph.outputs):
                problems.append(f"shape mismatch for {name}: expected axis {wanted}, got {found}")
    return problems


def _axis_fits(found: str | int, wanted: str | int | None, static: bool, is_output: bool) -> bool:
    """Whether an axis is the expected one; outputs may have computed symbols such as `past_length + length`."""
    if isinstance(wanted, str) and (isinstance(found, int) or is_output):
        return isinstance(found, str) or static
    return wanted is None or found == wanted or (found in OPEN_AXES and not is_output)


def _cache_axes(cache_shapes: CacheShapes, lengths: tuple[str, str]) -> dict[str, list[str | int | None]]:
    """Expected axes of the cache's inputs and outputs; those of a state are equal."""
    axes: dict[str, list[str | int | None]] = {}
    for name, shape in cache_shapes.items():
        for port, length in zip((past_of(name), name), lengths, strict=True):
            axes[port] = ["batch_size", *shape[1:]]
            if not is_state(name):
                axes[port][2] = length
    return axes


def _type_problems(graph: OrtGraph) -> list[str]:
    problems = [
        f"dtype mismatch for {name}: expected int64, got {graph.types[name]}"
        for name in (*TOKEN_INPUTS, "position_ids")
        if name in graph.inputs and graph.types[name] != "tensor(int64)"
    ]
    cache = [name for name in (*graph.past_names, *graph.present_names) if not is_recurrent(name)]
    kinds = {graph.types[name] for name in cache}
    return problems + ([f"cache inputs and outputs have several types: {sorted(kinds)}"] if len(kinds) > 1 else [])


def dead_inputs(model: onnx.ModelProto, names: Iterable[str] | None = None) -> list[str]:
    """Texts about inputs that no node reads, of those named, by default all."""
    used = {name for node in nodes(model) for name in node.input}
    used |= {output.name for output in model.graph.output}
    every = [port.name for port in model.graph.input] if names is None else names
    return [f"input {name} has no effect" for name in every if name not in used]


NAME = "norms of the vision tower"
FIELDS = ("eps", "epsilon", "variance_epsilon")  # attributes of torch's and transformers' norms
NORMS = re.compile(r"Norm(alization)?$")
DEFAULT = 1e-5  # what the operators of norms add without the attribute (ONNX, Operators.md)
INVERSE_ROOT = -0.5

DECODER = re.compile(r"(^|\.)(language_model|text_model)(\.|$)")


def check_tower_norms(name: str, graph: onnx.ModelProto, model: Any) -> Check:
    """A check that each norm of a vision tower adds the epsilon of its module.

    Nodes are named after modules; a norm without a module's name must have the epsilon of some norm.
    """
    known = {  # without those of the decoder
        module_name: np.float32(value)
        for module_name, module in model.named_modules()
        if not DECODER.search(module_name)
        for value in (getattr(module, field, None) for field in FIELDS)
        if isinstance(value, float)
    }
    wrong = [
        f"`{node}` adds the epsilon {value:g}, the model does not"
        for node, value in _used(graph)
        if np.float32(value) not in ({known[at]} if (at := node.partition("/")[0]) in known else set(known.values()))
    ]
    return audited(NAME, name, wrong)


def _used(graph: onnx.ModelProto) -> Iterator[tuple[str, float]]:
    """Names of nodes and the epsilons that they add: an attribute, its default, or a constant under a root."""
    constants = {tensor.name: tensor for tensor in graph.graph.initializer if not tensor.external_data}
    makers = {output: node for node in nodes(graph) for output in node.output}
    for node in nodes(graph):
        if NORMS.search(node.op_type):
            yield node.name, next((one.f for one in node.attribute if one.name == "epsilon"), DEFAULT)
        added = makers.get(node.input[0]) if _takes_root(node, constants) else None
        for name in added.input if added is not None and added.op_type == "Add" else ():
            if name in constants:
                yield node.name, _first(constants[name])


def _takes_root(node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]) -> bool:
    is_power = node.op_type == "Pow" and node.input[1] in constants
    return node.op_type == "Sqrt" or (is_power and _first(constants[node.input[1]]) == INVERSE_ROOT)


def _first(tensor: onnx.TensorProto) -> float:
    return float(numpy_helper.to_array(tensor).reshape(-1)[0])
