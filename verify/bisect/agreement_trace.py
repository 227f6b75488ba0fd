"""AgreementTrace: which values of a graph agree with the model, and the nodes between the last that do and the first that fails.

A value agrees when the eager model computes the same in the same module. Exporters write some steps differently, so a
value may agree with none; but where what is made of it agrees, it was right too. What is left leads from the output
that failed back to the fault.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import onnx

from llmconv.tensors import Array
from llmconv.verify.bisect.agreement import ValueComparison
from llmconv.verify.bisect.module_scopes import ANYWHERE, ModuleScopes
from llmconv.verify.bisect.recording import RecordedValue
from llmconv.verify.comparison.graph_probe import inner_inputs

LAYOUT_OPS = {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Identity", "Flatten", "Expand"}
"""They move values and change none."""

ARITHMETIC = {"Identity": "^$", "Add": "add|sub", "Sub": "add|sub", "Mul": "mul|div", "Div": "mul|div"}
"""Operators that stay where a term or a factor is gone, and the operators of the records that they may agree with."""

CHOICES = {"Where": "where|masked_fill", "Clip": "clamp|clip", "Min": "min|clamp", "Max": "max|clamp"}
"""The same for operators that may leave every element as it is."""

SKIP_NORMS = {"SkipLayerNormalization", "SkipSimplifiedLayerNormalization"}
"""Norms that first add the last term, a sum of another module, which is their last output."""

REDUCTIONS = {"ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2", "ArgMax"}
"""What they give may be right where what they read is not: the mean of small numbers is lost beside an epsilon."""

SHAPE_OPS = {"Shape", "Size", "Constant", "ConstantOfShape"}
TAKES_SHAPE = {"Reshape", "Expand", "ConstantOfShape", "Unsqueeze", "Squeeze", "Slice", "Split", "Tile"}
"""Their other inputs than the first say how, not what."""


class GraphIndex:
    """A graph's nodes by what they make and read.

    Attributes:
        nodes: in the graph's order, which makes every value before it is used.
        maker: the node of every value that a node makes.
        users: the nodes that read a value.
        outputs: of the graph.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.nodes = list(model.graph.node)
        self.order = {id(node): index for index, node in enumerate(self.nodes)}
        self.maker = {name: node for node in self.nodes for name in node.output if name}
        self.users: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in self.nodes:
            for name in dict.fromkeys(inner_inputs(node)):
                self.users[name].append(node)
        self.outputs = {port.name for port in model.graph.output}
        self._shapes = self._shape_nodes()

    def _shape_nodes(self) -> set[int]:
        """Nodes whose values only say how others are laid out."""
        found: set[int] = set()
        for node in reversed(self.nodes):
            used = [(name, user) for name in node.output for user in self.users[name]]
            laid_out = all(id(user) in found or _is_shape_input(user, name) for name, user in used)
            if used and laid_out and not self.outputs & set(node.output):
                found.add(id(node))
        return found

    def is_shape(self, node: onnx.NodeProto) -> bool:
        """Whether a node only says how others are laid out."""
        return id(node) in self._shapes or node.op_type in SHAPE_OPS

    def before(self, value: str, known: Iterable[str]) -> list[onnx.NodeProto]:
        """The nodes that make a value out of what is known, in order."""
        stop, found, waiting = set(known), {}, [value]
        while waiting:
            node = self.maker.get(waiting.pop())
            if node is not None and id(node) not in found:
                found[id(node)] = node
                waiting += [name for name in inner_inputs(node) if name and name not in stop]
        return sorted(found.values(), key=lambda node: self.order[id(node)])


def _is_shape_input(node: onnx.NodeProto, name: str) -> bool:
    """Whether a node reads the value as a shape, an axis or a bound."""
    return node.op_type in SHAPE_OPS or (node.op_type in TAKES_SHAPE and name not in node.input[:1])


class AgreementTrace:
    """Tells the values that agree from those that do not.

    Args:
        index: of the graph.
        scopes: finds the module of a node.
        values: of the graph, probe.
        records: of the eager model.
        comparison: of one value with another.
        trusted: values that need no comparison.
        changing: operators that agree with a record of the same kind only where they leave a value as it is.
    """

    def __init__(
        self,
        index: GraphIndex,
        scopes: ModuleScopes,
        values: Mapping[str, Array],
        records: Sequence[RecordedValue],
        comparison: ValueComparison,
        trusted: Iterable[str],
        changing: Mapping[str, str] = ARITHMETIC,
    ) -> None:
        self.index, self.scopes, self.values, self.comparison = index, scopes, values, comparison
        self.changing = changing
        self.ports = [record for record in records if record.is_port]
        self.by_place: dict[tuple[str, int], list[RecordedValue]] = defaultdict(list)
        for record in records:
            if not record.is_port:
                self.by_place[record.scope, record.exact.size].append(record)
                self.by_place[ANYWHERE, record.exact.size].append(record)
        self.matched = {name for name in values if name in index.maker and self._agrees(name)}
        self.good = self._good(trusted)

    def places(self, value: str) -> list[RecordedValue]:
        """The records of the value's module that have as many elements."""
        node = self.index.maker.get(value)
        if node is None or value not in self.values:
            return []
        size = self.values[value].size
        if node.op_type in SKIP_NORMS and value != node.output[0]:
            return [record for record in self.by_place[ANYWHERE, size] if "add" in record.op]
        return self.by_place[self.scopes.of(node), size]

    def _agrees(self, value: str) -> bool:
        array, node = self.values[value], self.index.maker[value]
        if array.dtype.kind != "f" and self.scopes.of(node) == ANYWHERE:
            return False  # small integers agree with something by chance
        records = self.places(value)
        if node.op_type in self.changing and any(self._is_same(name, array) for name in node.input):
            # Nothing was done: what agrees may be what was read, in place of what was to be made of it.
            records = [record for record in records if re.search(self.changing[node.op_type], record.op)]
        return any(self.comparison.agrees(record, array) for record in records)

    def _is_same(self, name: str, array: Array) -> bool:
        other = self.values.get(name)
        return other is not None and other.size == array.size and bool((other.ravel() == array.ravel()).all())

    def _good(self, trusted: Iterable[str]) -> set[str]:
        """Values that agree, and those that something was made of that agrees."""
        good = self.matched | set(trusted)
        for node in reversed(self.index.nodes):
            is_conclusive = not self.index.is_shape(node) and node.op_type not in REDUCTIONS
            if is_conclusive and good.intersection(node.output):
                good.update(name for name in inner_inputs(node) if name in self.index.maker)
        shapes = (node for node in self.index.nodes if self.index.is_shape(node))
        return (good | {name for node in shapes for name in node.output}) - {""}

    def scope(self, node: onnx.NodeProto) -> str:
        """The module of a node; of one that is named after none, that of what reads it."""
        for _ in range(len(self.index.nodes)):
            scope = self.scopes.of(node)
            users = [user for name in node.output for user in self.index.users[name]]
            if scope != ANYWHERE or not users:
                break
            node = users[0]
        return "" if scope == ANYWHERE else scope

    def back_from(self, value: str) -> list[onnx.NodeProto]:
        """The nodes between the last values that agree and this one, in order; none where it agrees itself."""
        return [] if value in self.good else self.index.before(value, self.good)
