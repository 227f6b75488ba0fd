"""The state of a walk: what is known of the values so far, of their axes and types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx

from llmconv.verify.audit.decisions.affine_forms import BATCH, LENGTH, AffineForm, ValueKind, atom
from llmconv.verify.audit.decisions.operators import SAME
from llmconv.verify.audit.decisions.value_kinds import ConstantValue, InputValue, ModelValue, Value, as_form, as_parts

AxisSizes = list[int | str | None]
"""Sizes, names, or None for what is unknown."""


@dataclass
class WalkState:
    """What is known.

    Attributes:
        axes, types: of values, as shape inference has them.
        ports: what of a call the graph's inputs are.
        symbols: names of axes that the graph's inputs have.
        tables: whether constants are looked into.
        values: by name.
        weights: names of weights, and of what nodes make of weights and constants alone.
        changed: those of them that nodes make.
        named: the forms of axes by the names that they have in `axes`.
        readers: the nodes that read a value.
        truths: values of the model that are 0 or 1: which expert is chosen.
    """

    axes: dict[str, AxisSizes]
    types: Mapping[str, int]
    ports: Mapping[str, str]
    symbols: frozenset[str]
    tables: bool = True
    values: dict[str, Value] = field(default_factory=dict)
    weights: set[str] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)
    named: dict[str, AffineForm] = field(default_factory=dict)
    readers: dict[str, list[onnx.NodeProto]] = field(default_factory=dict)
    truths: set[str] = field(default_factory=set)

    def inputs(self, node: onnx.NodeProto) -> list[Value | None]:
        """What a node reads; None for what is left out."""
        return [self.values.get(name, ModelValue()) if name else None for name in node.input]

    def parts(self, name: str, value: Value) -> tuple[AffineForm, ...] | None:
        """The forms of a list's elements; a scalar is a list of one."""
        if isinstance(value, InputValue) and value.parts is None and self.axes.get(name) in ([], [1]):
            return (value.form,)
        return as_parts(value)

    def name_axes(self, name: str, forms: tuple[AffineForm, ...]) -> None:
        """Notes the axes of a value."""
        self.named |= {form.key(): form for form in forms if form.terms}
        self.axes[name] = [form.key() if form.terms else int(form.number) for form in forms]

    def lengths(self, name: str) -> list[AffineForm] | None:
        """The forms of a value's axes; None where not even their number is known."""
        axes = self.axes.get(name)
        if axes is None:
            return None
        return [
            AffineForm(number=float(axis)) if isinstance(axis, int) else self._length(axis or f"{name}[{at}]")
            for at, axis in enumerate(axes)
        ]

    def _length(self, name: str) -> AffineForm:
        """Of an axis that is no number; of one that is neither an input's nor followed, nothing is known."""
        nature = ValueKind.COUNT if name in self.symbols else ValueKind.UNKNOWN
        return self.named.get(name) or atom(name, BATCH if name == "batch_size" else LENGTH, nature=nature)

    def is_of_weights(self, node: onnx.NodeProto) -> bool:
        """Whether a node reads weights and constants alone."""
        read = [name for name in node.input if name]
        return bool(read) and all(
            name in self.weights or isinstance(self.values.get(name), ConstantValue) for name in read
        )

    def writes_along_a_head(self, node: onnx.NodeProto, index: ConstantValue) -> bool:
        """Whether a Scatter writes into what nodes made, at places of axes of a fixed size: no length, no position."""
        axes = self.axes.get(node.input[0])
        if axes is None or node.input[0] in self.weights:
            return False
        at = next((one.i for one in node.attribute if one.name == "axis"), 0)
        which = axes[: index.array.shape[-1]] if node.op_type == "ScatterND" else axes[at:][:1]
        return bool(which) and all(isinstance(size, int) for size in which)

    def note_truth(self, node: onnx.NodeProto) -> None:
        """Notes what is 0 or 1: ones that are scattered over zeros, in whatever layout."""
        given = [as_form(self.values.get(name, ModelValue())) for name in node.input]
        if node.op_type in ("ScatterElements", "ScatterND") and given[0] and given[2]:
            if all(not form.terms and form.number in (0, 1) for form in (given[0], given[2])):
                self.truths.add(node.output[0])
        elif node.op_type in SAME and node.input[0] in self.truths:
            self.truths.add(node.output[0])

    def is_followed(self, axis: int | str | None) -> bool:
        """Whether an axis is a number, an input's, or made of these."""
        return isinstance(axis, int) or axis in self.symbols or axis in self.named
