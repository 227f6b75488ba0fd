"""Which inner values of a graph agree with the eager model, and the smallest failing piece before a wrong one.

A value agrees if the eager model computes the same value, within its rounding noise, in the same module. Exporters
write some steps differently, so a correct value may have no counterpart; it counts as correct if a value computed from
it agrees. If all later values agree once a value is replaced by the model's, the fault is before that value: the first
that repairs the result is the end of the failing piece, and the last values that agree are its start.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import onnx
import torch

from llmconv.runtime.onnxruntime.guard import values_read_by
from llmconv.tensors import Array
from llmconv.verify.bisect.replay import (
    ANYWHERE,
    IN,
    OUT,
    ModuleScopes,
    RecordedValue,
    ReplayedCall,
    inside,
    rounded_to,
)
from llmconv.verify.comparison.candidates import GraphProbe
from llmconv.verify.results import Check, Where
from llmconv.verify.scenarios.calls import Call
from llmconv.verify.sigma import GATES, Measure, NoiseFloor, measure

HIDDEN = -1e30  # masks add numbers below this to hidden scores, in every dtype
ROW = 8  # minimum number of features of a row; a value with a shorter last axis is a single row


class ValueComparison:
    """Compares values of one call, whose mask has the padding, within the rounding noise of the numpy `dtype`.

    `virtual` is the number of prefix tokens before the cache.
    """

    def __init__(self, dtype: str, call: Call, virtual: int = 0) -> None:
        self._floor, self._gates = NoiseFloor(dtype), GATES[dtype]
        self._new = call.valid
        self._all = np.pad(call.attention_mask == 1, ((0, 0), (virtual, 0)), constant_values=True)

    def agrees(self, record: RecordedValue, value: Array) -> bool:
        """Whether a value equals the record up to rounding; the order of elements matters, the shape does not."""
        if value.size != record.exact.size:
            return False
        if record.exact.dtype.kind != "f" or value.dtype.kind != "f":
            return self._same(record, value)
        found = self.measure(record, value)
        return found is not None and found.passes(self._gates)

    def measure(self, record: RecordedValue, value: Array) -> Measure | None:
        """The error of a float value of as many elements as the record; None if the two mask different elements."""
        arrays = (record.exact, record.rounded, value.reshape(record.exact.shape))
        hidden = [array < HIDDEN for array in arrays]
        if not (np.array_equal(hidden[0], hidden[1]) and np.array_equal(hidden[0], hidden[2])):
            return None
        counts = self.counted(record)
        exact, rounded, found = (_rows(np.where(counts, array, 0)) for array in arrays)
        valid = np.asarray(_rows(counts).any(axis=-1))
        truth = self._floor.truth(re.sub(r"\d+", "#", f"{record.scope} {record.op}"), exact, rounded, valid)
        return measure(truth, found)

    def counted(self, record: RecordedValue) -> Array:
        """Which elements of a record are compared (neither padding nor masked), bool of its shape."""
        if record.exact.dtype.kind != "f":
            return self._counts(record.exact.shape, masks=True)
        hidden = record.exact < HIDDEN
        return ~hidden & self._counts(record.exact.shape, masks=bool(hidden.any()))

    def _same(self, record: RecordedValue, value: Array) -> bool:
        counts = self.counted(record)
        found = value.reshape(record.exact.shape)
        return bool(np.array_equal(np.where(counts, found, 0), np.where(counts, record.exact, 0)))

    def _counts(self, shape: tuple[int, ...], masks: bool) -> Array:
        """Which elements are not padding, by the sizes of axes (in a mask, the last too); doubtful ones are padding."""
        batch, tokens = self._new.shape
        counts = np.ones(shape, dtype=bool)
        if self._all.all() or not shape or shape[0] % batch:
            return counts
        if shape[0] == batch * tokens:
            counts &= _along(self._new.reshape(-1), shape, (0,))
        each = shape[0] // batch
        for rows in (self._new, self._all):
            for axis in range(1, len(shape) - masks):
                if shape[axis] == rows.shape[1]:
                    counts &= _along(np.repeat(rows, each, axis=0), shape, (0, axis))
        return counts


def _along(mask: Array, shape: tuple[int, ...], axes: tuple[int, ...]) -> Array:
    """A mask over some axes, reshaped to broadcast to `shape`."""
    return mask.reshape([size if axis in axes else 1 for axis, size in enumerate(shape)])


def _rows(array: Array) -> Array:
    """The array as [1, rows, features]."""
    features = array.shape[-1] if array.ndim and array.shape[-1] >= ROW else array.size
    return array.reshape(1, -1, features)


LAYOUT_OPS = {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Identity", "Flatten", "Expand"}
"""Operators that move elements and change none."""

ARITHMETIC = {"Identity": "^$", "Add": "add|sub", "Sub": "add|sub", "Mul": "mul|div", "Div": "mul|div"}
"""Operators that remain when a term or factor is missing, with a pattern of the model's operators to compare with."""

CHOICES = {"Where": "where|masked_fill", "Clip": "clamp|clip", "Min": "min|clamp", "Max": "max|clamp"}
"""The same for operators that may leave all elements unchanged."""

SKIP_NORMS = {"SkipLayerNormalization", "SkipSimplifiedLayerNormalization"}
"""Norms that first add a residual, which belongs to another module and is their last output."""

REDUCTIONS = {"ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2", "ArgMax"}
"""Operators whose result may agree for a wrong input: the mean of small numbers vanishes next to an epsilon."""

SHAPE_OPS = {"Shape", "Size", "Constant", "ConstantOfShape"}
TAKES_SHAPE = {"Reshape", "Expand", "ConstantOfShape", "Unsqueeze", "Squeeze", "Slice", "Split", "Tile"}
"""Operators whose inputs after the first determine only the layout."""


class GraphIndex:
    """The nodes in topological order, their positions by `id`, and the maker and users of each value."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.nodes = list(model.graph.node)
        self.order = {id(node): index for index, node in enumerate(self.nodes)}
        self.maker = {name: node for node in self.nodes for name in node.output if name}
        self.users: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in self.nodes:
            for name in values_read_by(node):
                self.users[name].append(node)
        self.outputs = {port.name for port in model.graph.output}
        self._shapes = self._shape_nodes()

    def _shape_nodes(self) -> set[int]:
        found: set[int] = set()
        for node in reversed(self.nodes):
            used = [(user, user.op_type, name in user.input[:1]) for name in node.output for user in self.users[name]]
            laid_out = all(
                id(one) in found or op in SHAPE_OPS or (op in TAKES_SHAPE and not data) for one, op, data in used
            )
            if used and laid_out and not self.outputs & set(node.output):
                found.add(id(node))
        return found

    def is_shape(self, node: onnx.NodeProto) -> bool:
        """Whether a node's values are used only as shapes, axes or bounds."""
        return id(node) in self._shapes or node.op_type in SHAPE_OPS

    def before(self, value: str, known: Iterable[str]) -> list[onnx.NodeProto]:
        stop, found, waiting = set(known), {}, [value]
        while waiting:
            node = self.maker.get(waiting.pop())
            if node is not None and id(node) not in found:
                found[id(node)] = node
                waiting += [name for name in values_read_by(node) if name and name not in stop]
        return sorted(found.values(), key=lambda node: self.order[id(node)])


class AgreementTrace:
    """Determines which values of a graph agree with the model: the names of those that do are `matched`.

    The names of correct values are `good`, with the `trusted` ones, which need no comparison.
    """

    def __init__(
        self,
        index: GraphIndex,
        scopes: ModuleScopes,
        values: Mapping[str, Array],
        records: Sequence[RecordedValue],  # values of the eager model
        comparison: ValueComparison,
        trusted: Iterable[str],
        # operators that, where they leave a value unchanged, agree only with a matching operator of the model
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
        """The model's values in the same module with as many elements."""
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
            return False  # small integers agree by chance
        records = self.places(value)
        if node.op_type in self.changing and any(self._is_same(name, array) for name in node.input):
            # the node changed nothing: its input may agree where its output should have
            records = [record for record in records if re.search(self.changing[node.op_type], record.op)]
        return any(self.comparison.agrees(record, array) for record in records)

    def _is_same(self, name: str, array: Array) -> bool:
        other = self.values.get(name)
        return other is not None and other.size == array.size and bool((other.ravel() == array.ravel()).all())

    def _good(self, trusted: Iterable[str]) -> set[str]:
        """Values that agree, and values from which those were computed."""
        good = self.matched | set(trusted)
        for node in reversed(self.index.nodes):
            is_conclusive = not self.index.is_shape(node) and node.op_type not in REDUCTIONS
            if is_conclusive and good.intersection(node.output):
                good.update(name for name in values_read_by(node) if name in self.index.maker)
        shapes = (node for node in self.index.nodes if self.index.is_shape(node))
        return (good | {name for node in shapes for name in node.output}) - {""}

    def scope(self, node: onnx.NodeProto) -> str:
        """The module of a node, or of the first nodes that use it if its name contains none; else empty."""
        for _ in range(len(self.index.nodes)):
            scope = self.scopes.of(node)
            users = [user for name in node.output for user in self.index.users[name]]
            if scope != ANYWHERE or not users:
                break
            node = users[0]
        return "" if scope == ANYWHERE else scope

    def back_from(self, value: str) -> list[onnx.NodeProto]:
        """The nodes between the last correct values and this one, in order; empty if it is correct."""
        return [] if value in self.good else self.index.before(value, self.good)


@dataclass(frozen=True)
class Suspect:
    """A fault to be described; `piece` is None if every node is correct."""

    replay: ReplayedCall
    where: Where
    checks: Sequence[Check]
    trace: AgreementTrace
    piece: FailingPiece | None

    @property
    def nodes(self) -> Sequence[onnx.NodeProto]:
        """The failing nodes; the fault is most likely the first."""
        return self.piece.nodes if self.piece else ()

    def scope(self, node: onnx.NodeProto) -> str:
        return self.trace.scope(node)

    def module(self, node: onnx.NodeProto) -> torch.nn.Module:
        return self.replay.model.get_submodule(self.scope(node))

    @property
    def config(self) -> Any:
        model: Any = self.replay.model
        return model.config.get_text_config(decoder=True)

    @cached_property
    def _constants(self) -> dict[str, onnx.TensorProto]:
        return {t.name: t for t in self.replay.probe.model.graph.initializer if not t.external_data}

    @cached_property
    def weights(self) -> set[str]:
        """Names of the initializers that are weights: external data, or named after a parameter of the model."""
        named = {name for name, _ in self.replay.model.named_parameters()}
        graph = self.replay.probe.model.graph
        return {t.name for t in graph.initializer if t.external_data or t.name in named}

    def constant(self, name: str) -> Array | None:
        if name in self._constants:
            return onnx.numpy_helper.to_array(self._constants[name])
        node = self.trace.index.maker.get(name)
        if node is not None and node.op_type == "Constant" and node.attribute[0].HasField("t"):
            return onnx.numpy_helper.to_array(node.attribute[0].t)
        return None

    def scalars(self, *ops: str) -> Iterator[tuple[onnx.NodeProto, float]]:
        for node in self.nodes:
            for name in node.input if node.op_type in ops else ():
                value = self.constant(name)
                if value is not None and value.size == 1:
                    yield node, float(value.reshape(()))

    def attributes(self, *names: str) -> Iterator[tuple[onnx.NodeProto, float]]:
        for node in self.nodes:
            for attribute in node.attribute:
                if attribute.name in names:
                    yield node, attribute.f if attribute.type == onnx.AttributeProto.FLOAT else float(attribute.i)


@dataclass(frozen=True)
class Finding:
    """A description, such as `epsilon 1e-05 in the graph, 1e-06 in the model`, and the node; None if none differs."""

    text: str
    node: onnx.NodeProto | None = None


def differ(found: float, wanted: float) -> bool:
    return not np.isclose(found, wanted, rtol=1e-6, atol=0)


def difference(what: str, found: float, wanted: float) -> str:
    return f"{what} {found:.6g} in the graph, {wanted:.6g} in the model"


ATTEMPTS = 80  # maximum number of values that are replaced, one at a time


@dataclass(frozen=True)
class FailingPiece:
    """Nodes, in order, that compute a wrong value from correct ones; one of them is the fault."""

    nodes: Sequence[onnx.NodeProto]
    output: str
    expected: RecordedValue | None  # None if the model has no such value
    proven: bool  # later values agree with the expected value in place of the output

    @property
    def node(self) -> onnx.NodeProto:
        return next((node for node in self.nodes if node.op_type not in LAYOUT_OPS), self.nodes[-1])


@dataclass(frozen=True)
class TargetValue:
    """The name of a later value, and the model's value for it; None if unknown."""

    value: str
    record: RecordedValue | None


def smallest_piece(
    trace: AgreementTrace, probe: GraphProbe, inputs: Mapping[str, Array], last: TargetValue
) -> FailingPiece:
    """The smallest failing piece; `inputs` are those of the graph by name, `last` the wrong value and the model's."""
    values = {**inputs, **trace.values}
    target = _first_target(trace, last)
    suspects = trace.back_from(target.value)
    if target.record is None:
        return FailingPiece(suspects, target.value, None, proven=False)
    for output, record in islice(_attempts(trace, suspects, target), ATTEMPTS):
        if _repairs(trace, probe, values, output, record, target):
            end = _after_identities(trace, output)
            return FailingPiece(trace.back_from(end), end, record, proven=True)
    return FailingPiece(suspects, target.value, target.record, proven=False)


def _attempts(
    trace: AgreementTrace, suspects: Sequence[onnx.NodeProto], target: TargetValue
) -> Iterator[tuple[str, RecordedValue]]:
    """Wrong values before the target, in order, each with a value that the model may have in its place."""
    for output in (output for node in suspects for output in node.output):
        if output in trace.good or output == target.value or output not in trace.values:
            continue
        is_float = trace.values[output].dtype.kind == "f"
        for record in trace.places(output):
            if (record.exact.dtype.kind == "f") is is_float and record.exact.size > 1:
                yield output, record


def _after_identities(trace: AgreementTrace, value: str) -> str:
    """The value after nodes without effect, one of which may be the fault."""
    users = trace.index.users[value]
    while len(users) == 1 and users[0].op_type == "Identity":
        value = users[0].output[0]
        users = trace.index.users[value]
    return value


def _first_target(trace: AgreementTrace, last: TargetValue) -> TargetValue:
    """The first wrong input or output of a module before the last value, and the model's value."""
    ports = {(record.scope, record.op, record.exact.size): record for record in trace.ports}
    suspects = trace.back_from(last.value)
    ids = {id(node) for node in suspects}
    for node in suspects:
        for output in node.output:
            if output in trace.good or output not in trace.values or trace.values[output].dtype.kind != "f":
                continue
            size, scope = trace.values[output].size, trace.scopes.of(node)
            for user in trace.index.users[output]:
                other = trace.scopes.of(user)
                taken, given = ports.get((other, IN, size)), ports.get((scope, OUT, size))
                if given and not inside(other, scope):
                    return TargetValue(output, given)
                if taken and id(user) in ids and not inside(scope, other):
                    return TargetValue(output, taken)
    return last


def _repairs(
    trace: AgreementTrace,
    probe: GraphProbe,
    values: Mapping[str, Array],
    output: str,
    record: RecordedValue,
    target: TargetValue,
) -> bool:
    nodes = trace.index.before(target.value, {*trace.good, output})
    if not any(output in values_read_by(node) for node in nodes):
        return False
    wrong = values[output]
    right = np.broadcast_to(rounded_to(record, wrong.dtype).reshape(wrong.shape), wrong.shape).astype(wrong.dtype)
    feeds = {**values, output: right}
    found = probe.run_piece(nodes, feeds, target.value)
    return found is not None and target.record is not None and trace.comparison.agrees(target.record, found)
