"""TracedGraph: the result of a trace, an ONNX model whose weights are graph inputs."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from llmconv.tensors import Array

if TYPE_CHECKING:
    from llmconv.export.graph_spec import GraphSpec


@dataclass
class TracedGraph:
    """A traced model."""

    model: ir.Model  # the ONNX model; its inputs are those of the input map, then the weights by parameter name
    weights: dict[str, ir.Value]  # the weight inputs by parameter name
    layers_name: str  # name of the list of layers, such as `model.layers`
    num_layers: int
    tied: dict[str, str]  # parameter name to the name of the parameter that it shares memory with
    base_prefix: str  # name of the inner model (`transformer`), which tensor names of some checkpoints lack
    transforms: list[Any]  # transformers' conversion mapping (`llmconv.export.weights`)
    unused: dict[str, tuple[int, ...]]  # shapes of parameters and buffers that no node reads, by name
    token_axes: tuple[str, ...]  # the symbols of batch size and sequence length in the trace
    spec: GraphSpec  # how the cache is kept, and which axes are fixed
    ignored: tuple[str, ...] = ()  # patterns of the names of stored tensors that the model ignores
    own: tuple[str, ...] = ("",)  # prefixes of the names of the checkpoint's tensors that belong to the graph

    def copy(self) -> TracedGraph:
        """The same graph with a model of its own; only before it is bound."""
        model = self.model.clone()
        inputs = {value.name: value for value in model.graph.inputs}
        return replace(self, model=model, weights={name: inputs[value.name] for name, value in self.weights.items()})


def scopes(node: ir.Node) -> list[str]:
    """Names of the modules around a node, outermost first, in the style of parameters (`model.layers.0.mlp`)."""
    text = node.metadata_props.get("pkg.torch.onnx.name_scopes")
    names = ast.literal_eval(text)[:-1] if text else []
    return [name.removeprefix("model").removeprefix(".") for name in names]


def static_shape(value: ir.Value | None) -> tuple[int, ...]:
    """The shape of a weight, which has no dynamic axes."""
    assert value is not None and value.shape is not None
    return tuple(int(size) for size in value.shape)  # type: ignore[arg-type]


MICROSOFT = "com.microsoft"  # the domain of onnxruntime's own operators


class NodeEditor:
    """Inserts nodes into a graph.

    `before`: the node in front of which nodes are inserted; None for the end of the graph. `scope`: name prefix: nodes
    are called `{scope}/{operator}`, their outputs `{node}:{index}`; empty for a graph whose nodes are named later.
    `module_of`: a node of the module that the new nodes belong to; None if they serve all modules.
    """

    def __init__(
        self, graph: ir.Graph, before: ir.Node | None = None, scope: str = "", module_of: ir.Node | None = None
    ) -> None:
        self.graph, self._before, self._scope = graph, before, scope
        self._metadata = dict(module_of.metadata_props) if module_of is not None else {}
        self._count: dict[str, int] = {}

    def add(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Any] | None = None,
        outputs: int = 1,
        domain: str = "",
    ) -> Sequence[ir.Value]:
        """Inserts a node and returns its outputs; an input of None is an optional input that is left out."""
        self._count[op_type] = number = self._count.get(op_type, 0) + 1
        name = f"{self._scope}/{op_type}" + (f"_{number}" if number > 1 else "") if self._scope else None
        node = ir.node(op_type, inputs, attributes, domain=domain, num_outputs=outputs, name=name)
        node.metadata_props.update(self._metadata)
        for index, value in enumerate(node.outputs):
            value.name = f"{name}:{index}" if name else None
        if self._before is None:
            self.graph.append(node)
        else:
            self.graph.insert_before(self._before, node)
        return node.outputs

    def one(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Any] | None = None,
        domain: str = "",
    ) -> ir.Value:
        """Inserts a node with one output and returns it; an input of None is an optional input that is left out."""
        return self.add(op_type, inputs, attributes, domain=domain)[0]


def constant(graph: ir.Graph, name: str, content: Array) -> ir.Value:
    if name not in graph.initializers:
        tensor = ir.tensor(content, name=name)
        graph.initializers[name] = ir.val(name, tensor.dtype, content.shape, const_value=tensor)
    return graph.initializers[name]


def integers(graph: ir.Graph, *numbers: int) -> ir.Value:
    """An int64 constant `[len(numbers)]`, named after its content."""
    return constant(graph, "int64_" + "_".join(map(str, numbers)), np.array(numbers, dtype=np.int64))


def scalar(graph: ir.Graph, number: float) -> ir.Value:
    """A float32 constant of rank 0, named after its content."""
    return constant(graph, f"float32_{float(np.float32(number))!r}", np.array(number, dtype=np.float32))


def replace_value(old: ir.Value, new: ir.Value) -> None:
    """Gives all uses of `old`, a graph output included, to `new`, with its name, shape and type."""
    new.name, new.shape, new.type = old.name, old.shape, old.type
    old.name = None
    old.replace_all_uses_with(new, replace_graph_outputs=True)


def replace_uses(uses: Iterable[tuple[ir.Node, int]], new: ir.Value) -> None:
    for node, index in uses:
        node.replace_input_with(index, new)


def remove_unused(model: ir.Model) -> None:
    """Removes nodes that nothing reads, and sorts the others after their inputs, in place."""
    RemoveUnusedNodesPass()(model)
    model.graph.sort()


def producer(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """The node that computes a value if it is one of these operators (of any operator if none is given)."""
    node = value.producer() if value is not None else None
    return node if node is not None and (not op_types or node.op_type in op_types) else None


def number_of(value: ir.Value | None) -> float | None:
    """The number of a constant with one element; None for any other value."""
    tensor = value.const_value if value is not None else None
    return float(tensor.numpy().ravel()[0]) if tensor is not None and tensor.size == 1 else None


def rank(value: ir.Value | None) -> int:
    """Number of axes; 0 if unknown."""
    return 0 if value is None or value.shape is None else len(value.shape)


def value_named(values: Iterable[ir.Value], name: str) -> ir.Value | None:
    return next((value for value in values if value.name == name), None)


def ancestors(value: ir.Value) -> Iterator[ir.Value]:
    seen: set[ir.Value] = set()
    waiting = [value]
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        yield current
        if (node := current.producer()) is not None:
            waiting.extend(source for source in node.inputs if source is not None)
