"""Checks an ONNX file before onnxruntime opens it: external data, operators, names, size.

An ONNX file names other files and byte ranges (`external_data`), which onnxruntime maps. The rules follow the ONNX
project's ExternalDataSecurity notes: plain names of files in the folder of the graph, or in a folder in it for a module
after the model (`2_Dense/model.safetensors`), known keys, ranges in the file.

The limit on the size is that of the graph after onnxruntime has inlined its functions and folded its constants: a file
of a kilobyte may contain ten calls of a function that contains ten calls, and so on, or a terabyte of zeros.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import helper, numpy_helper

from llmconv.errors import MalformedInput

EXACT = "llmconv.exact"  # metadata of a half-precision constant: the number of which it is the rounding
KEYS = {"location", "offset", "length", "checksum"}
MICROSOFT = "com.microsoft"
DOMAINS = {"", "ai.onnx", MICROSOFT}
FORBIDDEN_OPS = {"EPContext"}
DEPTH_LIMIT = 8
DIGITS = 100  # maximum number of digits of an offset or a length; Python refuses to convert thousands


def load_guarded(path: Path) -> onnx.ModelProto:
    """The graph without its weights; MalformedInput for custom operators, outside data, or too large sizes."""
    if not path.is_file():
        raise MalformedInput(f"`{path.name}` is missing from `{path.parent}`", hint="export the graph again")
    try:
        model = onnx.load(path, format="protobuf", load_external_data=False)  # not by suffix
    except (DecodeError, ValueError) as error:
        raise MalformedInput(f"`{path.name}` is not an ONNX file", hint="export the graph again") from error
    _require_text(path, model)
    _drop_fallbacks(model)
    own = {function.domain for function in model.functions}
    if shadowing := [function for function in model.functions if function.domain in DOMAINS]:
        _refuse(path, f"redefines the operator `{shadowing[0].name}`")
    for node in nodes(model):
        if node.op_type in FORBIDDEN_OPS or node.domain not in DOMAINS | own:
            _refuse(path, f"uses the unsupported operator `{node.domain}::{node.op_type}`")
    within = partial(_nodes_of, depth=DEPTH_LIMIT)
    if problem := expansion_problem(model, within) or constant_problem(model, nodes(model)):
        _refuse(path, problem)
    sizes: dict[str, int] = {}
    for tensor in external_tensors(model):
        _check_range(path, tensor, sizes)
    _require_order(path, model)
    return model


def _drop_fallbacks(model: onnx.ModelProto) -> None:
    """Removes functions that stand in for operators of onnxruntime on other runtimes: it never runs their bodies."""
    versions = [opset.version for opset in model.opset_import if opset.domain == MICROSOFT]
    if not any(function.domain == MICROSOFT for function in model.functions) or min(versions, default=1) < 1:
        return  # of version 0 it does run the bodies; they are refused
    kept = [function for function in model.functions if (function.domain, function.name) not in _own_operators()]
    if len(kept) < len(model.functions):
        refill(model.functions, kept)


@cache
def _own_operators() -> frozenset[tuple[str, str]]:
    """Domain and name of onnxruntime's operators outside the standard; empty if this release does not list them."""
    library = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")
    schemas: Any = getattr(library, "get_all_operator_schema", list)()
    return frozenset((schema.domain, schema.name) for schema in schemas if schema.domain == MICROSOFT)


def _require_order(path: Path, model: onnx.ModelProto) -> None:
    """Checks that every value is defined once, and before its uses, as the ONNX IR requires."""
    known = {"", *(port.name for port in model.graph.input), *(tensor.name for tensor in model.graph.initializer)}
    known |= {tensor.values.name for tensor in model.graph.sparse_initializer}
    for node in model.graph.node:
        if missing := next((name for name in node.input if name not in known), None):
            _refuse(path, f"uses `{missing[:80]}` before it is defined")
        defined = [name for name in node.output if name]
        if duplicate := next((name for name in defined if name in known), None):
            _refuse(path, f"defines `{duplicate[:80]}` twice")
        known.update(defined)


def _require_text(path: Path, model: onnx.ModelProto) -> None:
    """Checks that names are UTF-8; protobuf returns others as bytes, which equal no text."""
    found: list[Any] = [(function.name, function.domain) for function in model.functions]
    found += [(opset.domain,) for opset in model.opset_import]
    found += [(node.name, node.op_type, node.domain, *node.input, *node.output) for node in nodes(model)]
    found += [(attribute.name,) for node in nodes(model) for attribute in node.attribute]
    for graph in graphs(model.graph):
        found += [(port.name,) for port in (*graph.input, *graph.output, *graph.value_info)]
        found += [(tensor.name,) for tensor in graph.initializer]
        found += [(pair.key, pair.value) for tensor in graph.initializer for pair in tensor.external_data]
    if not all(isinstance(text, str) for texts in found for text in texts):
        _refuse(path, "has a name that is not text in UTF-8")


def weight_bytes(model: onnx.ModelProto) -> int:
    """Bytes of the graph's weights, in its own file and in external files."""
    outside = sum(int(external_fields(tensor).get("length") or 0) for tensor in external_tensors(model))
    return int(outside + model.ByteSize())


def external_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    for tensor in (*model.graph.initializer, *inner_tensors(model)):
        if is_external(tensor):
            yield tensor


def inner_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Tensors that are not initializers of the main graph: sparse ones, attributes of nodes, those of subgraphs."""
    for sparse in model.graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in nodes(model):
        for attribute in node.attribute:
            yield from [attribute.t] if attribute.HasField("t") else attribute.tensors
            for graph in _subgraphs(attribute):
                yield from graph.initializer


def is_external(tensor: onnx.TensorProto) -> bool:
    return bool(tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data)


def external_fields(tensor: onnx.TensorProto) -> dict[str, str]:
    """The `external_data` entries of a tensor: location, offset, length as text."""
    return {entry.key: entry.value for entry in tensor.external_data}


def nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Every node of the model, including those of subgraphs and functions."""
    yield from _nodes_of(model.graph.node, DEPTH_LIMIT)
    for function in model.functions:
        yield from _nodes_of(function.node, DEPTH_LIMIT)


def values_read_by(node: onnx.NodeProto) -> set[str]:
    """Values that a node reads, including those that its subgraphs read from outside."""
    names = set(node.input)
    for graph in (graph for attribute in node.attribute for graph in _subgraphs(attribute)):
        own = {named.name for named in (*graph.initializer, *graph.input)}
        own |= {name for inner in graph.node for name in inner.output}
        taken = {name for inner in graph.node for name in values_read_by(inner)} | {port.name for port in graph.output}
        names |= taken - own
    return names


def attributes(node: onnx.NodeProto) -> dict[str, int]:
    """The values of a node's integer attributes by name."""
    return {found.name: found.i for found in node.attribute if found.type == onnx.AttributeProto.INT}


def attribute_values(node: onnx.NodeProto) -> dict[str, Any]:
    """The values of all attributes of a node by name; ValueError for one of no type."""
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def refill(field: Any, items: Iterable[Any]) -> None:
    """Gives a repeated field of messages, some of which may be its own, other content."""
    content = list(items)
    del field[:]
    field.extend(content)


def graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and its subgraphs, outermost first."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in _subgraphs(attribute):
                yield from graphs(inner)


def rename(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Gives values new names by the old ones, in place, also in subgraphs."""
    for one in graphs(graph):
        for named in (*one.initializer, *one.input, *one.output, *one.value_info):
            named.name = names.get(named.name, named.name)
        for side in (side for node in one.node for side in (node.input, node.output)):
            side[:] = [names.get(name, name) for name in side]


def _nodes_of(nodes: Iterable[onnx.NodeProto], depth: int) -> Iterator[onnx.NodeProto]:
    if depth == 0:
        raise MalformedInput("subgraphs are nested too deeply", hint="export the graph again")
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in _subgraphs(attribute):
                yield from _nodes_of(graph.node, depth - 1)


def _subgraphs(attribute: onnx.AttributeProto) -> list[onnx.GraphProto]:
    return [attribute.g] if attribute.HasField("g") else list(attribute.graphs)


def _check_range(path: Path, tensor: onnx.TensorProto, sizes: dict[str, int]) -> None:
    """Checks a tensor's location, offset and length; `sizes` caches file sizes."""
    fields = external_fields(tensor)
    if len(fields) != len(tensor.external_data) or not set(fields) <= KEYS:
        _refuse(path, f"has unknown or duplicate keys in the external data of `{tensor.name[:80]}`")
    location = fields.get("location", "")
    folder, _, name = location.rpartition("/")
    if not _is_plain(name) or (folder and not (_is_plain(folder) and name.endswith(".safetensors"))):
        _refuse(path, f"stores `{tensor.name[:80]}` in {location[:80]!r}, which is not a plain file name")
    if location not in sizes:
        # bytes of a file next to the graph
        data = path.parent / location
        if not data.exists():
            problem = f"`{path.name}` maps `{location}`, which is missing"
            raise MalformedInput(problem, hint="copy the weights again, next to the graph")
        # in the hub's cache, graph and data are links into one folder of blobs
        leads_away = data.is_symlink() and not (path.is_symlink() and path.resolve().parent == data.resolve().parent)
        if not data.is_file() or leads_away or ("/" in location and data.parent.is_symlink()):
            _refuse(path, f"needs `{location}`, which is a link or not a file")
        sizes[location] = data.stat().st_size
    offset, length = fields.get("offset", "0"), fields.get("length", "0")
    if not (offset.isascii() and offset.isdigit() and length.isascii() and length.isdigit()):
        _refuse(path, f"has an invalid offset or length for `{tensor.name[:80]}`")
    if max(len(offset), len(length)) > DIGITS or int(offset) + int(length) > sizes[location]:
        hint = "the weights are truncated or belong to another model; copy them again, or export again"
        raise MalformedInput(f"`{path.name}` stores `{tensor.name[:80]}` beyond the end of `{location}`", hint=hint)


def _is_plain(location: object) -> bool:
    return (
        isinstance(location, str)
        and bool(location)
        and location.isprintable()
        and not set(location) & set("/\\*:")
        and location not in {".", ".."}
    )


def _refuse(path: Path, problem: str) -> NoReturn:
    message = f"`{path.name}` {problem}"
    raise MalformedInput(message, hint="it is damaged or hostile; export it again from a model that you trust")


# maximum number of nodes after inlining: a constant, plus a number per node of the file
NODES, NODES_PER_NODE = 100_000, 20
ELEMENTS = 1 << 31  # maximum number of elements of a value with a constant shape; masks and tables are smaller
SHAPE_BYTES = 1024  # maximum size of a constant that is read as a shape
FunctionKey = tuple[str, str, str]  # domain, name and overload
NodeIterator = Callable[[Iterable[onnx.NodeProto]], Iterator[onnx.NodeProto]]


def expansion_problem(model: onnx.ModelProto, within: NodeIterator) -> str:
    """The problem of recursive or too large functions, else empty; `within` adds the nodes of subgraphs."""
    bodies = {(one.domain, one.name, one.overload): list(within(one.node)) for one in model.functions}
    called = {key: _calls(body, bodies) for key, body in bodies.items()}
    if (order := _innermost_first(called)) is None:
        return "has a recursive function"
    sizes: dict[FunctionKey, int] = {}
    for key in order:
        sizes[key] = len(bodies[key]) + sum(sizes[inner] for inner in called[key])
    whole = list(within(model.graph.node))
    size = len(whole) + sum(sizes[key] for key in _calls(whole, bodies))
    if size > NODES + NODES_PER_NODE * (len(whole) + sum(map(len, bodies.values()))):
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
    """The problem of a too large constant, else empty; `nodes` include those of subgraphs and functions."""
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
        if (size := _elements(node, number)) > ELEMENTS:
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
