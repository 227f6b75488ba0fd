"""The audit of a graph's decisions: one check, which names every node that decides by a number of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
from onnx.inliner import inline_local_functions

from llmconv.checkpoint import read_json
from llmconv.verify.decisions.numbers import Numbers
from llmconv.verify.decisions.state import Axes
from llmconv.verify.decisions.values import Found
from llmconv.verify.decisions.walk import Walk
from llmconv.verify.report import Check

NAME = "decisions"
"""What the check is called in reports."""

FIRST = 5
"""Findings that are told."""


def audit_decisions(graph: str, model: onnx.ModelProto, config: Mapping[str, Any]) -> Check:
    """Fails where a graph decides on lengths, batch size, positions or tokens by a number that is not the model's.

    Args:
        graph: what reports call it.
        model: without its weights.
        config: see `read_config`.
    """
    found = decisions_of(model, config)
    told = list(dict.fromkeys(f"`{one.node}` {one.text}" for one in found.findings))
    more = f"; and {len(told) - FIRST} more" if len(told) > FIRST else ""
    numbers = ", ".join(f"{number:g}" for number in sorted(found.numbers) if number < 1e9)
    detail = "; ".join(told[:FIRST]) + more or f"{found.decisions} by numbers of the model ({numbers})"
    return Check(NAME, graph, "", verdict="fail" if told else "pass", detail=detail)


def read_config(folder: Path) -> dict[str, Any]:
    """The model's `config.json` as it is, and with the fields that it leaves to transformers."""
    from transformers import AutoConfig  # noqa: PLC0415 - slow to import, and not needed to walk

    fields = read_json(folder / "config.json")
    try:
        whole = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).to_dict()
    except Exception:  # a config of the folder's own code: what it says is all there is
        whole = {}
    return {"said": fields, "meant": whole}


def decisions_of(model: onnx.ModelProto, config: Mapping[str, Any]) -> Found:
    """What a graph decides on, and by which numbers."""
    if model.functions:
        model = inline_local_functions(model)
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    ports = [*inferred.graph.input, *inferred.graph.value_info, *inferred.graph.output]
    axes = {port.name: _axes(port) for port in ports if port.type.tensor_type.HasField("shape")}
    axes |= {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    types = {port.name: port.type.tensor_type.elem_type for port in ports}
    walk = Walk(Numbers.of(config, _lengths(model)), axes, types)
    walk.run(model.graph)
    return walk.judge.found


def _axes(port: onnx.ValueInfoProto) -> Axes:
    dims = port.type.tensor_type.shape.dim
    return [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in dims]


def _lengths(model: onnx.ModelProto) -> list[int]:
    """Lengths that the graph is made for: axes of its inputs that are numbers, but not of a state or a head."""
    found = []
    for port in model.graph.input:
        axes = _axes(port)
        found += [axis for axis in (axes[:2] if len(axes) < 4 else axes[2:3]) if isinstance(axis, int)]
    return found
