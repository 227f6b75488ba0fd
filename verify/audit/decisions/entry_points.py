"""EntryPoints: nodes where values of the call enter model values, after which they are no longer analyzed.

A model needs few of them: masks, rotary cosines and sines, and slopes of positions that are added to attention scores.
Any other value could later be compared with any number.
"""

from __future__ import annotations

import numpy as np
import onnx

from llmconv.verify.audit.decisions.affine_forms import AffineForm, ValueKind, is_of
from llmconv.verify.audit.decisions.judge import DecisionJudge, sources_text
from llmconv.verify.audit.decisions.lookup_tables import LARGEST
from llmconv.verify.audit.decisions.operators import (
    BOUNDS,
    COMPARISONS,
    INDEXED,
    INTEGERS,
    LAYOUTS,
    LENGTHS_OF_CACHE,
    LIMITS,
)
from llmconv.verify.audit.decisions.state import WalkState
from llmconv.verify.audit.decisions.value_kinds import ConstantValue, InputValue, ModelValue, Value

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
    """Checks nodes that read both model values and values of the call.

    Args:
        state: the state of the walk.
        judge: receives the findings.
    """

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
