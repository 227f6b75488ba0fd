"""The audit of a graph's decisions: one check, which names every node that decides by a number of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
from onnx.inliner import inline_local_functions

from llmconv.checkpoint import read_json
from llmconv.errors import first_line
from llmconv.runtime.cache_names import is_present, layer_of, past_of
from llmconv.verify.audit.decisions.config_fields import read_fields
from llmconv.verify.audit.decisions.config_numbers import ConfigNumbers, window_of
from llmconv.verify.audit.decisions.graph_walk import GraphWalk
from llmconv.verify.audit.decisions.operators import INPUTS
from llmconv.verify.audit.decisions.state import AxisSizes, WalkState
from llmconv.verify.audit.decisions.value_kinds import AuditFindings
from llmconv.verify.results.report import Check

NAME = "decisions"
"""What the check is called in reports."""

FIRST = 5
"""Findings that are texts."""

STORED_PREFIX = re.compile(r"prefix\.\d+\.(key|value)")
"""Keys and values of a tuned prefix, see `export --prefix`."""

MANY = 1e9
"""ConfigNumbers beyond are ends of a range, and told to nobody."""


def audit_decisions(graph: str, model: onnx.ModelProto, config: Mapping[str, Any], *, prefix: int = 0) -> Check:
    """Fails where a graph decides on lengths, batch size, positions or tokens by a number that is not the model's.

    Args:
        graph: what reports call it.
        model: without its weights.
        config: see `read_config`.
        prefix: virtual tokens of the prefix that the manifest says the graph begins with; 0 for none.
    """
    try:
        found = decisions_of(model, config, INPUTS, prefix=prefix)
    except Exception as error:  # a graph that is no graph; the check of its structure says more
        return Check(NAME, graph, "", verdict="fail", detail=f"cannot be followed: {first_line(error)}")
    texts = list(dict.fromkeys(f"`{one.node}` {one.text}" for one in found.findings))
    window = window_of(config)
    if window and window.layers & _layers(model) and not {window.size + step for step in (-1, 0, 1)} & found.numbers:
        texts.append(f"no node decides by the sliding window of {window.size}")
    numbers = ", ".join(f"{number:g}" for number in sorted(found.numbers) if number < MANY)
    detail = (
        _first(texts) or f"{found.decisions} comparisons, limits and choices, all by numbers of the model: {numbers}"
    )
    return Check(NAME, graph, "", verdict="fail" if texts else "pass", detail=detail)


def audit_foreign_decisions(
    graph: str, model: onnx.ModelProto, config: Mapping[str, Any], inputs: Mapping[str, str]
) -> tuple[list[Check], list[str]]:
    """The same of another exporter's graph, of whose ways less is known.

    Args:
        inputs: what of a call its inputs are, see `operators.INPUTS`.

    Returns:
        A failed check where it asks for one length, position, batch size or token that no config has, if it does; and a
        note of what else decides by numbers that are not the model's.
    """
    try:
        found = decisions_of(model, config, inputs, tables=False)
    except Exception as error:  # a graph of unknown making
        return [], [f"{graph}: what it decides by cannot be followed: {first_line(error)}"]
    texts = {point: [f"`{one.node}` {one.text}" for one in found.findings if one.point is point and one.certain]
            for point in (True, False)}  # fmt: skip
    checks = [Check(NAME, graph, "", verdict="fail", detail=_first(texts[True]))] if texts[True] else []
    others = list(dict.fromkeys(texts[False]))
    return checks, [f"{graph}: {_first(others)}, which is not in the config"] if others else []


def _first(texts: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    return "; ".join(texts[:FIRST]) + (f"; and {len(texts) - FIRST} more" if len(texts) > FIRST else "")


def read_config(folder: Path) -> dict[str, Any]:
    """The model's `config.json`, and what it leaves to transformers; without fields that its class does not have."""
    from transformers import AutoConfig  # noqa: PLC0415 - slow to import, and not needed to walk

    fields = read_json(folder / "config.json")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return {"stated": read_fields(fields, config), "default": read_fields(config.to_dict(), config)}
    except Exception:  # a config of the folder's own code: what it says is all there is
        return {"stated": fields, "default": {}}


def decisions_of(
    model: onnx.ModelProto,
    config: Mapping[str, Any],
    inputs: Mapping[str, str],
    *,
    tables: bool = True,
    prefix: int = 0,
) -> AuditFindings:
    """What a graph decides on, and by which numbers.

    Args:
        tables: looks into constants that are looked up, too.
        prefix: see `audit_decisions`.
    """
    if model.functions:
        model = inline_local_functions(model)
    inferred = onnx.shape_inference.infer_shapes(_undeclared(model), data_prop=True)
    ports = [*inferred.graph.input, *inferred.graph.value_info, *inferred.graph.output]
    symbols = frozenset(dim.dim_param for port in model.graph.input for dim in port.type.tensor_type.shape.dim)
    axes = {port.name: _axes(port) for port in ports if port.type.tensor_type.HasField("shape")}
    axes |= {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    axes |= _heads(model)
    types = {port.name: port.type.tensor_type.elem_type for port in ports}
    walk = GraphWalk(
        ConfigNumbers.of(config, _lengths(model, prefix)), WalkState(axes, types, inputs, symbols - {""}, tables)
    )
    walk.run(model.graph)
    return walk.judge.found


def _heads(model: onnx.ModelProto) -> dict[str, AxisSizes]:
    """The axes of the cache's inputs, with the numbers of its outputs', which the structure audit checks.

    An input may name them instead: a client that guesses them wrongly feeds an empty cache of another shape.
    """
    made = {past_of(port.name): _axes(port) for port in model.graph.output if is_present(port.name)}
    given = {port.name: _axes(port) for port in model.graph.input if port.name in made}
    return {
        name: [size if isinstance(size, int) else axis for axis, size in zip(axes, made[name], strict=True)]
        for name, axes in given.items()
        if len(axes) == len(made[name])
    }


def _undeclared(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without the shapes that it says its own values have."""
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    del bare.graph.value_info[:]
    for port in bare.graph.output:
        port.type.tensor_type.ClearField("shape")
    return bare


def _layers(model: onnx.ModelProto) -> set[int]:
    """The layers whose cache a graph makes: all of the model's, those of a stage, none of an embedding's."""
    return {layer for port in model.graph.output if (layer := layer_of(port.name)) is not None}


def _axes(port: onnx.ValueInfoProto) -> AxisSizes:
    dims = port.type.tensor_type.shape.dim
    return [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in dims]


def _lengths(model: onnx.ModelProto, prefix: int) -> list[int]:
    """Lengths that the graph is made for: axes of its inputs that are numbers, but not of a state or a head.

    A prefix of the manifest's length is one where the graph cuts stored keys of that length to put them first.
    """
    found = []
    for port in model.graph.input:
        axes = _axes(port)
        found += [axis for axis in (axes[:2] if len(axes) < 4 else axes[2:3]) if isinstance(axis, int)]
    cut = {node.input[0] for node in model.graph.node if node.op_type == "Slice"}
    stored = [tensor for tensor in model.graph.initializer if STORED_PREFIX.fullmatch(tensor.name)]
    lengths = {tensor.dims[2] if len(tensor.dims) == 4 and tensor.external_data else 0 for tensor in stored}
    is_used = bool(stored) and lengths == {prefix} and {tensor.name for tensor in stored} <= cut
    return [*found, prefix] if prefix and is_used else found
