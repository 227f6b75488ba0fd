"""Which nodes of a graph a provider of onnxruntime has no kernel for; onnxruntime runs them on the CPU.

Kernels depend on the element types of a node's values, found by the type constraints of the operators. Only nodes that
read floating-point numbers count. Providers leave computations on shapes, lengths and token ids to the CPU on purpose
(CUDA's by `GetCpuPreferredNodes`, WebGPU's because it has no int64): they are small, and some of their results are
needed there anyway.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import onnx
from onnx import TensorProto
from onnx.inliner import inline_local_functions

FLOATS = frozenset(("float16", "bfloat16", "float32", "double"))


@dataclass(frozen=True)
class TypedNode:
    """A node and its element types."""

    operator: str  # such as `Attention` or `com.microsoft:GroupQueryAttention`
    name: str
    version: int  # the version that introduced the operator in this form
    inputs: tuple[str, ...]  # element types of its inputs, those that are known
    bound: dict[str, set[str]]  # element types by type constraint (`T`) and by parameter (`shape`)


def typed_nodes(model: onnx.ModelProto) -> Iterator[TypedNode]:
    """All nodes of a graph and of its inner graphs, functions inlined, in order."""
    whole = inline_local_functions(model) if model.functions else model
    opsets = {opset.domain: opset.version for opset in whole.opset_import}
    yield from _nodes(whole.graph, opsets, {})


def _nodes(graph: onnx.GraphProto, opsets: dict[str, int], outer: dict[str, str]) -> Iterator[TypedNode]:
    values = [*graph.input, *graph.output, *graph.value_info]
    declared = {value.name: value.type.tensor_type.elem_type for value in values}
    declared |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    types = outer | {name: element_type(code) for name, code in declared.items() if code}
    for node in graph.node:
        signature = find_signature(node.domain, node.op_type, opsets.get(node.domain, 1))
        bound: dict[str, set[str]] = {}
        for name, formal in paired(node.input, signature.inputs):
            for key in (formal.constraint, formal.name) if name and name in types else ():
                bound.setdefault(key, set()).add(types[name])
        for name, found in zip(node.output, _outputs(node, signature, bound), strict=False):
            if found and types.get(name) is None:
                types[name] = found
        for name, formal in paired(node.output, signature.outputs):
            bound.setdefault(formal.constraint, set()).update({types[name]} if name in types else ())
        inputs = tuple(types[name] for name in node.input if name in types)
        operator = f"{node.domain}:{node.op_type}".removeprefix(":")
        yield TypedNode(operator, node.name, signature.version, inputs, bound)
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _nodes(inner, opsets, types)


def _outputs(node: onnx.NodeProto, signature: Signature, bound: dict[str, set[str]]) -> list[str]:
    """Element types of the outputs; empty where the constraint leaves them open."""
    attributes: dict[str, Any] = {attribute.name: attribute for attribute in node.attribute}
    stated = element_type(attributes["to"].i) if node.op_type == "Cast" else ""
    if node.op_type in ("Constant", "ConstantOfShape") and "value" in attributes:
        stated = element_type(attributes["value"].t.data_type)
    found = []
    for _, formal in paired(node.output, signature.outputs):
        same = bound.get(formal.constraint, set())
        name = formal.constraint.removeprefix("tensor(").removesuffix(")")
        fixed = "" if name == formal.constraint else "float32" if name == "float" else name  # no variable such as `T`
        found.append(fixed or stated or (next(iter(same)) if len(same) == 1 else ""))
    return found


@cache
def element_type(code: int) -> str:
    """onnx's number of an element type as llmconv's name, such as `float32`."""
    return TensorProto.DataType.Name(code).lower() if code != TensorProto.FLOAT else "float32"


@dataclass(frozen=True)
class Parameter:
    """An input or output of an operator: its name and its type constraint, such as `T` or `tensor(int64)`."""

    name: str
    constraint: str


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs of an operator as of `version`; the last one may be repeated."""

    version: int = 1
    inputs: tuple[Parameter, ...] = ()
    outputs: tuple[Parameter, ...] = ()


def paired(names: Iterable[str], parameters: tuple[Parameter, ...]) -> Iterator[tuple[str, Parameter]]:
    """The inputs or outputs of a node with their parameters; those left out have an empty name."""
    for index, name in enumerate(names if parameters else ()):
        yield name, parameters[min(index, len(parameters) - 1)]


@cache
def find_signature(domain: str, op_type: str, opset: int) -> Signature:
    """The operator's signature in the imported `opset`; empty if neither onnx nor `signatures.json` defines it."""
    try:
        schema = onnx.defs.get_schema(op_type, opset, domain)
    except onnx.defs.SchemaError:
        inputs, outputs = _own().get(f"{domain}:{op_type}".removeprefix(":"), ([], []))
        return Signature(1, tuple(map(Parameter, inputs, inputs)), tuple(map(Parameter, outputs, outputs)))
    formal = [tuple(Parameter(p.name, p.type_str) for p in side) for side in (schema.inputs, schema.outputs)]
    return Signature(schema.since_version, *formal)


@cache
def _own() -> dict[str, tuple[list[str], list[str]]]:
    """Signatures of onnxruntime's own operators."""
    text = (files(__package__) / "signatures.json").read_text()
    found: dict[str, tuple[list[str], list[str]]] = json.loads(text)["kernels"]
    return found


@dataclass(frozen=True)
class Fallback:
    """Nodes of one operator and element types that have no kernel."""

    operator: str  # such as `com.microsoft:GroupQueryAttention`
    types: tuple[str, ...]  # those of the inputs, without duplicates
    count: int  # number of the nodes
    first: str  # name of the first

    def __str__(self) -> str:
        return f"`{self.operator}` ({', '.join(self.types)})"

    def manifest_fields(self) -> dict[str, Any]:
        return {"operator": self.operator, "types": list(self.types), "count": self.count, "first": self.first}


@cache
def kernel_table(target: str) -> Mapping[str, Any]:
    """The table of a target, `{target}.json` in this package: `source`, `onnxruntime` and `kernels`.

    `kernels` has rows `[first version, last version or None, {type constraint: element types}]` by operator, as
    `tools/target_tables.py` writes them.
    """
    table: Mapping[str, Any] = json.loads((files(__package__) / f"{target}.json").read_text())
    return table


def fallbacks(model: onnx.ModelProto, target: str) -> list[Fallback]:
    """The nodes that read floats and have no kernel in the target's table; the functions of `model` are inlined."""
    counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
    first: dict[tuple[str, tuple[str, ...]], str] = {}
    for node in typed_nodes(model):
        if FLOATS.intersection(node.inputs) and not has_kernel(node, target):
            key = (node.operator, tuple(dict.fromkeys(node.inputs)))
            counts[key] += 1
            first.setdefault(key, node.name or node.operator)
    return [Fallback(*key, count, first[key]) for key, count in counts.items()]


def has_kernel(node: TypedNode, target: str) -> bool:
    rows = kernel_table(target)["kernels"].get(node.operator, [])
    return node.operator == "Constant" or any(
        (node.version == begin or (end is not None and begin <= node.version <= end))
        and all(node.bound.get(name, set()) <= set(allowed.split()) for name, allowed in types.items())
        for begin, end, types in rows  # an open range promises nothing about later versions (`KernelRegistry`)
    )
