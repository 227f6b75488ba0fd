"""Lookups: bounds, places to look up or to write, and what the model's own values are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx

from llmconv.tensors import Array
from llmconv.verify.audit.decisions.affine_forms import POSITION, TOKEN, AffineForm, ValueKind
from llmconv.verify.audit.decisions.entry_points import EntryPoints
from llmconv.verify.audit.decisions.judge import OF_LENGTH, DecisionJudge, sources_text
from llmconv.verify.audit.decisions.lookup_tables import TABLE_ROWS, odd_row
from llmconv.verify.audit.decisions.operators import BOUNDS, COMPARISONS, INDEXED, LIMITS, TABLES, THRESHOLDS, attribute
from llmconv.verify.audit.decisions.state import WalkState
from llmconv.verify.audit.decisions.value_kinds import ConstantValue, InputValue, ModelValue, Value

EVERYTHING = 1 << 31
"""A bound so large is none."""


class Lookups:
    """Lookups at nodes one by one.

    Args:
        state: of the walk.
        judge: takes what is found.
    """

    def __init__(self, state: WalkState, judge: DecisionJudge) -> None:
        self.state, self.judge, self._entry_points = state, judge, EntryPoints(state, judge)

    def at_bounds(self, node: onnx.NodeProto, inputs: list[Value | None]) -> None:
        """From where to where a node cuts, counts or fills."""
        for at in BOUNDS.get(node.op_type, ()):
            value = inputs[at] if at < len(inputs) else None
            if isinstance(value, InputValue):
                for form in value.forms:
                    if node.op_type != "TopK" or not self._is_all(node, form):
                        self.judge.decision(node, form)
                if node.op_type == "Slice":
                    self._at_table(node, inputs[0], sources_text(value.form), _cut_axes(inputs))
            elif isinstance(value, ModelValue):
                text = "cuts, counts or fills by what is not followed"
                self.judge.flag(node, text, certain=False)
            elif isinstance(value, ConstantValue) and node.op_type == "Slice":
                self._at_cut(node, value, inputs)
            elif (
                isinstance(value, ConstantValue)
                and node.op_type == "Trilu"
                and not self.judge.knows_lengths(value.array)
            ):
                self.judge.flag(node, f"cuts a triangle at {value.array.ravel()[0]}")

    def _is_all(self, node: onnx.NodeProto, count: AffineForm) -> bool:
        """Whether a TopK sorts all there is."""
        sizes = self.state.lengths(node.input[0])
        axis = attribute(node, "axis", -1)
        return sizes is not None and -len(sizes) <= axis < len(sizes) and sizes[axis].key() == count.key()

    def _at_cut(self, node: onnx.NodeProto, bounds: ConstantValue, inputs: list[Value | None]) -> None:
        """A cut at a number is the model's on an axis of a fixed size only."""
        first, which = inputs[0], inputs[3] if len(inputs) > 3 else None
        axes = self.state.axes.get(node.input[0])
        if isinstance(first, ConstantValue):
            axes = list(first.array.shape)
        at = which.array.ravel().tolist() if isinstance(which, ConstantValue) else list(range(bounds.array.size))
        for bound, axis in zip(bounds.array.ravel().tolist(), at, strict=False):
            fixed = axes is not None and -len(axes) <= axis < len(axes) and isinstance(axes[axis], int)
            if not fixed and abs(bound) < EVERYTHING and not self.judge.knows_lengths(np.array(bound)):
                self.judge.flag(node, f"cuts an axis of any length at {bound}", certain=axes is not None)

    def at_window(self, node: onnx.NodeProto) -> None:
        """A window that an attention node has itself; -1 for none."""
        window = attribute(node, "local_window_size", -1)
        if window >= 0:
            self.judge.decision(node, OF_LENGTH + AffineForm(number=window))

    def at_index(self, node: onnx.NodeProto, inputs: list[Value | None]) -> None:
        """Where a node looks something up, or writes."""
        at = INDEXED.get(node.op_type)
        index = inputs[at] if at is not None and at < len(inputs) else None
        if node.op_type.startswith("Scatter"):
            self._at_places(node, index)
        elif isinstance(index, InputValue | ModelValue):
            text = sources_text(index.form) if isinstance(index, InputValue) else "what the model computes"
            for table in (inputs[at] for at in TABLES.get(node.op_type, (0,)) if at < len(inputs)):
                self._at_table(node, table, text, self._looked_up(node))
            if isinstance(index, InputValue):
                self._at_changed(node, index)

    def _looked_up(self, node: onnx.NodeProto) -> list[int]:
        """Axes of a table along which a node looks up; all of eight where they are not known."""
        if node.op_type != "GatherND":
            return [attribute(node, "axis", 0)]
        axes = self.state.axes.get(node.input[1])
        depth = axes[-1] if axes else None
        return list(range(depth if isinstance(depth, int) else 8))

    def _at_changed(self, node: onnx.NodeProto, index: InputValue) -> None:
        """Places of what is no table: the model's weights may be looked up, what nodes make of them may not."""
        name, form = node.input[0], index.form
        if form.kind > ValueKind.COUNT:
            self.judge.flag(node, f"looks up {sources_text(form)} by what is not followed", certain=False)
        elif node.op_type in TABLES:
            return
        elif form.sources & {TOKEN, POSITION} and isinstance(self.state.values.get(name, ModelValue()), ModelValue):
            if name in self.state.changed:
                self.judge.flag(node, f"looks up {sources_text(form)} in weights that nodes have changed")
            elif name not in self.state.weights:
                self.judge.flag(node, f"looks up {sources_text(form)} in what the model computes", certain=False)

    def _at_places(self, node: onnx.NodeProto, index: Value | None) -> None:
        """Where something is written: at places of the call, or all along an axis, not at some."""
        if isinstance(index, InputValue):
            for form in index.forms:
                self.judge.decision(node, form)
        elif isinstance(index, ConstantValue) and self.state.writes_along_a_head(node, index):
            return  # as interleaved rotary frequencies are put together
        elif isinstance(index, ConstantValue) and (node.input[0] in self.state.weights or not _is_run(index.array)):
            self.judge.flag(node, f"writes at {', '.join(map(str, np.unique(index.array)[:3].tolist()))}")

    def _at_table(self, node: onnx.NodeProto, table: Value | None, index: str, axes: Sequence[int]) -> None:
        """A constant, along the axes on which it is looked up or cut."""
        if not self.state.tables or not isinstance(table, ConstantValue):
            return
        array = table.array
        if array.dtype.kind not in "fiub":
            self.judge.flag(node, f"looks up {index} in a table of {array.dtype}", certain=False)
            return
        for axis in (axis for axis in axes if -array.ndim <= axis < array.ndim and array.shape[axis] >= TABLE_ROWS):
            if (row := odd_row(np.moveaxis(array, axis, 0))) is not None:
                text = f"looks up {index} in a table whose row {row} does not follow from the others"
                self.judge.flag(node, text, certain=False)

    def at_data(self, node: onnx.NodeProto, inputs: list[Value | None]) -> None:
        """What the model computes, compared with numbers or with the call."""
        op = node.op_type
        if op in THRESHOLDS:
            self.judge.flag(node, f"{op} of what the model computes, unsupported here", certain=False)
        self._entry_points.at(node, inputs)
        if op not in COMPARISONS and op not in LIMITS:
            return
        places = LIMITS.get(op) or range(len(inputs))
        for value in (inputs[at] for at in places if at < len(inputs)):
            if isinstance(value, InputValue):
                self.judge.flag(
                    node, f"compares {sources_text(value.form)} with what the model computes", certain=False
                )
            elif isinstance(value, ConstantValue) and value.array.size and value.array.dtype.kind in "fiu":
                self._at_limit(node, value.array)

    def _at_limit(self, node: onnx.NodeProto, array: Array) -> None:
        numbers = np.unique(array.astype(np.float64))
        if numbers[0] == 0 and _is_run(numbers):  # the numbers of experts
            return
        odd = [float(number) for number in numbers if not self.judge.numbers.bounds_data(float(number))]
        if odd:
            self.judge.flag(node, f"compares what the model computes with {odd[0]:g}", certain=False)


def _cut_axes(inputs: list[Value | None]) -> list[int]:
    """Axes that a Slice cuts; all of eight where they are not known."""
    axes = inputs[3] if len(inputs) > 3 else None
    return [int(axis) for axis in axes.array.ravel()] if isinstance(axes, ConstantValue) else list(range(8))


def _is_run(places: Array) -> bool:
    """Whether numbers follow each other, two at least."""
    found = np.unique(places)
    return len(found) > 1 and bool((np.diff(found) == 1).all())
