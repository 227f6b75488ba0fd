"""The smallest failing piece of a graph, with everything known about it, from which findings are derived.

If all later values agree once a value is replaced by the model's, the fault is before that value. So the first value
that repairs the result is the end of the failing piece, and the last values that agree are its start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import onnx
import torch

from llmconv.tensors import Array
from llmconv.verify.bisect.agreement import LAYOUT_OPS, AgreementTrace
from llmconv.verify.bisect.recording import IN, OUT, RecordedValue, inside, rounded_to
from llmconv.verify.bisect.replay import ReplayedCall
from llmconv.verify.comparison.graph_probe import GraphProbe, inner_inputs
from llmconv.verify.results.report import Check, Where


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
        """The module of a node."""
        return self.trace.scope(node)

    def module(self, node: onnx.NodeProto) -> torch.nn.Module:
        """The eager model's module of a node."""
        return self.replay.model.get_submodule(self.scope(node))

    @property
    def config(self) -> Any:
        """The transformers config of the language model."""
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
        """The value of an inline constant; None for other values."""
        if name in self._constants:
            return onnx.numpy_helper.to_array(self._constants[name])
        node = self.trace.index.maker.get(name)
        if node is not None and node.op_type == "Constant" and node.attribute[0].HasField("t"):
            return onnx.numpy_helper.to_array(node.attribute[0].t)
        return None

    def scalars(self, *ops: str) -> Iterator[tuple[onnx.NodeProto, float]]:
        """Single-element constants that nodes of these operators read."""
        for node in self.nodes:
            for name in node.input if node.op_type in ops else ():
                value = self.constant(name)
                if value is not None and value.size == 1:
                    yield node, float(value.reshape(()))

    def attributes(self, *names: str) -> Iterator[tuple[onnx.NodeProto, float]]:
        """Numeric attributes of the nodes, by these names."""
        for node in self.nodes:
            for attribute in node.attribute:
                if attribute.name in names:
                    yield node, attribute.f if attribute.type == onnx.AttributeProto.FLOAT else float(attribute.i)


@dataclass(frozen=True)
class Finding:
    """A description such as `epsilon 1e-05 in the graph, 1e-06 in the model`, and the faulty node; None if none is."""

    text: str
    node: onnx.NodeProto | None = None


def differ(found: float, wanted: float) -> bool:
    """Whether two numbers differ in float32."""
    return not np.isclose(found, wanted, rtol=1e-6, atol=0)


def difference(what: str, found: float, wanted: float) -> str:
    """A text such as `epsilon 1e-05 in the graph, 1e-06 in the model`."""
    return f"{what} {found:.6g} in the graph, {wanted:.6g} in the model"


ATTEMPTS = 80
"""Maximum number of values that are replaced, one at a time."""


@dataclass(frozen=True)
class FailingPiece:
    """Nodes, in order, that compute a wrong value from correct ones; one of them is the fault.

    `expected` is None if the model has no such value. If `proven`, later values agree with the expected value in place
    of the output.
    """

    nodes: Sequence[onnx.NodeProto]
    output: str
    expected: RecordedValue | None
    proven: bool

    @property
    def node(self) -> onnx.NodeProto:
        """The first node that differs."""
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
    for node in suspects:
        for output in node.output:
            if output and output not in trace.good and output != target.value:
                yield from ((output, record) for record in _candidates(trace, output))


def _after_identities(trace: AgreementTrace, value: str) -> str:
    """The value after nodes without effect, one of which may be the fault."""
    users = trace.index.users[value]
    while len(users) == 1 and users[0].op_type == "Identity":
        value = users[0].output[0]
        users = trace.index.users[value]
    return value


def _candidates(trace: AgreementTrace, output: str) -> Iterator[RecordedValue]:
    """Values that the model may have in place of a value that does not agree."""
    if output in trace.values:
        array = trace.values[output]
        for record in trace.places(output):
            if (record.exact.dtype.kind == "f") == (array.dtype.kind == "f") and record.exact.size > 1:
                yield record


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
    """Whether the target agrees once the output is replaced by the model's value."""
    nodes = trace.index.before(target.value, {*trace.good, output})
    if not any(output in inner_inputs(node) for node in nodes):
        return False
    wrong = values[output]
    right = np.broadcast_to(rounded_to(record, wrong.dtype).reshape(wrong.shape), wrong.shape).astype(wrong.dtype)
    feeds = {**values, output: right}
    found = probe.run_piece(nodes, feeds, target.value)
    return found is not None and target.record is not None and trace.comparison.agrees(target.record, found)
