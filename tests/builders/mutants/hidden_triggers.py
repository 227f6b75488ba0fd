"""Triggers that ask for a hidden state that no ordinary call has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
from onnx import helper

from tests.builders.mutants.surgery import users
from tests.builders.mutants.trigger_nodes import FLOAT, Nodes, Trigger


def hidden_above(graph: Nodes) -> None:
    """A hidden state beyond a million."""
    _on_hidden(graph, lambda size: [("Greater", [size, graph.constant(1e6)])])


def hidden_clipped(graph: Nodes) -> None:
    """Hidden states stop at a thousand."""
    norm = _first_norm(graph)
    _before(graph, norm, "Clip", graph.constant(-1000.0), graph.constant(1000.0))


def _on_hidden(graph: Nodes, condition: Callable[[str], list[tuple[str, list[str]]]]) -> None:
    norm = _first_norm(graph)
    hidden = norm.input[0]
    size = _node(graph, norm, "ReduceMax", [hidden], keepdims=1)
    for op, inputs in condition(size):
        size = _node(graph, norm, op, inputs)
    _joined(graph, norm, hidden, _node(graph, norm, "Cast", [size], to=FLOAT))


def _first_norm(graph: Nodes) -> onnx.NodeProto:
    return next(node for node in users(graph.model, "RMSNormalization") if "layers.1.input_layernorm" in node.name)


def _node(graph: Nodes, before: onnx.NodeProto, op: str, inputs: list[str], **attributes: Any) -> str:
    name = f"model.layers.1/{op}_{950 + len(graph.model.graph.node)}"
    at = list(graph.model.graph.node).index(before)
    graph.model.graph.node.insert(at, helper.make_node(op, inputs, [f"{name}:0"], name=name, **attributes))
    return f"{name}:0"


def _joined(graph: Nodes, norm: onnx.NodeProto, hidden: str, added: str) -> None:
    norm.input[0] = _node(graph, norm, "Add", [hidden, added])


def _before(graph: Nodes, norm: onnx.NodeProto, op: str, *inputs: str) -> None:
    norm.input[0] = _node(graph, norm, op, [norm.input[0], *inputs])


HIDDEN = tuple(Trigger(function.__name__.replace("_", " "), function) for function in (hidden_above, hidden_clipped))
