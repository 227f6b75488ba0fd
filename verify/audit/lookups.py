"""Checks of bounds, indices of reads and writes, and comparisons of model values.

`EntryPoints` checks the nodes where values of the call enter model values, after which they are no longer analyzed. A
model needs few of them: masks, rotary cosines and sines, and slopes of positions that are added to attention scores.
Any other value could later be compared with any number.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx

from llmconv.tensors import Array
from llmconv.verify.audit.config_numbers import OF_LENGTH, DecisionJudge, sources_text
from llmconv.verify.audit.state import (
    BOUNDS,
    COMPARISONS,
    INDEXED,
    INTEGERS,
    LAYOUTS,
    LENGTHS_OF_CACHE,
    LIMITS,
    POSITION,
    TABLES,
    THRESHOLDS,
    TOKEN,
    AffineForm,
    ConstantValue,
    InputValue,
    ModelValue,
    Value,
    ValueKind,
    WalkState,
    attribute,
    is_of,
)

EVERYTHING = 1 << 31
"""A bound of this size is unlimited."""


class Lookups:
    """Checks nodes one by one; `judge` receives the findings."""

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


LARGE = 10.0
"""Larger numbers, added to values of the model, can move a threshold."""

WHOLE = INTEGERS | {onnx.TensorProto.BOOL, onnx.TensorProto.UINT32, onnx.TensorProto.UINT64}
"""Types of indices and counts, such as experts and tokens."""

TURNS = {"Add", "Mul", "RotaryEmbedding", "GroupQueryAttention"}
"""Operators that may read cosines and sines."""

MASKED = {"Attention": 3, "GroupQueryAttention": 10}
"""The input that is added to attention scores."""

FAR = 12
"""Maximum number of nodes between an entry point and the attention scores."""

ON_THE_WAY = {"Add", "Cast", "Identity", "Reshape", "Transpose", "Unsqueeze", "Squeeze", "Expand", "Where", "Mul"}
"""Operators between attention scores and their softmax."""


class EntryPoints:
    """Checks nodes that read both model values and values of the call; `judge` receives the findings."""

    def __init__(self, state: WalkState, judge: DecisionJudge) -> None:
        self.state, self.judge = state, judge

    def at(self, node: onnx.NodeProto, inputs: list[Value | None]) -> None:
        """Checks a node with at least one model value among its inputs."""
        op = node.op_type
        if op == "Equal" and any(self._may_be_fractional(node, at, value) for at, value in enumerate(inputs)):
            self.judge.flag(node, "tests model values for a single number", certain=False)
        if op == "Cast" and self._becomes_whole(node):
            self.judge.flag(node, "rounds model values", certain=False)
        if op in COMPARISONS or op in LIMITS:
            return
        places = {*BOUNDS.get(op, ()), *LAYOUTS.get(op, ()), *([INDEXED[op]] if op in INDEXED else [])}
        if op in ("Slice", "Pad"):
            places |= {3, 4}
        for at, value in enumerate(inputs):
            if isinstance(value, InputValue) and at not in places:
                for form in value.forms:
                    self._check_form(node, at, form)
            elif isinstance(value, ConstantValue) and op in ("Add", "Sub", "Sum") and value.array.dtype.kind in "fiu":
                for number in _extremes(value):
                    self._check_number(node, number)

    def _may_be_fractional(self, node: onnx.NodeProto, at: int, value: Value | None) -> bool:
        return isinstance(value, ModelValue) and self.state.types.get(node.input[at]) not in WHOLE

    def _becomes_whole(self, node: onnx.NodeProto) -> bool:
        to = next((one.i for one in node.attribute if one.name == "to"), 0)
        return (
            to in WHOLE and node.input[0] not in self.state.binary and self.state.types.get(node.input[0]) not in WHOLE
        )

    def _check_form(self, node: onnx.NodeProto, at: int, form: AffineForm) -> None:
        op, kind = node.op_type, form.kind
        if at in LENGTHS_OF_CACHE.get(op, ()):
            self.judge.decision(node, form)
            return
        for number in (form.number, *form.terms.values()):
            if kind < ValueKind.UNKNOWN:
                self._check_number(node, number)
        if kind is ValueKind.BINARY or (kind is ValueKind.PERIODIC and op in TURNS):
            return
        if at == MASKED.get(op):
            return
        if op == "Add" and not form.number and self._ends_in(node, {"Softmax"}):
            return
        if op == "Mul" and _is_logarithmic(form) and self._ends_in(node, {"Softmax", "MatMul", "Attention"}):
            return
        self.judge.flag(node, f"puts {sources_text(form)} into model values", certain=False)

    def _check_number(self, node: onnx.NodeProto, number: float) -> None:
        """Checks a number that is added to model values."""
        if LARGE < abs(number) < LARGEST and not self.judge.numbers.bounds_data(number):
            self.judge.flag(node, f"adds {number:g} to model values", certain=False)

    def _ends_in(self, node: onnx.NodeProto, ends: set[str]) -> bool:
        """Whether a result is used for attention scores or their softmax only, where it moves no threshold."""
        made, steps = [node], 0
        while made and steps < FAR:
            steps += 1
            read = [reader for one in made for reader in self.state.readers.get(one.output[0], [])]
            if not read or any(reader.op_type not in {*ON_THE_WAY, *ends} for reader in read):
                return False
            made = [reader for reader in read if reader.op_type not in ends]
        return not made


def _is_logarithmic(form: AffineForm) -> bool:
    """Whether a form depends on the logarithm of a length or position, which scales attention scores."""
    return (is_of("Exp", form) or is_of("Log", form)) and form.number in (0, 1)


def _extremes(value: ConstantValue) -> list[float]:
    array = value.array
    finite = array[np.isfinite(array)] if array.dtype.kind == "f" else array
    return [float(finite.min()), float(finite.max())] if finite.size else []


TOLERANCE = 1e-3
"""Tolerance relative to the largest number of a column; larger than the error of float32 cosines of large angles."""

TABLE_ROWS = 32
"""Constants with fewer rows are not checked: the scenarios read every row."""

LARGEST = 3e38
"""Numbers of this size hide a key."""


def odd_row(table: Array, step: float = 0.0) -> int | None:
    """The first irregular row of a table; None if the table is regular.

    Regular columns are constants, lines and scaled sinusoids of the row number. A square table whose rows are the
    previous row shifted by one place is regular as well: a mask by distance. Rows with numbers that are not finite
    are regular only in constant tables and such masks.

    `step` is the unit in the last place to which its numbers were rounded, if that is larger than the tolerance.
    """
    rows = table.reshape(len(table), -1).astype(np.float64) if table.ndim > 1 else table.astype(np.float64)[:, None]
    if len(rows) < 4 or (rows == rows[0]).all():
        return None
    if rows.shape[0] == rows.shape[1]:
        shifted = (rows[1:, 1:] != rows[:-1, :-1]).any(axis=1)
        if shifted.mean() < 0.5:  # a mask by distance
            return int(np.argmax(shifted)) + 1 if shifted.any() else None
    finite = np.isfinite(rows).all(axis=1)
    if not finite.all():
        return int(np.argmin(finite))
    share = max(TOLERANCE, step)
    odd = (_odd_in(column, (np.abs(column).max() or 1.0) * share) for column in rows.T)
    return min((row for row in odd if row is not None), default=None)


def kind_of(table: Array) -> ValueKind:
    """Possible values of a regular table: a mask, a sinusoid, or a line (any number)."""
    rows = table.astype(np.float64)
    if ((rows == 0) | (rows == 1) | ~(np.abs(rows) < LARGEST)).all() and not np.isnan(rows).any():
        return ValueKind.BINARY
    return (
        ValueKind.PERIODIC
        if np.abs(rows).max(initial=0.0) <= 1 + TOLERANCE and rows.min(initial=0.0) < 0
        else ValueKind.UNKNOWN
    )


def _odd_in(column: Array, tolerance: float) -> int | None:
    """The first irregular row of a column: c[n + 1] + c[n - 1] = f * c[n], with one f for a sinusoid, 2 for a line."""
    around, middle = column[2:] + column[:-2], column[1:-1]
    if np.ptp(column) <= tolerance:
        return None
    candidates = [2.0, *_factors(around, middle)]
    misses = [np.abs(around - factor * middle) > 4 * tolerance for factor in candidates]
    best = min(misses, key=np.count_nonzero)
    return int(np.argmax(best)) + 2 if best.any() else None


def _factors(around: Array, middle: Array) -> list[float]:
    """The factor computed from the rows of the largest numbers; one of them may be irregular."""
    largest = np.argsort(-np.abs(middle))[:5]
    return [float(around[row] / middle[row]) for row in largest if middle[row]]
