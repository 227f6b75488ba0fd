"""What a graph becomes when onnxruntime opens it: functions put in the place of their calls, constants computed.

A file of a kilobyte may hold ten calls of a function that holds ten calls, and so on, or ask for a terabyte of zeros.
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
"""Of the graph with every function in the place of its calls, and so many more per node of the file."""

ELEMENTS = 1 << 31
"""Of a value whose shape the graph itself says: no mask and no table is larger."""

SHAPE_BYTES = 1024
"""Of a constant that may be a shape."""

FunctionKey = tuple[str, str, str]
NodeIterator = Callable[[Iterable[onnx.NodeProto]], Iterator[onnx.NodeProto]]


def expansion_problem(model: onnx.ModelProto, within: NodeIterator) -> str:
    """What is wrong with the functions of a model; empty where nothing is.

    Args:
        model: the graph and its functions.
        within: the nodes of a list, and those of subgraphs.
    """
    bodies = {(one.domain, one.name, one.overload): list(within(one.node)) for one in model.functions}
    called = {key: _calls(body, bodies) for key, body in bodies.items()}
    order = _innermost_first(called)
    if order is None:
        return "has a function that calls itself"
    sizes: dict[FunctionKey, int] = {}
    for key in order:
        sizes[key] = len(bodies[key]) + sum(sizes[inner] for inner in called[key])
    whole = list(within(model.graph.node))
    size = len(whole) + sum(sizes[key] for key in _calls(whole, bodies))
    stored = len(whole) + sum(map(len, bodies.values()))
    if size > NODES + NODES_PER_NODE * stored:
        return f"becomes {size} nodes when its functions are put in the place of their calls"
    return ""


def _calls(nodes: Iterable[onnx.NodeProto], bodies: Mapping[FunctionKey, Any]) -> list[FunctionKey]:
    """The functions that nodes call, each as often as they do."""
    keys = ((node.domain, node.op_type, node.overload) for node in nodes)
    return [key for key in keys if key in bodies]


def _innermost_first(called: Mapping[FunctionKey, list[FunctionKey]]) -> list[FunctionKey] | None:
    """The functions, each behind those that it calls; None where one calls itself."""
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
    """What is wrong with the constants of a model; empty where nothing is.

    Args:
        model: the graph.
        nodes: all of its nodes, those of subgraphs and functions too.
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
            return f"makes a value of {size} elements out of nothing (`{node.op_type}`)"
    return ""


def _elements(node: onnx.NodeProto, numbers: Callable[[str], list[float] | None]) -> int:
    """Elements at the least of what a node makes, as far as constants alone tell; 0 where they do not."""
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
    """A small constant as numbers; None where it is none."""
    tensor = tensors.get(name)
    if tensor is None or tensor.ByteSize() > SHAPE_BYTES or tensor.external_data:
        return None
    try:
        return [float(number) for number in numpy_helper.to_array(tensor).ravel()]
    except (ValueError, TypeError, KeyError, OverflowError):
        return None
