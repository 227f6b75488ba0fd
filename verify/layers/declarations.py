"""Declarations of a graph: types of values and the order of its inputs and outputs, which onnxruntime and callers read.

Parts of a graph run without them, so layers must agree in them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import onnx

from llmconv.runtime.cache_names import is_past, is_present, layer_of
from llmconv.verify.layers.forms import Form
from llmconv.verify.layers.graph_index import GraphIndex


def role(name: str) -> str:
    """A cache input or output without the number of its layer."""
    return ".".join(part for part in name.split(".") if not part.isdigit())


def declared_caches(index: GraphIndex, number: int) -> list[Form]:
    """The cache inputs and outputs of a layer in the order of the file, with their types.

    Args:
        index: the graph.
        number: of the layer.
    """
    graph = index.model.graph
    ports = [port for port in graph.input if is_past(port.name)] + [p for p in graph.output if is_present(p.name)]
    return [f"{role(port.name)} {_kind(port)}" for port in ports if layer_of(port.name) == number]


def declared_values(index: GraphIndex, values: Mapping[str, Form]) -> list[Form]:
    """The types that the file declares for values of a layer, without the names of axes.

    Args:
        index: the graph.
        values: the forms of the values that the layer computes.
    """
    return sorted(f"{values[port.name]} {_kind(port)}" for port in index.model.graph.value_info if port.name in values)


def declaration_problem(index: GraphIndex) -> str:
    """Why the declarations are not those of layers in order; empty if they are."""
    graph = index.model.graph
    computed = [name for node in index.nodes for name in node.output if name]
    names = Counter([*computed, *index.inputs.keys() - index.initializers.keys(), *index.initializers])
    if twice := sorted(name for name, count in names.items() if count > 1):
        return f"`{twice[0]}` is computed or declared twice"
    for ports in (graph.input, graph.output):
        if odd := _out_of_order([port.name for port in ports]):
            return f"the cache `{odd}` is not in the order of the layers"
    return ""


def _out_of_order(names: Sequence[str]) -> str:
    """The first cache after one of the same role of a later layer."""
    last: dict[str, int] = {}
    for name in names:
        number = layer_of(name)
        if number is None or not (is_past(name) or is_present(name)):
            continue
        if number <= last.get(role(name), -1):
            return name
        last[role(name)] = number
    return ""


def _kind(port: onnx.ValueInfoProto) -> str:
    """Element type and sizes; axes with names are alike."""
    tensor = port.type.tensor_type
    sizes: Iterable[object] = (axis.dim_value if axis.HasField("dim_value") else "?" for axis in tensor.shape.dim)
    return f"{tensor.elem_type}[{', '.join(map(str, sizes)) if tensor.HasField('shape') else '…'}]"
