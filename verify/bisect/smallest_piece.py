"""Finds the smallest failing piece of a graph, by replacing values with those of the model.

If all later values agree once a value is replaced by the model's, the fault is before that value. So the first value
that repairs the result is the end of the failing piece, and the last values that agree are its start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import onnx

from llmconv.tensors import Array
from llmconv.verify.bisect.agreement_trace import LAYOUT_OPS, AgreementTrace
from llmconv.verify.bisect.module_scopes import inside
from llmconv.verify.bisect.recording import IN, OUT, RecordedValue, rounded_to
from llmconv.verify.comparison.graph_probe import GraphProbe, inner_inputs

ATTEMPTS = 80
"""Maximum number of values that are replaced, one at a time."""


@dataclass(frozen=True)
class FailingPiece:
    """Nodes that compute a wrong value from correct ones.

    Attributes:
        nodes: in order; one of them is the fault.
        output: name of the wrong value.
        expected: the model's value; None if the model has no such value.
        proven: later values agree with the expected value in place of the output.
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
    """A later value, with the model's value for it.

    Attributes:
        value: its name.
        record: the model's value; None if unknown.
    """

    value: str
    record: RecordedValue | None


def smallest_piece(
    trace: AgreementTrace, probe: GraphProbe, inputs: Mapping[str, Array], last: TargetValue
) -> FailingPiece:
    """The smallest failing piece.

    Args:
        trace: the values that agree.
        probe: the graph.
        inputs: of the graph, by name.
        last: the wrong value, and the model's.
    """
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
