"""Looks: bounds, places to look up or to write, and what the model's own values are compared with."""

from __future__ import annotations

import numpy as np
import onnx

from llmconv.tensors import Array
from llmconv.verify.decisions.forms import POSITION, TOKEN, Form
from llmconv.verify.decisions.judge import OF_LENGTH, Judge, said
from llmconv.verify.decisions.operators import BOUNDS, COMPARISONS, INDEXED, LIMITS, THRESHOLDS, attribute
from llmconv.verify.decisions.state import State
from llmconv.verify.decisions.tables import odd_row
from llmconv.verify.decisions.values import Call, Known, Value

TABLE_ROWS = 32
"""A constant of fewer rows is no table: every row is read by some scenario."""

EVERYTHING = 1 << 31
"""A bound so large is none."""

LOUD = 10.0
"""A number that is added to what the model computes and is larger than this moves a threshold."""


class Looks:
    """Looks at nodes one by one.

    Args:
        state: of the walk.
        judge: takes what is found.
    """

    def __init__(self, state: State, judge: Judge) -> None:
        self.state, self.judge = state, judge

    def at_bounds(self, node: onnx.NodeProto, inputs: list[Value | None]) -> None:
        """From where to where a node cuts, counts or fills."""
        for at in BOUNDS.get(node.op_type, ()):
            value = inputs[at] if at < len(inputs) else None
            if isinstance(value, Call):
                for form in value.forms:
                    self.judge.decision(node, form)
                if node.op_type == "Slice":
                    self._at_table(node, inputs[0], value)
            elif isinstance(value, Known) and node.op_type == "Slice":
                self._at_cut(node, value, inputs)
            elif isinstance(value, Known) and node.op_type == "Trilu" and not self.judge.knows_lengths(value.array):
                self.judge.flag(node, f"cuts a triangle at {value.array.ravel()[0]}")

    def _at_cut(self, node: onnx.NodeProto, bounds: Known, inputs: list[Value | None]) -> None:
        """A cut at a number is the model's on an axis of a fixed size only."""
        first, which = inputs[0], inputs[3] if len(inputs) > 3 else None
        axes = self.state.axes.get(node.input[0])
        if isinstance(first, Known):
            axes = list(first.array.shape)
        at = which.array.ravel().tolist() if isinstance(which, Known) else list(range(bounds.array.size))
        for bound, axis in zip(bounds.array.ravel().tolist(), at, strict=False):
            fixed = axes is not None and -len(axes) <= axis < len(axes) and isinstance(axes[axis], int)
            if not fixed and abs(bound) < EVERYTHING and not self.judge.knows_lengths(np.array(bound)):
                self.judge.flag(node, f"cuts an axis of any length at {bound}", certain=axes is not None)

    def at_window(self, node: onnx.NodeProto) -> None:
        """A window that an attention node has itself; -1 for none."""
        window = attribute(node, "local_window_size", -1)
        if window >= 0:
            self.judge.decision(node, OF_LENGTH + Form(number=window))

    def at_index(self, node: onnx.NodeProto, inputs: list[Value | None]) -> None:
        """Where a node looks something up, or writes."""
        at = INDEXED.get(node.op_type)
        index = inputs[at] if at is not None and at < len(inputs) else None
        if node.op_type.startswith("Scatter"):
            self._at_places(node, index)
        elif isinstance(index, Call):
            for table in inputs[1:3] if node.op_type == "RotaryEmbedding" else inputs[:1]:
                self._at_table(node, table, index)
            if index.form.sources & {TOKEN, POSITION} and node.input[0] in self.state.changed:
                self.judge.flag(node, f"looks up {said(index.form)} in weights that nodes have changed")

    def _at_places(self, node: onnx.NodeProto, index: Value | None) -> None:
        """Where something is written: at places of the call, or all along an axis, not at some."""
        if isinstance(index, Call):
            for form in index.forms:
                self.judge.decision(node, form)
        elif isinstance(index, Known) and self.state.writes_along_a_head(node, index):
            return  # as interleaved rotary frequencies are put together
        elif isinstance(index, Known) and (node.input[0] in self.state.weights or not _is_run(index.array)):
            self.judge.flag(node, f"writes at {', '.join(map(str, np.unique(index.array)[:3].tolist()))}")

    def _at_table(self, node: onnx.NodeProto, table: Value | None, index: Call) -> None:
        if not self.state.tables or not isinstance(table, Known) or table.array.dtype.kind not in "fiub":
            return
        array = table.array.reshape(-1, *table.array.shape[-1:]) if table.array.ndim > 2 else table.array
        if array.ndim == 2 and len(array) == 1:
            array = array[0]
        if array.ndim and len(array) >= TABLE_ROWS and (row := odd_row(array)) is not None:
            text = f"looks up {said(index.form)} in a table whose row {row} does not follow from the others"
            self.judge.flag(node, text, certain=False)

    def at_data(self, node: onnx.NodeProto, inputs: list[Value | None]) -> None:
        """What the model computes, compared with numbers or with the call."""
        op = node.op_type
        if op in THRESHOLDS:
            self.judge.flag(node, f"{op} of what the model computes, of which nothing can be said", certain=False)
        if op in ("Add", "Sub"):
            self._at_sum(node, inputs)
        if op not in COMPARISONS and op not in LIMITS:
            return
        places = LIMITS.get(op) or range(len(inputs))
        for value in (inputs[at] for at in places if at < len(inputs)):
            if isinstance(value, Call):
                self.judge.flag(node, f"compares {said(value.form)} with what the model computes", certain=False)
            elif isinstance(value, Known) and value.array.size and value.array.dtype.kind in "fiu":
                self._at_limit(node, value.array)

    def _at_sum(self, node: onnx.NodeProto, inputs: list[Value | None]) -> None:
        for value in inputs:
            number = value.number if isinstance(value, Known) else None
            if number is not None and abs(number) > LOUD and not self.judge.numbers.bounds_data(number):
                self.judge.flag(node, f"adds {number:g} to what the model computes", certain=False)

    def _at_limit(self, node: onnx.NodeProto, array: Array) -> None:
        numbers = np.unique(array.astype(np.float64))
        if numbers[0] == 0 and _is_run(numbers):  # the numbers of experts
            return
        odd = [float(number) for number in numbers if not self.judge.numbers.bounds_data(float(number))]
        if odd:
            self.judge.flag(node, f"compares what the model computes with {odd[0]:g}", certain=False)


def _is_run(places: Array) -> bool:
    """Whether numbers follow each other, two at least."""
    found = np.unique(places)
    return len(found) > 1 and bool((np.diff(found) == 1).all())
