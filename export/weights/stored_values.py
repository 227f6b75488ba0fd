"""The values that a graph reads of stored tensors: initializers over their bytes, nodes where they are joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from llmconv.export.weights.parameter_sources import Expression, Joined, Rows, Sliced, Swapped, leaves
from llmconv.files.safetensors_file import FileTensor

ONNX_TYPES = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
}


class StoredValues:
    """The values that the graph reads of stored tensors; each is made once."""

    def __init__(self, graph: ir.Graph, tensors: Mapping[str, FileTensor]) -> None:
        self._graph, self._tensors = graph, tensors
        self._values: dict[Expression, ir.Value] = {}

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
        if dtype == ir.DataType.FLOAT:
            return stored
        return self._node("Cast", [stored], {"to": ir.DataType.FLOAT}, rows.label, f"{rows.label}:float32")

    def _made(self, made: Expression) -> ir.Value:
        """Nodes that a runtime computes once, when it loads the graph."""
        name = f"{next(iter(leaves(made))).label}.{len(self._values)}"
        if isinstance(made, Joined):
            parts = [self.value(part) for part in made.parts]
            if made.stack:
                axis = self._ints(made.axis)
                parts = [self._node("Unsqueeze", [part, axis], {}, f"{name}.{i}") for i, part in enumerate(parts)]
            return self._node("Concat", parts, {"axis": made.axis}, name)
        assert not isinstance(made, Rows)
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
