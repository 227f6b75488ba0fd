"""Initializers -> bytes in the safetensors files: a graph maps the weights where they lie and copies none.

An ONNX initializer may point at any byte range of a file beside the graph (`location`, `offset`, `length`), and the
data of a safetensors file are raw little-endian rows. Weights stored in half precision are cast inside the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import onnx_ir as ir

from llmconv.errors import InputRefused
from llmconv.export.experts import expand_experts
from llmconv.export.gemm import static_shape
from llmconv.export.stored import Expression, Joined, Rows, Sliced, Swapped, expressions, leaves
from llmconv.export.trace import TracedGraph
from llmconv.safetensors_io import FileTensor
from llmconv.tensors import LazyTensor

ONNX_TYPES = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
}

BUFFERS = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias", "attention.rope.freqs")
"""Tensors older checkpoints hold although the model computes them; a graph does not need them."""


def match_weights(traced: TracedGraph, tensors: Mapping[str, LazyTensor]) -> dict[str, Expression]:
    """What each weight of the graph is made of, by parameter name (tied parameters share one).

    Raises:
        InputRefused: a weight has no tensor or another shape, or a tensor belongs to no weight.
    """
    shapes = {name: static_shape(value) for name, value in traced.weights.items()}
    wanted = {**shapes, **{tied: shapes[name] for name, tied in traced.tied.items() if name in shapes}}
    stored = {name: tensor.shape for name, tensor in tensors.items()}
    found = expressions({**wanted, **traced.unused}, stored, traced.transforms, traced.base_prefix)
    matches = {name: _require(name, found, traced) for name in traced.weights}
    for name, expression in matches.items():
        _require_shape(name, expression, shapes[name])
        for source in leaves(expression):
            _require_dtype(source.name, tensors[source.name])
    known = {leaf.name for expression in found.values() for leaf in leaves(expression)}
    _require_all_used(tensors, known)
    return matches


def bind(traced: TracedGraph, tensors: Mapping[str, FileTensor]) -> int:
    """Points every weight input of the graph at its tensor; returns how many bytes are mapped.

    Args:
        traced: the graph; its weight inputs become initializers.
        tensors: the checkpoint's tensors by name, in files that will lie beside the graph.

    Raises:
        InputRefused: see `match_weights`.
    """
    graph = traced.model.graph
    matches = match_weights(traced, tensors)
    reader = _Reader(graph, tensors)
    expand_experts(traced.model, {traced.weights[name]: made for name, made in matches.items()}, reader.value)
    for name, expression in matches.items():
        if traced.weights[name].uses():
            traced.weights[name].replace_all_uses_with(reader.value(expression))
    weights = set(traced.weights.values())
    inputs = [value for value in graph.inputs if value not in weights]
    graph.inputs.clear()
    graph.inputs.extend(inputs)
    graph.sort()
    return reader.mapped


def _require(name: str, found: Mapping[str, Expression], traced: TracedGraph) -> Expression:
    """What a parameter is made of: first the one it is tied to, then its own."""
    for spelling in (traced.tied.get(name), name):
        if spelling in found:
            return found[spelling]
    raise InputRefused(
        f"the weights lack `{name}`",
        hint="the folder does not hold the model its `config.json` describes; convert it again",
    )


def _require_shape(name: str, expression: Expression, expected: tuple[int, ...]) -> None:
    if expression.shape != expected:
        stored = next(iter(leaves(expression))).name
        raise InputRefused(
            f"`{stored}` gives `{name}` the shape {list(expression.shape)}, `config.json` implies {list(expected)}",
            hint="the weights and the config are of different models",
        )


def _require_dtype(name: str, tensor: LazyTensor) -> None:
    if tensor.dtype.name not in ONNX_TYPES:
        _refuse_dtype(name, tensor)


def _refuse_dtype(name: str, tensor: LazyTensor) -> NoReturn:
    raise InputRefused(
        f"`{name}` is stored as {tensor.dtype.name}",
        hint=f"store it as one of {', '.join(ONNX_TYPES)}: `--dtype float32 -o OUT`",
    )


class _Reader:
    """The values that the graph reads of stored tensors; each is made once."""

    def __init__(self, graph: ir.Graph, tensors: Mapping[str, FileTensor]) -> None:
        self._graph, self._tensors = graph, tensors
        self._values: dict[Expression, ir.Value] = {}
        self.mapped = 0

    def value(self, expression: Expression) -> ir.Value:
        """The float32 value of an expression."""
        if expression not in self._values:
            self._values[expression] = (
                self._rows(expression) if isinstance(expression, Rows) else self._made(expression)
            )
        return self._values[expression]

    def _rows(self, rows: Rows) -> ir.Value:
        """An initializer over the bytes of these rows, named after the tensor; cast where it is half precision."""
        tensor = self._tensors[rows.name]
        dtype = ONNX_TYPES[tensor.dtype.name]
        row = tensor.nbytes // max(1, tensor.shape[0]) if tensor.shape else tensor.nbytes
        length = tensor.nbytes if rows.is_whole else row * rows.count
        place = (tensor.path.name, tensor.offset + row * rows.first, length)
        stored = ir.Value(name=rows.label, shape=ir.Shape(rows.shape), type=ir.TensorType(dtype))
        stored.const_value = ir.ExternalTensor(*place, dtype, shape=ir.Shape(rows.shape), name=rows.label)
        self._graph.initializers[rows.label] = stored
        self.mapped += length
        if dtype == ir.DataType.FLOAT:
            return stored
        return self._node("Cast", [stored], {"to": ir.DataType.FLOAT}, rows.label, f"{rows.label}:float32")

    def _made(self, made: Expression) -> ir.Value:
        """Nodes that a runtime computes once, when it loads the graph."""
        name = f"{next(iter(leaves(made))).label}.{len(self._values)}"
        if isinstance(made, Joined):
            parts = [self.value(part) for part in made.parts]
            if made.stack:
                parts = [
                    self._node("Unsqueeze", [part, self._ints(made.axis)], {}, f"{name}.{i}")
                    for i, part in enumerate(parts)
                ]
            return self._node("Concat", parts, {"axis": made.axis}, name)
        whole = self.value(made.whole)
        if isinstance(made, Sliced):
            ends = [self._ints(size) for size in (made.first, made.first + made.count, made.axis)]
            return self._node("Slice", [whole, *ends], {}, name)
        if isinstance(made, Swapped):
            order = list(range(len(made.shape)))
            a, b = made.axes
            order[a], order[b] = b, a
            return self._node("Transpose", [whole], {"perm": order}, name)
        bounds = [[self._ints(number) for number in (start, 1 << 62, made.axis, 2)] for start in (0, 1)]
        halves = [self._node("Slice", [whole, *ends], {}, f"{name}.{i}") for i, ends in enumerate(bounds)]
        return self._node("Concat", halves, {"axis": made.axis}, name)

    def _ints(self, *numbers: int) -> ir.Value:
        name = "ints_" + "_".join(map(str, numbers))
        if name not in self._graph.initializers:
            tensor = ir.tensor(np.array(numbers, dtype=np.int64), name=name)
            value = ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), const_value=tensor)
            self._graph.initializers[name] = value
        return self._graph.initializers[name]

    def _node(
        self, op_type: str, inputs: Sequence[ir.Value], attributes: dict[str, Any], name: str, output: str = ""
    ) -> ir.Value:
        node = ir.node(op_type, inputs, attributes=attributes, name=f"{name}/{op_type}")
        self._graph.insert_before(self._graph[0], node)
        node.outputs[0].name = output or f"{node.name}:0"
        return node.outputs[0]


def _require_all_used(tensors: Iterable[str], used: set[str]) -> None:
    left = [name for name in tensors if name not in used and not name.endswith(BUFFERS)]
    if left:
        listed = ", ".join(f"`{name}`" for name in left[:5])
        raise InputRefused(
            f"{len(left)} tensors of the checkpoint belong to no weight of the model: {listed}",
            hint="`config.json` describes another model, or another number of layers",
        )
