"""Forms: what a value computes, as a digest that is equal for values computed alike, whatever their names.

A form is built from the leaves up: sources (weights, inputs, shared values) have forms that the caller gives, and a
node's form is the digest of its operator, attributes and the forms of its inputs. So two layers are isomorphic, node by
node, if the forms of their outputs and of all their nodes are equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping

import onnx
from onnx import numpy_helper

from llmconv.runtime.onnxruntime.guard import external_fields, is_external

Form = str
"""A digest, or a readable text for a source."""

Sources = Callable[[str], Form]
"""The form of a value that no node of the part computes."""


def forms_of(nodes: Iterable[onnx.NodeProto], source: Sources) -> tuple[dict[str, Form], list[Form]]:
    """The form of each value that nodes compute, by name, and the form of each node.

    Args:
        nodes: in an order in which every value is computed before it is read.
        source: the forms of all other values.
    """
    values: dict[str, Form] = {}
    found: list[Form] = []

    def value(name: str) -> Form:
        return values[name] if name in values else source(name)

    for node in nodes:
        form = _node_form(node, value)
        found.append(form)
        values |= {name: f"{form}.{at}" for at, name in enumerate(node.output) if name}
    return values, found


def tensor_form(tensor: onnx.TensorProto) -> Form:
    """The form of a constant by its content; of external data by its place."""
    kind = f"{onnx.TensorProto.DataType.Name(tensor.data_type)}{list(tensor.dims)}"
    if is_external(tensor):
        return f"{kind} {sorted(external_fields(tensor).items())}"
    return f"{kind} {_digest([numpy_helper.to_array(tensor).tobytes()])}"


def _node_form(node: onnx.NodeProto, value: Sources) -> Form:
    parts = [node.domain or "ai.onnx", node.op_type, str(len(node.output))]
    parts += [value(name) if name else "-" for name in node.input]
    parts += [f"{attribute.name}={_attribute_form(attribute, value)}" for attribute in _sorted(node)]
    return f"{node.op_type}:{_digest([part.encode() for part in parts])}"


def _sorted(node: onnx.NodeProto) -> list[onnx.AttributeProto]:
    return sorted(node.attribute, key=lambda attribute: attribute.name)


def _attribute_form(attribute: onnx.AttributeProto, value: Sources) -> Form:
    kinds = onnx.AttributeProto
    if attribute.type in (kinds.GRAPH, kinds.GRAPHS):
        graphs = [attribute.g] if attribute.type == kinds.GRAPH else attribute.graphs
        return ",".join(_graph_form(graph, value) for graph in graphs)
    if attribute.type in (kinds.TENSOR, kinds.TENSORS):
        tensors = [attribute.t] if attribute.type == kinds.TENSOR else attribute.tensors
        return ",".join(tensor_form(tensor) for tensor in tensors)
    return _digest([attribute.SerializeToString(deterministic=True)])


def _graph_form(graph: onnx.GraphProto, outer: Sources) -> Form:
    """The form of a subgraph, whose own names do not count."""
    own: Mapping[str, Form] = {
        **{tensor.name: tensor_form(tensor) for tensor in graph.initializer},
        **{port.name: f"input {at}" for at, port in enumerate(graph.input)},
    }
    values, nodes = forms_of(graph.node, lambda name: own[name] if name in own else outer(name))
    known = {**own, **values}
    results = [known.get(port.name) or outer(port.name) for port in graph.output]
    return _digest([part.encode() for part in (*results, "|", *sorted(nodes))])


def _digest(parts: Iterable[bytes]) -> str:
    content = hashlib.sha256()
    for part in parts:
        content.update(len(part).to_bytes(8, "little") + part)
    return content.hexdigest()[:24]
