"""WalkState: the values, axes and types known so far in the walk over a graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx

from llmconv.verify.audit.decisions.affine_forms import BATCH, LENGTH, AffineForm, ValueKind, atom
from llmconv.verify.audit.decisions.operators import SAME
from llmconv.verify.audit.decisions.value_kinds import ConstantValue, InputValue, ModelValue, Value, as_form, as_parts

AxisSizes = list[int | str | None]
"""Sizes or names of axes; None for unknown ones."""


@dataclass
class WalkState:
    """The state of a walk.

    Attributes:
        axes: axes of values by name, from shape inference.
        types: element types of values by name, from shape inference.
        ports: the property of a call that each input of the graph contains.
        symbols: names of axes of the graph's inputs.
        tables: whether the contents of constants are analyzed.
        half: the graph computes in half precision, so computed values may be rounded to it.
        values: known values by name.
        weights: names of weights, and of values computed from weights and constants only.
        changed: the computed ones of these.
        named: forms of axes by their names in `axes`.
        readers: the nodes that read a value.
        binary: model values that are 0 or 1, such as the selection of experts.
    """

    axes: dict[str, AxisSizes]
    types: Mapping[str, int]
    ports: Mapping[str, str]
    symbols: frozenset[str]
    tables: bool = True
    half: bool = False
    values: dict[str, Value] = field(default_factory=dict)
    weights: set[str] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)
    named: dict[str, AffineForm] = field(default_factory=dict)
    readers: dict[str, list[onnx.NodeProto]] = field(default_factory=dict)
    binary: set[str] = field(default_factory=set)

    def inputs(self, node: onnx.NodeProto) -> list[Value | None]:
        """The values that a node reads; None for an omitted input."""
        return [self.values.get(name, ModelValue()) if name else None for name in node.input]

    def parts(self, name: str, value: Value) -> tuple[AffineForm, ...] | None:
        """The form of each element of a list; a scalar counts as a list of one."""
        if isinstance(value, InputValue) and value.parts is None and self.axes.get(name) in ([], [1]):
            return (value.form,)
        return as_parts(value)

    def name_axes(self, name: str, forms: tuple[AffineForm, ...]) -> None:
        """Records the axes of a value."""
        self.named |= {form.key(): form for form in forms if form.terms}
        self.axes[name] = [form.key() if form.terms else int(form.number) for form in forms]

    def lengths(self, name: str) -> list[AffineForm] | None:
        """The forms of a value's axes; None if their number is unknown."""
        axes = self.axes.get(name)
        if axes is None:
            return None
        return [
            AffineForm(number=float(axis)) if isinstance(axis, int) else self._length(axis or f"{name}[{at}]")
            for at, axis in enumerate(axes)
        ]

    def _length(self, name: str) -> AffineForm:
        """The form of a named axis; its values are unknown if it is neither an input's nor derived."""
        kind = ValueKind.COUNT if name in self.symbols else ValueKind.UNKNOWN
        return self.named.get(name) or atom(name, BATCH if name == "batch_size" else LENGTH, kind=kind)

    def is_of_weights(self, node: onnx.NodeProto) -> bool:
        """Whether a node reads weights and constants only."""
        read = [name for name in node.input if name]
        return bool(read) and all(
            name in self.weights or isinstance(self.values.get(name), ConstantValue) for name in read
        )

    def writes_along_a_head(self, node: onnx.NodeProto, index: ConstantValue) -> bool:
        """Whether a Scatter writes into a computed value along axes of fixed size, so at no length or position."""
        axes = self.axes.get(node.input[0])
        if axes is None or node.input[0] in self.weights:
            return False
        at = next((one.i for one in node.attribute if one.name == "axis"), 0)
        which = axes[: index.array.shape[-1]] if node.op_type == "ScatterND" else axes[at:][:1]
        return bool(which) and all(isinstance(size, int) for size in which)

    def note_binary(self, node: onnx.NodeProto) -> None:
        """Records values that are 0 or 1: ones scattered over zeros, in any layout."""
        given = [as_form(self.values.get(name, ModelValue())) for name in node.input]
        if node.op_type in ("ScatterElements", "ScatterND") and given[0] and given[2]:
            if all(not form.terms and form.number in (0, 1) for form in (given[0], given[2])):
                self.binary.add(node.output[0])
        elif node.op_type in SAME and node.input[0] in self.binary:
            self.binary.add(node.output[0])

    def is_followed(self, axis: int | str | None) -> bool:
        """Whether an axis is a number, an axis of an input, or derived from these."""
        return isinstance(axis, int) or axis in self.symbols or axis in self.named
