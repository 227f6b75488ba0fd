"""Derives axes that ONNX shape inference loses: after layout changes, slices and elementwise operators.

Shapes that the graph declares for its inner values are not used, because no check has validated them.
"""

from __future__ import annotations

from math import prod

import onnx

from llmconv.verify.audit.decisions.affine_forms import AffineForm, made_of
from llmconv.verify.audit.decisions.operators import attribute
from llmconv.verify.audit.decisions.state import AxisSizes, WalkState
from llmconv.verify.audit.decisions.value_kinds import ConstantValue

ELEMENT_BY_ELEMENT = {"Mul", "Add", "Sub", "Div", "Cast", "Sigmoid", "Identity", "Where"}
COPIED = {"ScatterND", "ScatterElements", "CumSum", "Softmax"}
"""Operators whose result has the shape of the first input."""


def follow_axes(state: WalkState, node: onnx.NodeProto) -> None:
    """Completes the axes of a node's outputs, if those of its inputs are known."""
    if node.op_type == "Reshape":
        return _reshaped(state, node)
    known = state.axes.get(node.input[0]) if node.input else None
    made = state.axes.get(node.output[0]) if node.output else None
    if known is None or (made is not None and all(map(state.is_followed, made))):
        return None
    if node.op_type == "Transpose":
        named = (list(one.ints) for one in node.attribute if one.name == "perm")
        order = next(named, list(range(len(known)))[::-1])
        state.axes[node.output[0]] = [known[at] for at in order]
    elif node.op_type in COPIED:
        state.axes[node.output[0]] = known
    elif node.op_type == "Slice":
        _cut(state, node, known)
    elif node.op_type == "Split":
        _split(state, node, known)
    elif node.op_type == "Expand":
        _expand(state, node)
    elif node.op_type == "Concat":
        _join(state, node)
    elif node.op_type in ELEMENT_BY_ELEMENT:
        _broadcast(state, node)
    return None


def _cut(state: WalkState, node: onnx.NodeProto, known: AxisSizes) -> None:
    """Keeps the axes that a Slice does not cut; the others are those of shape inference."""
    made = state.axes.get(node.output[0]) or [None] * len(known)
    which = state.values.get(node.input[3]) if len(node.input) > 3 else None
    if isinstance(which, ConstantValue) and len(made) == len(known):
        cut = {int(axis) % len(known) for axis in which.array.ravel()}
        state.axes[node.output[0]] = [made[at] if at in cut else axis for at, axis in enumerate(known)]


def _split(state: WalkState, node: onnx.NodeProto, known: AxisSizes) -> None:
    sizes = state.values.get(node.input[1]) if len(node.input) > 1 else None
    axis = attribute(node, "axis", 0) % len(known) if known else 0
    if isinstance(sizes, ConstantValue) and sizes.array.size == len(node.output):
        for name, size in zip(node.output, sizes.array.ravel().tolist(), strict=True):
            state.axes[name] = [int(size) if at == axis else one for at, one in enumerate(known)]


def _expand(state: WalkState, node: onnx.NodeProto) -> None:
    """The axes of an Expand of axes of 1: the list of lengths that it is given."""
    shape = state.values.get(node.input[1])
    parts = state.parts(node.input[1], shape) if shape is not None else None
    if parts is not None and set(state.axes[node.input[0]]) <= {1}:
        state.name_axes(node.output[0], parts)


def _join(state: WalkState, node: onnx.NodeProto) -> None:
    """The axes of a Concat: the sum of the lengths along its axis, the others as in the first input."""
    given = [state.lengths(name) for name in node.input]
    first = given[0]
    if not first or any(lengths is None or len(lengths) != len(first) for lengths in given):
        return
    axis = attribute(node, "axis", 0) % len(first)
    joined = sum((lengths[axis] for lengths in given[1:] if lengths), first[axis])
    state.name_axes(node.output[0], tuple(joined if at == axis else one for at, one in enumerate(first)))


def _broadcast(state: WalkState, node: onnx.NodeProto) -> None:
    """The broadcast axes of all inputs; a number wins over a name."""
    given = [state.axes.get(name) for name in node.input]
    if any(axes is None for axes in given):
        return
    rank = max(len(axes or []) for axes in given)
    made: AxisSizes = []
    for at in range(-rank, 0):
        sizes = {(axes or [])[at] for axes in given if len(axes or []) >= -at} - {1}
        numbers = [size for size in sizes if isinstance(size, int)]
        made.append(next(iter(sizes), 1) if len(sizes) < 2 else numbers[0] if numbers else None)
    state.axes[node.output[0]] = made


def _reshaped(state: WalkState, node: onnx.NodeProto) -> None:
    """The axes of a Reshape whose shape is a list of lengths; -1 is the quotient of the input and the others."""
    shape = state.values.get(node.input[1])
    parts = state.parts(node.input[1], shape) if shape is not None else None
    before = state.lengths(node.input[0])
    if parts is None or before is None or attribute(node, "allowzero", 0):
        return
    if any(not part.terms and part.number == 0 for part in parts[len(before) :]):
        return
    # 0 is the axis of the input at the same place
    parts = tuple(part if part.terms or part.number else before[at] for at, part in enumerate(parts))
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


def _left(whole: list[AffineForm], taken: list[AffineForm]) -> AffineForm | None:
    """A product of axes divided by others; None if more than one axis of the call is left."""
    left = [form for form in whole if form.terms]
    for form in (form for form in taken if form.terms):
        if form.key() not in [one.key() for one in left]:
            return None
        left.remove(next(one for one in left if one.key() == form.key()))
    number = prod(form.number for form in whole if not form.terms)
    by = prod(form.number for form in taken if not form.terms)
    if not by or (len(left) > 1 and number != by):
        return None
    if len(left) > 1:
        return made_of("Size", left)
    return left[0].times(number / by) if left else AffineForm(number=number // by)
