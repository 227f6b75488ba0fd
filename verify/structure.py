"""What can be said of a graph without running it: names, element types, axes, unused inputs."""

from __future__ import annotations

import onnx

from llmconv.runtime.buffers import SLOTS, WRITE_INDICES
from llmconv.runtime.embeddings import INPUTS_EMBEDS
from llmconv.runtime.guard import nodes
from llmconv.runtime.ort import OrtGraph
from llmconv.verify.report import Check

AXES: dict[str, list[str | int | None]] = {
    INPUTS_EMBEDS: ["batch_size", "sequence_length", None],
    "input_ids": ["batch_size", "sequence_length"],
    "attention_mask": ["batch_size", "total_sequence_length"],
    "position_ids": ["batch_size", "sequence_length"],
}
CACHE_LENGTH = {"past_key_values": "past_sequence_length", "present": "total_sequence_length"}
TOKEN_INPUTS = ("input_ids", "attention_mask")


def check_structure(graph: OrtGraph, model: onnx.ModelProto, cache_shapes: list[tuple[int, int]]) -> Check:
    """The graph's signature against the contract and the eager model.

    Args:
        graph: the graph, opened.
        model: the same without weights.
        cache_shapes: (kv_heads, head_dim) of every layer, as the eager model has them.
    """
    problems = [
        *name_problems(graph, len(cache_shapes)),
        *_axis_problems(graph, cache_shapes, static=graph.sizes is not None and graph.sizes.indexed),
        *_type_problems(graph),
        *_dead_inputs(model),
    ]
    return Check("structure", graph.name, "", verdict="fail" if problems else "pass", detail="; ".join(problems[:5]))


def cache_names(prefix: str, layers: int) -> list[str]:
    """`present.0.key`, `present.0.value`, `present.1.key`, …"""
    return [f"{prefix}.{layer}.{part}" for layer in range(layers) for part in ("key", "value")]


def name_problems(graph: OrtGraph, layers: int) -> list[str]:
    """Inputs or outputs that are missing, extra or out of order; such a graph is not run."""
    first = INPUTS_EMBEDS if INPUTS_EMBEDS in graph.inputs else "input_ids"
    tokens = [first, "attention_mask", *(["position_ids"] if graph.takes_positions else [])]
    if graph.sizes and graph.sizes.indexed:
        tokens.append(WRITE_INDICES)
    problems = []
    for kind, found, wanted in (
        ("inputs", list(graph.inputs), tokens + cache_names("past_key_values", layers)),
        ("outputs", list(graph.outputs), ["logits", *cache_names("present", layers)]),
    ):
        if found != wanted:
            odd = next((a for a, b in zip(found, wanted, strict=False) if a != b), f"{len(found)} of {len(wanted)}")
            problems.append(f"{kind} are not the model's, in its order: {odd}")
    return problems


def _axis_problems(graph: OrtGraph, cache_shapes: list[tuple[int, int]], static: bool) -> list[str]:
    problems = []
    for name, shape in [*graph.inputs.items(), *graph.outputs.items()]:
        for found, wanted in zip(shape, _axes(name, cache_shapes, graph) or shape, strict=False):
            if not _axis_fits(found, wanted, static, is_output=name in graph.outputs):
                problems.append(f"{name} has axis {found}, not {wanted}")
    return problems


def _axis_fits(found: str | int, wanted: str | int | None, static: bool, is_output: bool) -> bool:
    """Outputs may carry a computed symbol, such as `past_sequence_length + sequence_length`."""
    if isinstance(wanted, str) and (isinstance(found, int) or is_output):
        return isinstance(found, str) or static
    return wanted is None or found == wanted


def _axes(name: str, cache_shapes: list[tuple[int, int]], graph: OrtGraph) -> list[str | int | None]:
    prefix, _, rest = name.partition(".")
    layer = rest.partition(".")[0]
    if prefix in CACHE_LENGTH and layer.isdigit() and int(layer) < len(cache_shapes):
        heads, size = cache_shapes[int(layer)]
        return ["batch_size", heads, SLOTS if graph.sizes else CACHE_LENGTH[prefix], size]
    return AXES.get(name, [])


def _type_problems(graph: OrtGraph) -> list[str]:
    problems = [
        f"{name} is {graph.types[name]}, not int64"
        for name in (*TOKEN_INPUTS, "position_ids")
        if name in graph.inputs and graph.types[name] != "tensor(int64)"
    ]
    kinds = {graph.types[name] for name in (*graph.past_names, *graph.present_names)}
    return problems + ([f"cache inputs and outputs have several types: {sorted(kinds)}"] if len(kinds) > 1 else [])


def _dead_inputs(model: onnx.ModelProto) -> list[str]:
    used = {name for node in nodes(model) for name in node.input}
    used |= {output.name for output in model.graph.output}
    return [f"input {port.name} has no effect" for port in model.graph.input if port.name not in used]
