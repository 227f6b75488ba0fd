"""The state of a walk: what is known of the values so far, of their axes and types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

import onnx

from llmconv.verify.decisions.forms import BATCH, LENGTH, Form, Nature, atom
from llmconv.verify.decisions.operators import SAME
from llmconv.verify.decisions.values import Call, Data, Known, Value, as_form, as_parts

Axes = list[int | str | None]
"""Sizes, names, or None for what is unknown."""


@dataclass
class State:
    """What is known.

    Attributes:
        axes, types: of values, as shape inference has them.
        declared: axes of values as the graph itself has them, of which nobody knows whether they are true.
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

    axes: dict[str, Axes]
    types: Mapping[str, int]
    ports: Mapping[str, str]
    declared: Mapping[str, Axes]
    symbols: frozenset[str]
    tables: bool = True
    values: dict[str, Value] = field(default_factory=dict)
    weights: set[str] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)
    named: dict[str, Form] = field(default_factory=dict)
    readers: dict[str, list[onnx.NodeProto]] = field(default_factory=dict)
    truths: set[str] = field(default_factory=set)

    def inputs(self, node: onnx.NodeProto) -> list[Value | None]:
        """What a node reads; None for what is left out."""
        return [self.values.get(name, Data()) if name else None for name in node.input]

    def parts(self, name: str, value: Value) -> tuple[Form, ...] | None:
        """The forms of a list's elements; a scalar is a list of one."""
        if isinstance(value, Call) and value.parts is None and self.axes.get(name) in ([], [1]):
            return (value.form,)
        return as_parts(value)

    def name_axes(self, name: str, forms: tuple[Form, ...]) -> None:
        """Notes the axes of a value."""
        self.named |= {form.key(): form for form in forms if form.terms}
        self.axes[name] = [form.key() if form.terms else int(form.number) for form in forms]

    def lengths(self, name: str) -> list[Form] | None:
        """The forms of a value's axes; None where not even their number is known."""
        axes = self.axes.get(name)
        if axes is None:
            return None
        return [
            Form(number=float(axis)) if isinstance(axis, int) else self._length(axis or f"{name}[{at}]")
            for at, axis in enumerate(axes)
        ]

    def _length(self, name: str) -> Form:
        """Of an axis that is no number; of one that is neither an input's nor followed, nothing is known."""
        nature = Nature.COUNT if name in self.symbols else Nature.OPAQUE
        return self.named.get(name) or atom(name, BATCH if name == "batch_size" else LENGTH, nature=nature)

    def is_of_weights(self, node: onnx.NodeProto) -> bool:
        """Whether a node reads weights and constants alone."""
        read = [name for name in node.input if name]
        return bool(read) and all(name in self.weights or isinstance(self.values.get(name), Known) for name in read)

    def writes_along_a_head(self, node: onnx.NodeProto, index: Known) -> bool:
        """Whether a Scatter writes into what nodes made, at places of axes of a fixed size: no length, no position."""
        axes = self.known_axes(node.input[0])
        if axes is None or node.input[0] in self.weights:
            return False
        at = next((one.i for one in node.attribute if one.name == "axis"), 0)
        which = axes[: index.array.shape[-1]] if node.op_type == "ScatterND" else axes[at:][:1]
        return bool(which) and all(isinstance(size, int) for size in which)

    def note_truth(self, node: onnx.NodeProto) -> None:
        """Notes what is 0 or 1: ones that are scattered over zeros, in whatever layout."""
        given = [as_form(self.values.get(name, Data())) for name in node.input]
        if node.op_type in ("ScatterElements", "ScatterND") and given[0] and given[2]:
            if all(not form.terms and form.number in (0, 1) for form in (given[0], given[2])):
                self.truths.add(node.output[0])
        elif node.op_type in SAME and node.input[0] in self.truths:
            self.truths.add(node.output[0])

    def known_axes(self, name: str) -> Axes | None:
        """A value's axes, with the numbers that the graph says where they are not followed."""
        axes, declared = self.axes.get(name), self.declared.get(name)
        if axes is None or declared is None or len(axes) != len(declared):
            return declared if axes is None else axes
        return [axis if isinstance(axis, int) else other for axis, other in zip(axes, declared, strict=True)]

    def complete_axes(self, node: onnx.NodeProto) -> None:
        """Axes that shape inference does not follow: of other layouts, and of what a key is put together by."""
        known = self.axes.get(node.input[0]) if node.input else None
        if node.op_type == "Reshape":
            reshaped(self, node)
        if known is None or self.axes.get(node.output[0]) is not None:
            return
        if node.op_type == "Transpose":
            named = (list(one.ints) for one in node.attribute if one.name == "perm")
            order = next(named, list(range(len(known)))[::-1])
            self.axes[node.output[0]] = [known[at] for at in order]
        elif node.op_type in ("ScatterND", "ScatterElements"):
            self.axes[node.output[0]] = known


def reshaped(state: State, node: onnx.NodeProto) -> None:
    """Names the axes of a Reshape whose shape is a list of lengths; -1 is what the others leave of its input."""
    shape = state.values.get(node.input[1])
    parts = state.parts(node.input[1], shape) if shape is not None else None
    before = state.lengths(node.input[0])
    if parts is None or before is None or any(not part.terms and part.number == 0 for part in parts):
        return
    open_axes = [at for at, part in enumerate(parts) if not part.terms and part.number < 0]
    if len(open_axes) > 1:
        return
    made = list(parts)
    for at in open_axes:
        rest = _left(before, [part for one, part in enumerate(parts) if one != at])
        if rest is None:
            return
        made[at] = rest
    state.name_axes(node.output[0], tuple(made))


def _left(whole: list[Form], taken: list[Form]) -> Form | None:
    """A product of axes divided by others; None where the axes of the call do not cancel out to one at most."""
    left = [form for form in whole if form.terms]
    for form in (form for form in taken if form.terms):
        if form.key() not in [one.key() for one in left]:
            return None
        left.remove(next(one for one in left if one.key() == form.key()))
    number = prod(form.number for form in whole if not form.terms)
    by = prod(form.number for form in taken if not form.terms)
    if len(left) > 1 or not by:
        return None
    return left[0].times(number / by) if left else Form(number=number // by)
