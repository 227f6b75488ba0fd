"""Adding nodes and constants to a graph whose values have their names already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from llmconv.tensors import Array


def constant(graph: ir.Graph, name: str, content: Array) -> ir.Value:
    """The inline initializer `name`, made once."""
    if name not in graph.initializers:
        tensor = ir.tensor(content, name=name)
        value = ir.Value(name=name, shape=ir.Shape(content.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
        graph.initializers[name] = value
    return graph.initializers[name]


def integers(graph: ir.Graph, *numbers: int) -> ir.Value:
    """An int64 constant `[len(numbers)]`, named after its content."""
    return constant(graph, "int64_" + "_".join(map(str, numbers)), np.array(numbers, dtype=np.int64))


def scalar(graph: ir.Graph, number: float) -> ir.Value:
    """A float32 constant of rank 0, named after its content."""
    return constant(graph, f"float32_{float(np.float32(number))!r}", np.array(number, dtype=np.float32))


class Editor:
    """Inserts nodes called `{scope}/{operator}` before one node of a graph, or at its end."""

    def __init__(self, graph: ir.Graph, scope: str, before: ir.Node | None = None) -> None:
        self.graph, self._scope, self._before = graph, scope, before
        self._count: dict[str, int] = {}

    def add(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Any] | None = None,
        outputs: int = 1,
    ) -> tuple[ir.Value, ...]:
        """A node with several outputs."""
        self._count[op_type] = number = self._count.get(op_type, 0) + 1
        name = f"{self._scope}/{op_type}" + (f"_{number}" if number > 1 else "")
        node = ir.node(op_type, inputs, attributes=dict(attributes or {}), num_outputs=outputs, name=name)
        for index, value in enumerate(node.outputs):
            value.name = f"{name}:{index}"
        if self._before is None:
            self.graph.append(node)
        else:
            self.graph.insert_before(self._before, node)
        return tuple(node.outputs)

    def one(
        self, op_type: str, inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any] | None = None
    ) -> ir.Value:
        """A node with one output."""
        return self.add(op_type, inputs, attributes)[0]


def input_named(graph: ir.Graph, name: str) -> ir.Value | None:
    """The graph's input of that name."""
    return next((value for value in graph.inputs if value.name == name), None)


def output_named(graph: ir.Graph, name: str) -> ir.Value | None:
    """The graph's output of that name."""
    return next((value for value in graph.outputs if value.name == name), None)


def cone(value: ir.Value) -> Iterator[ir.Value]:
    """The value and everything that it is made of, each once."""
    seen: set[ir.Value] = set()
    waiting = [value]
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        yield current
        producer = current.producer()
        if producer is not None:
            waiting.extend(source for source in producer.inputs if source is not None)
