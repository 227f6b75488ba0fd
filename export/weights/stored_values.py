"""Graph values of stored tensors: initializers over their bytes, and nodes that join or cut them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import onnx_ir as ir

from llmconv.export.node_editor import NodeEditor, integers, replace_uses
from llmconv.export.weights.parameter_sources import (
    AxisSlice,
    Concatenation,
    StoredRows,
    Transposition,
    WeightSource,
    leaves,
)
from llmconv.files.safetensors_file import FileTensor
from llmconv.tensors import LazyTensor

ONNX_TYPES = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
}
CODE_TYPES = {"uint8": ir.DataType.UINT8, "int8": ir.DataType.INT8, "int32": ir.DataType.INT32}
"""Of codes, and of the order of columns."""
NAMES = {dtype: name for name, dtype in ONNX_TYPES.items()}


class StoredValues:
    """Creates the graph values of stored tensors, each once per dtype.

    Values are rounded to the dtypes of `rounded`, by name of the tensor, before they are used.
    """

    def __init__(self, graph: ir.Graph, tensors: Mapping[str, FileTensor], rounded: Mapping[str, LazyTensor]) -> None:
        self._graph, self._tensors, self._rounded = graph, tensors, rounded
        self._values: dict[tuple[WeightSource, ir.DataType], ir.Value] = {}

    def value(self, expression: WeightSource, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
        """The value of an expression in a dtype."""
        key = expression, dtype
        if key not in self._values:
            if isinstance(expression, StoredRows):
                self._values[key] = self._rows(expression, dtype)
            else:
                self._values[key] = self._computed(expression, dtype)
        return self._values[key]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a stored tensor."""
        return self._tensors[name].shape

    def stored(self, rows: StoredRows, shape: tuple[int, ...] | None = None) -> ir.Value:
        """An initializer over the bytes of these rows, named after the tensor; `shape` may differ from theirs."""
        tensor = self._tensors[rows.name]
        dtype = {**CODE_TYPES, **ONNX_TYPES}[tensor.dtype.name]
        row = tensor.nbytes // max(1, tensor.shape[0]) if tensor.shape else tensor.nbytes
        length = tensor.nbytes if rows.is_whole else row * rows.count
        place = (tensor.location, tensor.offset + row * rows.first, length)
        label = rows.label if shape in (None, rows.shape) else f"{rows.label}:{'x'.join(map(str, shape or ()))}"
        if label not in self._graph.initializers:
            content = ir.ExternalTensor(*place, dtype, shape=ir.Shape(shape or rows.shape), name=label)
            self._graph.initializers[label] = ir.val(label, dtype, shape or rows.shape, const_value=content)
        return self._graph.initializers[label]

    def look_up(self, node: ir.Node, rows: StoredRows, dtype: ir.DataType) -> None:
        """Makes a Gather read stored rows, and casts what it finds: runtimes would keep a whole table in `dtype`."""
        uses, last = tuple(node.outputs[0].uses()), node
        node.replace_input_with(0, self.stored(rows))
        for kind in self._dtypes(rows, dtype):
            cast = ir.node("Cast", [last.outputs[0]], {"to": kind}, name=f"{node.name}_{NAMES[kind]}")  # in its module
            cast.outputs[0].name = f"{cast.name}:0"
            cast.metadata_props.update(node.metadata_props)
            self._graph.insert_after(last, cast)
            last = cast
        replace_uses(uses, last.outputs[0])

    def _rows(self, rows: StoredRows, wanted: ir.DataType) -> ir.Value:
        """The initializer of these rows, cast to the wanted dtype."""
        value = self.stored(rows)
        for dtype in self._dtypes(rows, wanted):
            value = self._node(
                "Cast", [value], {"to": dtype}, rows.label if dtype == wanted else f"{rows.label}/rounded"
            )
            value.name = f"{rows.label}:{NAMES[dtype]}" if dtype == wanted else value.name
        return value

    def _dtypes(self, rows: StoredRows, wanted: ir.DataType) -> list[ir.DataType]:
        """The dtypes that stored values are cast to, one after the other."""
        stored, rounded = (ONNX_TYPES[tensors[rows.name].dtype.name] for tensors in (self._tensors, self._rounded))
        steps = [wanted] if rounded == ir.DataType.FLOAT else [rounded, wanted]
        return [after for before, after in pairwise([stored, *steps]) if before != after]

    def _computed(self, made: WeightSource, dtype: ir.DataType) -> ir.Value:
        """Nodes that a runtime evaluates once, when it loads the graph."""
        name = f"{next(iter(leaves(made))).label}.{len(self._values)}"
        if isinstance(made, Concatenation):
            parts = [self.value(part, dtype) for part in made.parts]
            if made.stack:
                axis = integers(self._graph, made.axis)
                parts = [self._node("Unsqueeze", [part, axis], {}, f"{name}.{i}") for i, part in enumerate(parts)]
            return self._node("Concat", parts, {"axis": made.axis}, name)
        assert not isinstance(made, StoredRows)
        whole = self.value(made.whole, dtype)
        if isinstance(made, AxisSlice):
            ends = [integers(self._graph, size) for size in (made.first, made.first + made.count, made.axis)]
            return self._node("Slice", [whole, *ends], {}, name)
        if isinstance(made, Transposition):
            order = list(range(len(made.shape)))
            a, b = made.axes
            order[a], order[b] = b, a
            return self._node("Transpose", [whole], {"perm": order}, name)
        bounds = [[integers(self._graph, number) for number in (start, 1 << 62, made.axis, 2)] for start in (0, 1)]
        halves = [self._node("Slice", [whole, *ends], {}, f"{name}.{i}") for i, ends in enumerate(bounds)]
        return self._node("Concat", halves, {"axis": made.axis}, name)

    def _node(self, op_type: str, inputs: Sequence[ir.Value], attributes: dict[str, Any], scope: str) -> ir.Value:
        return NodeEditor(self._graph, self._graph[0], scope).one(op_type, inputs, attributes)
