"""GraphWalk: derives node by node the values that depend on the call only, and finds the nodes that decide by them.

A graph computes its masks, positions and shapes from lengths, token ids and the mask, in a few dozen nodes without
weights. Sums and layout changes decide nothing. Nodes that compare, round, clip, look up or cut do decide, and must do
so by numbers of the model.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import numpy_helper

from llmconv.verify.audit.decisions.affine_forms import MASK, AffineForm, ValueKind, atom
from llmconv.verify.audit.decisions.axes import follow_axes
from llmconv.verify.audit.decisions.config_numbers import ConfigNumbers
from llmconv.verify.audit.decisions.derived_values import DerivedValues
from llmconv.verify.audit.decisions.judge import DecisionJudge
from llmconv.verify.audit.decisions.lookups import Lookups
from llmconv.verify.audit.decisions.operators import HALVES, RANDOM, attribute
from llmconv.verify.audit.decisions.state import WalkState
from llmconv.verify.audit.decisions.value_kinds import ConstantValue, InputValue, ModelValue, Value, forms_of

SMALL = 1 << 12
"""Maximum number of elements of a constant in a graph that may contain its weights."""


class GraphWalk:
    """Visits the nodes of a graph in order.

    Args:
        numbers: the numbers of the model.
        state: the initial state.
    """

    def __init__(self, numbers: ConfigNumbers, state: WalkState) -> None:
        self.state, self.judge = state, DecisionJudge(numbers)
        self._lookups, self._results = Lookups(self.state, self.judge), DerivedValues(self.state, self.judge)

    def run(self, graph: onnx.GraphProto, given: Mapping[str, Value] | None = None) -> None:
        """Visits all nodes of a graph; `given` are known values of its inputs."""
        values = self.state.values
        for port in graph.input:
            source = self.state.ports.get(port.name)
            values[port.name] = InputValue(_given(port.name, source)) if source else ModelValue()
        values |= given or {}
        for node in graph.node:
            for name in node.input:
                self.state.readers.setdefault(name, []).append(node)
        for tensor in graph.initializer:
            values[tensor.name] = self._held(tensor)
            self.state.weights |= {tensor.name} if tensor.external_data else set()
        for node in graph.node:
            self._see(node)

    def _held(self, tensor: onnx.TensorProto) -> Value:
        """A constant or a weight; if both are inline, by size."""
        if tensor.external_data or (not self.state.tables and np.prod(tensor.dims, dtype=np.int64) > SMALL):
            return ModelValue()
        return ConstantValue(numpy_helper.to_array(tensor))

    def _see(self, node: onnx.NodeProto) -> None:
        value = self._value(node, self.state.inputs(node))
        self.state.values |= dict.fromkeys(node.output, value)
        follow_axes(self.state, node)
        self.state.note_binary(node)
        if isinstance(value, ModelValue) and self.state.is_of_weights(node):
            self.state.weights |= set(node.output)
            if not _is_widened(node) or node.input[0] in self.state.changed:
                self.state.changed |= set(node.output)

    def _value(self, node: onnx.NodeProto, inputs: list[Value | None]) -> Value:
        if node.op_type in ("Shape", "Size"):
            return self._results.lengths(node)
        if node.op_type == "Constant":
            return _constant(node)
        if node.op_type in RANDOM or (node.op_type == "Dropout" and len(inputs) > 2 and inputs[2] is not None):
            self.judge.flag(node, f"{node.op_type} gives different results in each run")
            return ModelValue()
        given = [value for value in inputs if value is not None]
        self._lookups.at_bounds(node, inputs)
        self._lookups.at_index(node, inputs)
        self._lookups.at_window(node)
        if any(one.HasField("g") for one in node.attribute):
            return self._inner(node, given)
        if node.op_type == "Range":
            return self._results.counted(node, inputs)
        if any(isinstance(value, ModelValue) for value in given):
            self._lookups.at_data(node, inputs)
            return ModelValue()
        if all(isinstance(value, ConstantValue) for value in given):
            return self._results.folded(node, given)
        return self._results.of_call(node, given)

    def _inner(self, node: onnx.NodeProto, given: list[Value]) -> Value:
        """If, Loop and Scan, whose subgraphs can read the values around them.

        A model's scans go over model values only. Values that branches or loops derive from the call are not analyzed.
        """
        graphs = [one.g for one in node.attribute if one.HasField("g")]
        text = f"{node.op_type} of a value that is not analyzed"
        if node.op_type != "Scan" or not all(isinstance(value, ModelValue) for value in given) or _counts(graphs):
            self.judge.flag(node, text, certain=False)
        if node.op_type == "If" and not any(isinstance(value, ModelValue) for value in given):
            self.judge.decisions(node, forms_of(given))
        before, axes = dict(self.state.values), dict(self.state.axes)
        for graph in graphs:
            self.run(graph, dict.fromkeys((port.name for port in graph.input), ModelValue()))
            if any(isinstance(self.state.values.get(name), InputValue) for one in graph.node for name in one.input):
                self.judge.flag(node, text, certain=False)
        self.state.values, self.state.axes = before, axes
        return ModelValue()


def _counts(graphs: list[onnx.GraphProto]) -> bool:
    """Whether a scan passes values other than floating-point numbers from step to step."""
    floats = {*HALVES, onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE}
    return any(port.type.tensor_type.elem_type not in floats for graph in graphs for port in graph.input)


def _is_widened(node: onnx.NodeProto) -> bool:
    """Whether a node only casts to float32, as graphs do with weights in half precision."""
    return node.op_type == "Cast" and attribute(node, "to", 0) == onnx.TensorProto.FLOAT


def _given(name: str, source: str) -> AffineForm:
    """The form of an input of the graph; a mask is 0 or 1."""
    return atom(name, source, kind=ValueKind.BINARY if source == MASK else ValueKind.COUNT)


def _constant(node: onnx.NodeProto) -> Value:
    value = node.attribute[0]
    if value.name == "value":
        return ModelValue() if value.t.external_data else ConstantValue(numpy_helper.to_array(value.t))
    return ConstantValue(np.asarray(onnx.helper.get_attribute_value(value)))
