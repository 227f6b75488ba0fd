"""EntryPoints: where a value that follows from the call goes into what the model computes, after which nobody follows it.

A model needs few of them: masks, rotary cosines and sines, and slopes of positions that are added to the scores of a
softmax. Whatever else goes in would come out as a number that may be compared with anything.
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

LOUD = 10.0
"""A number that is added to what the model computes and is larger than this moves a threshold."""

WHOLE = INTEGERS | {onnx.TensorProto.BOOL, onnx.TensorProto.UINT32, onnx.TensorProto.UINT64}
"""Types of what is chosen or counted: experts, tokens."""

TURNS = {"Add", "Mul", "RotaryEmbedding", "GroupQueryAttention"}
"""Operators that cosines and sines may go into."""

MASKED = {"Attention": 3, "GroupQueryAttention": 10}
"""The input that is added to scores."""

FAR = 12
"""Steps between a meeting and the scores."""

ON_THE_WAY = {"Add", "Cast", "Identity", "Reshape", "Transpose", "Unsqueeze", "Squeeze", "Expand", "Where", "Mul"}
"""Operators between scores and their softmax."""


class EntryPoints:
    """Looks at nodes that read what the model computes and what follows from the call.

    Args:
        state: of the walk.
        judge: takes what is found.
    """

    def __init__(self, state: WalkState, judge: DecisionJudge) -> None:
        self.state, self.judge = state, judge

    def at(self, node: onnx.NodeProto, inputs: list[Value | None]) -> None:
        """One node, of which an input at least is data."""
        op = node.op_type
        if op == "Equal" and any(self._may_be_fractional(node, at, value) for at, value in enumerate(inputs)):
            self.judge.flag(node, "asks what the model computes for one number", certain=False)
        if op == "Cast" and self._becomes_whole(node):
            self.judge.flag(node, "rounds what the model computes", certain=False)
        if op in COMPARISONS or op in LIMITS:
            return
        places = {*BOUNDS.get(op, ()), *LAYOUTS.get(op, ()), *([INDEXED[op]] if op in INDEXED else [])}
        if op in ("Slice", "Pad"):
            places |= {3, 4}
        for at, value in enumerate(inputs):
            if isinstance(value, InputValue) and at not in places:
                for form in value.forms:
                    self._meets(node, at, form)
            elif isinstance(value, ConstantValue) and op in ("Add", "Sub", "Sum") and value.array.dtype.kind in "fiu":
                for number in _extremes(value):
                    self._sounds(node, number)

    def _may_be_fractional(self, node: onnx.NodeProto, at: int, value: Value | None) -> bool:
        return isinstance(value, ModelValue) and self.state.types.get(node.input[at]) not in WHOLE

    def _becomes_whole(self, node: onnx.NodeProto) -> bool:
        to = next((one.i for one in node.attribute if one.name == "to"), 0)
        return (
            to in WHOLE and node.input[0] not in self.state.binary and self.state.types.get(node.input[0]) not in WHOLE
        )

    def _meets(self, node: onnx.NodeProto, at: int, form: AffineForm) -> None:
        op, kind = node.op_type, form.kind
        if at in LENGTHS_OF_CACHE.get(op, ()):
            self.judge.decision(node, form)
            return
        for number in (form.number, *form.terms.values()):
            if kind < ValueKind.UNKNOWN:
                self._sounds(node, number)
        if kind is ValueKind.BINARY or (kind is ValueKind.PERIODIC and op in TURNS):
            return
        if at == MASKED.get(op):
            return
        if op == "Add" and not form.number and self._ends_in(node, {"Softmax"}):
            return
        if op == "Mul" and _is_bent(form) and self._ends_in(node, {"Softmax", "MatMul", "Attention"}):
            return
        self.judge.flag(node, f"puts {sources_text(form)} into what the model computes", certain=False)

    def _sounds(self, node: onnx.NodeProto, number: float) -> None:
        """A number that goes into a sum."""
        if LOUD < abs(number) < LARGEST and not self.judge.numbers.bounds_data(number):
            self.judge.flag(node, f"adds {number:g} to what the model computes", certain=False)

    def _ends_in(self, node: onnx.NodeProto, ends: set[str]) -> bool:
        """Whether all that becomes of a result goes into scores or their softmax, of which it moves no threshold."""
        made, steps = [node], 0
        while made and steps < FAR:
            steps += 1
            read = [reader for one in made for reader in self.state.readers.get(one.output[0], [])]
            if not read or any(reader.op_type not in {*ON_THE_WAY, *ends} for reader in read):
                return False
            made = [reader for reader in read if reader.op_type not in ends]
        return not made


def _is_bent(form: AffineForm) -> bool:
    """Whether a form follows the logarithm of a length or a position, by which scores are scaled."""
    return (is_of("Exp", form) or is_of("Log", form)) and form.number in (0, 1)


def _extremes(value: ConstantValue) -> list[float]:
    array = value.array
    finite = array[np.isfinite(array)] if array.dtype.kind == "f" else array
    return [float(finite.min()), float(finite.max())] if finite.size else []
