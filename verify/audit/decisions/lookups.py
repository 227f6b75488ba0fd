"""Lookups: checks bounds, indices of reads and writes, and comparisons of model values."""

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
"""A bound of this size is unlimited."""


class Lookups:
    """Checks nodes one by one.

    Args:
        state: the state of the walk.
        judge: receives the findings.
    """

    def __init__(self, state: WalkState, judge: DecisionJudge) -> None:
        self.state, self.judge, self._entry_points = state, judge, EntryPoints(state, judge)

    def at_bounds(self, node: onnx.NodeProto, inputs: list[Value | None]) -> None:
        """Checks the bounds of a slice, range or padding."""
        for at in BOUNDS.get(node.op_type, ()):
            value = inputs[at] if at < len(inputs) else None
            if isinstance(value, InputValue):
                for form in value.forms:
                    if node.op_type != "TopK" or not self._is_all(node, form):
                        self.judge.decision(node, form)
                if node.op_type == "Slice":
                    self._at_table(node, inputs[0], sources_text(value.form), _cut_axes(inputs))
            elif isinstance(value, ModelValue):
                text = "cuts, counts or fills by a value that is not analyzed"
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
        """Whether a TopK sorts the whole axis."""
        sizes = self.state.lengths(node.input[0])
        axis = attribute(node, "axis", -1)
        return sizes is not None and -len(sizes) <= axis < len(sizes) and sizes[axis].key() == count.key()

    def _at_cut(self, node: onnx.NodeProto, bounds: ConstantValue, inputs: list[Value | None]) -> None:
        """A slice at a number is allowed only on an axis of fixed size, or at a number of the model."""
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
        """Checks the window of an attention node; -1 for none."""
        window = attribute(node, "local_window_size", -1)
        if window >= 0:
            self.judge.decision(node, OF_LENGTH + AffineForm(number=window))

    def at_index(self, node: onnx.NodeProto, inputs: list[Value | None]) -> None:
        """Checks the index of a lookup or write."""
        at = INDEXED.get(node.op_type)
        index = inputs[at] if at is not None and at < len(inputs) else None
        if node.op_type.startswith("Scatter"):
            self._at_places(node, index)
        elif isinstance(index, InputValue | ModelValue):
            text = sources_text(index.form) if isinstance(index, InputValue) else "model values"
            for table in (inputs[at] for at in TABLES.get(node.op_type, (0,)) if at < len(inputs)):
                self._at_table(node, table, text, self._looked_up(node))
            if isinstance(index, InputValue):
                self._at_changed(node, index)

    def _looked_up(self, node: onnx.NodeProto) -> list[int]:
        """Axes of a table that a node indexes; 8 axes if unknown."""
        if node.op_type != "GatherND":
            return [attribute(node, "axis", 0)]
        axes = self.state.axes.get(node.input[1])
        depth = axes[-1] if axes else None
        return list(range(depth if isinstance(depth, int) else 8))

    def _at_changed(self, node: onnx.NodeProto, index: InputValue) -> None:
        """Checks lookups outside tables: weights may be looked up, values computed from them may not."""
        name, form = node.input[0], index.form
        if form.kind > ValueKind.COUNT:
            self.judge.flag(node, f"looks up {sources_text(form)} by a value that is not analyzed", certain=False)
        elif node.op_type in TABLES:
            return
        elif form.sources & {TOKEN, POSITION} and isinstance(self.state.values.get(name, ModelValue()), ModelValue):
            if name in self.state.changed:
                self.judge.flag(node, f"looks up {sources_text(form)} in weights that nodes changed")
            elif name not in self.state.weights:
                self.judge.flag(node, f"looks up {sources_text(form)} in model values", certain=False)

    def _at_places(self, node: onnx.NodeProto, index: Value | None) -> None:
        """Checks the indices of a write: from the call, or a whole axis, but not single constants."""
        if isinstance(index, InputValue):
            for form in index.forms:
                self.judge.decision(node, form)
        elif isinstance(index, ConstantValue) and self.state.writes_along_a_head(node, index):
            return  # as in interleaved rotary embeddings
        elif isinstance(index, ConstantValue) and (node.input[0] in self.state.weights or not _is_run(index.array)):
            self.judge.flag(node, f"writes at {', '.join(map(str, np.unique(index.array)[:3].tolist()))}")

    def _at_table(self, node: onnx.NodeProto, table: Value | None, index: str, axes: Sequence[int]) -> None:
        """Checks a constant table along the axes that are indexed or sliced."""
        if not self.state.tables or not isinstance(table, ConstantValue):
            return
        array = table.array
        if array.dtype.kind not in "fiub":
            self.judge.flag(node, f"looks up {index} in a table of {array.dtype}", certain=False)
            return
        for axis in (axis for axis in axes if -array.ndim <= axis < array.ndim and array.shape[axis] >= TABLE_ROWS):
            if (row := odd_row(np.moveaxis(array, axis, 0), table.step)) is not None:
                text = f"looks up {index} in a table whose row {row} does not follow from the others"
                self.judge.flag(node, text, certain=False)

    def at_data(self, node: onnx.NodeProto, inputs: list[Value | None]) -> None:
        """Checks comparisons of model values with numbers or with the call."""
        op = node.op_type
        if op in THRESHOLDS:
            self.judge.flag(node, f"unsupported operator on model values: {op}", certain=False)
        self._entry_points.at(node, inputs)
        if op not in COMPARISONS and op not in LIMITS:
            return
        places = LIMITS.get(op) or range(len(inputs))
        for value in (inputs[at] for at in places if at < len(inputs)):
            if isinstance(value, InputValue):
                self.judge.flag(node, f"compares {sources_text(value.form)} with model values", certain=False)
            elif isinstance(value, ConstantValue) and value.array.size and value.array.dtype.kind in "fiu":
                self._at_limit(node, value.array)

    def _at_limit(self, node: onnx.NodeProto, array: Array) -> None:
        numbers = np.unique(array.astype(np.float64))
        if numbers[0] == 0 and _is_run(numbers):  # indices of experts
            return
        odd = [float(number) for number in numbers if not self.judge.numbers.bounds_data(float(number))]
        if odd:
            self.judge.flag(node, f"compares model values with {odd[0]:g}", certain=False)


def _cut_axes(inputs: list[Value | None]) -> list[int]:
    """Axes of a Slice; 8 axes if unknown."""
    axes = inputs[3] if len(inputs) > 3 else None
    return [int(axis) for axis in axes.array.ravel()] if isinstance(axes, ConstantValue) else list(range(8))


def _is_run(places: Array) -> bool:
    """Whether these are at least two consecutive numbers."""
    found = np.unique(places)
    return len(found) > 1 and bool((np.diff(found) == 1).all())
