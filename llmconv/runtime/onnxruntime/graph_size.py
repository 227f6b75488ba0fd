"""Limits the size of a graph after onnxruntime has inlined its functions and folded its constants.

A file of a kilobyte may contain ten calls of a function that contains ten calls, and so on, or a terabyte of zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from math import prod
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

NODES, NODES_PER_NODE = 100_000, 20
"""Maximum number of nodes after inlining: a constant, plus a number per node of the file."""

ELEMENTS = 1 << 31
"""Maximum number of elements of a value with a constant shape; masks and tables are smaller."""

SHAPE_BYTES = 1024
"""Maximum size of a constant that is read as a shape."""

FunctionKey = tuple[str, str, str]
"""Domain, name and overload."""

NodeIterator = Callable[[Iterable[onnx.NodeProto]], Iterator[onnx.NodeProto]]


def expansion_problem(model: onnx.ModelProto, within: NodeIterator) -> str:
    """The problem of a model's functions, if they are recursive or too large; else empty.

    Args:
        model: the graph and its functions.
        within: returns the given nodes and those of their subgraphs.
    """
    bodies = {(one.domain, one.name, one.overload): list(within(one.node)) for one in model.functions}
    called = {key: _calls(body, bodies) for key, body in bodies.items()}
    order = _innermost_first(called)
    if order is None:
        return "has a recursive function"
    sizes: dict[FunctionKey, int] = {}
    for key in order:
        sizes[key] = len(bodies[key]) + sum(sizes[inner] for inner in called[key])
    whole = list(within(model.graph.node))
    size = len(whole) + sum(sizes[key] for key in _calls(whole, bodies))
    stored = len(whole) + sum(map(len, bodies.values()))
    if size > NODES + NODES_PER_NODE * stored:
        return f"has {size} nodes after its functions are inlined"
    return ""


def _calls(nodes: Iterable[onnx.NodeProto], bodies: Mapping[FunctionKey, Any]) -> list[FunctionKey]:
    """The functions that nodes call, with repetitions."""
    keys = ((node.domain, node.op_type, node.overload) for node in nodes)
    return [key for key in keys if key in bodies]


def _innermost_first(called: Mapping[FunctionKey, list[FunctionKey]]) -> list[FunctionKey] | None:
    """The functions, each after those that it calls; None if any is recursive."""
    waiting = {key: len(set(inner)) for key, inner in called.items()}
    callers: dict[FunctionKey, list[FunctionKey]] = {key: [] for key in called}
    for key, inner in called.items():
        for one in set(inner):
            callers[one].append(key)
    order = [key for key, count in waiting.items() if not count]
    for key in order:
        for caller in callers[key]:
            waiting[caller] -= 1
            if not waiting[caller]:
                order.append(caller)
    return order if len(order) == len(called) else None


def constant_problem(model: onnx.ModelProto, nodes: Iterable[onnx.NodeProto]) -> str:
    """The problem of a model's constants, if one is too large; else empty.

    Args:
        model: the graph.
        nodes: all of its nodes, including those of subgraphs and functions.
    """
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    found = list(nodes)
    for node in found:
        if node.op_type == "Constant" and node.output and node.attribute:
            attribute = node.attribute[0]
            if attribute.name == "value":
                tensors[node.output[0]] = attribute.t
            elif attribute.name in ("value_ints", "value_int"):
                tensors[node.output[0]] = numpy_helper.from_array(np.array(attribute.ints or [attribute.i]))
    number = partial(_numbers, tensors)
    for node in found:
        size = _elements(node, number)
        if size > ELEMENTS:
            return f"computes a constant of {size} elements (`{node.op_type}`)"
    return ""


def _elements(node: onnx.NodeProto, numbers: Callable[[str], list[float] | None]) -> int:
    """Minimum number of elements of a node's result, if constants determine it; else 0."""
    given = [*node.input, "", "", ""]
    match node.op_type:
        case "ConstantOfShape":
            shape = numbers(given[0])
        case "Expand" | "Tile":
            shape = numbers(given[1])
        case "Range":
            ends = [numbers(name) for name in given[:3]]
            if not all(ends):
                return 0
            start, stop, step = (float(end[0]) for end in ends if end)
            shape = [(stop - start) / step if step else 0]
        case "RandomNormal" | "RandomUniform":
            shape = [float(size) for item in node.attribute if item.name == "shape" for size in item.ints]
        case _:
            return 0
    return int(min(1e30, prod(max(1.0, size) for size in shape))) if shape else 0


def _numbers(tensors: Mapping[str, onnx.TensorProto], name: str) -> list[float] | None:
    """The values of a small constant; None if it is not one."""
    tensor = tensors.get(name)
    if tensor is None or tensor.ByteSize() > SHAPE_BYTES or tensor.external_data:
        return None
    try:
        return [float(number) for number in numpy_helper.to_array(tensor).ravel()]
    except (ValueError, TypeError, KeyError, OverflowError):
        return None
