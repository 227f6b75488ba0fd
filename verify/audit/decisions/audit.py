"""The audit of decisions: one check per graph, which names nodes that decide by numbers that are not the model's."""

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
from llmconv.runtime.onnxruntime.float32_graph import half_precision
from llmconv.runtime.onnxruntime.guard import is_external
from llmconv.verify.audit.decisions.config_fields import read_fields
from llmconv.verify.audit.decisions.config_numbers import ConfigNumbers, window_of
from llmconv.verify.audit.decisions.graph_walk import GraphWalk
from llmconv.verify.audit.decisions.operators import INPUTS
from llmconv.verify.audit.decisions.standard_shapes import in_standard_operators
from llmconv.verify.audit.decisions.state import AxisSizes, WalkState
from llmconv.verify.audit.decisions.value_kinds import AuditFindings
from llmconv.verify.results.report import Check

NAME = "decisions"
"""Name of the check in reports."""

HIDDEN, PRODUCTS = "last_hidden_state", ("MatMul", "Gemm")

FIRST = 5
"""Maximum number of findings in a detail."""

STORED_PREFIX = re.compile(r"prefix\.\d+\.(key|value)")
"""Keys and values of a tuned prefix, see `export --prefix`."""

MANY = 1e9
"""Larger numbers are ends of a range and are not printed."""


SMALL = 2.0
"""Numbers up to this are in the arithmetic of pooling; every run has longer texts and larger batches."""


def audit_decisions(
    graph: str, model: onnx.ModelProto, config: Mapping[str, Any], *, prefix: int = 0, pools: bool = False
) -> Check:
    """Fails if a graph decides on lengths, batch size, positions or tokens by a number that is not the model's.

    Args:
        graph: name of the graph in reports.
        model: the graph without its weights.
        config: from `read_config`.
        prefix: number of virtual tokens of the graph's prefix in the manifest; 0 for none.
        pools: what follows the model joins the tokens of a text, which counts them and looks up the last one.
    """
    try:
        found = decisions_of(model, config, INPUTS, prefix=prefix)
        after = after_model(model) if pools else frozenset()
    except Exception as error:  # not a valid graph; the check of its structure reports why
        return Check(NAME, graph, "", verdict="fail", detail=f"cannot be analyzed: {first_line(error)}")
    wrong = (one for one in found.findings if one.node not in after or one.number > SMALL)
    texts = list(dict.fromkeys(f"`{one.node}` {one.text}" for one in wrong))
    window = window_of(config)
    if window and window.layers & _layers(model) and not {window.size + step for step in (-1, 0, 1)} & found.numbers:
        texts.append(f"no node decides by the sliding window of {window.size}")
    numbers = ", ".join(f"{number:g}" for number in sorted(found.numbers) if number < MANY)
    detail = (
        _first(texts) or f"{found.decisions} comparisons, limits and choices, all by numbers of the model: {numbers}"
    )
    return Check(NAME, graph, "", verdict="fail" if texts else "pass", detail=detail)


def after_model(model: onnx.ModelProto) -> frozenset[str]:
    """The nodes of a graph without a cache that follow the model: those on which no hidden state depends.

    The hidden state is that of all tokens, an output of graphs of embeddings; else the last product with a weight, as
    the scores of a classifier are chosen from those of all tokens.

    Args:
        model: the graph without its weights.
    """
    stored = {tensor.name for tensor in model.graph.initializer if is_external(tensor)}
    names = {port.name for port in model.graph.output}
    products = [node for node in model.graph.node if node.op_type in PRODUCTS and stored.intersection(node.input)]
    wanted = {HIDDEN} if HIDDEN in names else {name for node in products[-1:] for name in node.output}
    inside = set()
    for node in reversed(model.graph.node):
        if wanted.intersection(node.output):
            wanted.update(node.input)
            inside.add(node.name or node.output[0])
    return frozenset(node.name or node.output[0] for node in model.graph.node) - inside


def audit_foreign_decisions(
    graph: str,
    model: onnx.ModelProto,
    config: Mapping[str, Any],
    inputs: Mapping[str, str] = INPUTS,
    *,
    prefix: int = 0,
) -> tuple[list[Check], list[str]]:
    """The same audit for a graph of another exporter, with fewer failures.

    Args:
        graph: name of the graph in reports.
        model: the graph without its weights.
        config: from `read_config`.
        inputs: the property of a call that each input contains, see `operators.INPUTS`.
        prefix: as in `audit_decisions`.

    Returns:
        A failed check if the graph tests for a single length, position, batch size or token that no field of the config
        contains; and a note on other decisions by numbers that are not the model's.
    """
    try:
        found = decisions_of(model, config, inputs, tables=False, prefix=prefix)
    except Exception as error:  # a graph of an unknown exporter
        return [], [f"{graph}: its decisions cannot be analyzed: {first_line(error)}"]
    texts = {point: [f"`{one.node}` {one.text}" for one in found.findings if one.point is point and one.certain]
            for point in (True, False)}  # fmt: skip
    checks = [Check(NAME, graph, "", verdict="fail", detail=_first(texts[True]))] if texts[True] else []
    others = list(dict.fromkeys(texts[False]))
    return checks, [f"{graph}: {_first(others)}, which is not in the config"] if others else []


def _first(texts: Sequence[str]) -> str:
    """The first texts, and the number of others."""
    return "; ".join(texts[:FIRST]) + (f"; and {len(texts) - FIRST} more" if len(texts) > FIRST else "")


def read_config(folder: Path) -> dict[str, Any]:
    """The fields that `config.json` states, and transformers' defaults; without fields that the config class lacks."""
    from transformers import AutoConfig  # noqa: PLC0415 - slow to import, and not needed to walk

    fields = read_json(folder / "config.json")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return {"stated": read_fields(fields, config), "default": read_fields(config.to_dict(), config)}
    except Exception:  # a config class in the folder's own code, which has no known defaults
        return {"stated": fields, "default": {}}


def decisions_of(
    model: onnx.ModelProto,
    config: Mapping[str, Any],
    inputs: Mapping[str, str],
    *,
    tables: bool = True,
    prefix: int = 0,
) -> AuditFindings:
    """The decisions of a graph.

    Args:
        model: the graph without its weights.
        config: from `read_config`.
        inputs: the property of a call that each input contains.
        tables: also analyze the contents of lookup tables.
        prefix: as in `audit_decisions`.
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
    half = half_precision(model)
    walk = GraphWalk(
        ConfigNumbers.of(config, _lengths(model, prefix), half),
        WalkState(axes, types, inputs, symbols - {""}, tables, bool(half)),
    )
    walk.run(model.graph)
    return walk.judge.found


def _heads(model: onnx.ModelProto) -> dict[str, AxisSizes]:
    """The axes of the cache's inputs, with fixed sizes taken from its outputs, which the structure audit checks.

    Inputs may have symbolic axes there: a client that guesses them wrongly passes an empty cache of another shape.
    """
    made = {past_of(port.name): _axes(port) for port in model.graph.output if is_present(port.name)}
    given = {port.name: _axes(port) for port in model.graph.input if port.name in made}
    return {
        name: [size if isinstance(size, int) else axis for axis, size in zip(axes, made[name], strict=True)]
        for name, axes in given.items()
        if len(axes) == len(made[name])
    }


def _undeclared(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without declared shapes of inner values and outputs, for shape inference."""
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    del bare.graph.value_info[:]
    for port in bare.graph.output:
        port.type.tensor_type.ClearField("shape")
    in_standard_operators(bare.graph)
    return bare


def _layers(model: onnx.ModelProto) -> set[int]:
    """The layers whose cache a graph returns: all layers, those of a stage, or none for an embedding."""
    return {layer for port in model.graph.output if (layer := layer_of(port.name)) is not None}


def _axes(port: onnx.ValueInfoProto) -> AxisSizes:
    dims = port.type.tensor_type.shape.dim
    return [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in dims]


def _lengths(model: onnx.ModelProto, prefix: int) -> list[int]:
    """Lengths that are fixed in the graph: numeric axes of its inputs, except those of states and heads.

    The length of the prefix is one of them if the graph slices stored keys of that length.
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
