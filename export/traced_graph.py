"""TracedGraph: the result of a trace, an ONNX model whose weights are graph inputs."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir

from llmconv.export.graph_spec import GraphSpec

SCOPES = "pkg.torch.onnx.name_scopes"


@dataclass
class TracedGraph:
    """A traced model.

    Attributes:
        model: the ONNX model; its inputs are those of the input map, then the weights by parameter name.
        weights: the weight inputs by parameter name.
        layers_name: name of the list of layers, such as `model.layers`.
        tied: parameter name to the name of the parameter that it shares memory with.
        base_prefix: name of the inner model (`transformer`), which tensor names of some checkpoints lack.
        transforms: transformers' conversion mapping (`llmconv.export.weights.parameter_sources`).
        unused: shapes of parameters and buffers that no node reads, by name.
        token_axes: the symbols of batch size and sequence length in the trace.
        spec: how the cache is kept, and which axes are fixed.
        ignored: patterns of the names of stored tensors that the model ignores.
        own: prefixes of the names of the checkpoint's tensors that belong to the graph.
    """

    model: ir.Model
    weights: dict[str, ir.Value]
    layers_name: str
    num_layers: int
    tied: dict[str, str]
    base_prefix: str
    transforms: list[Any]
    unused: dict[str, tuple[int, ...]]
    token_axes: tuple[str, ...]
    spec: GraphSpec
    ignored: tuple[str, ...] = ()
    own: tuple[str, ...] = ("",)

    def copy(self) -> TracedGraph:
        """The same graph with a model of its own; only before it is bound."""
        model = self.model.clone()
        inputs = {value.name: value for value in model.graph.inputs}
        return replace(self, model=model, weights={name: inputs[value.name] for name, value in self.weights.items()})


def scopes(node: ir.Node) -> list[str]:
    """Names of the modules around a node, outermost first, in the style of parameters (`model.layers.0.mlp`)."""
    text = node.metadata_props.get(SCOPES)
    names = ast.literal_eval(text)[:-1] if text else []
    return [name.removeprefix("model").removeprefix(".") for name in names]


def static_shape(value: ir.Value | None) -> tuple[int, ...]:
    """The shape of a weight, which has no dynamic axes."""
    assert value is not None and value.shape is not None
    return tuple(int(size) for size in value.shape)  # type: ignore[arg-type]
