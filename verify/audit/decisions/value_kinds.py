"""Kinds of values in a graph: constants, values that depend on the call only, and values that the model computes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from llmconv.tensors import Array
from llmconv.verify.audit.decisions.affine_forms import INDEX, AffineForm, atom, made_of

LISTED = 64
"""Maximum number of elements of a list that are followed one by one."""


@dataclass(frozen=True)
class ConstantValue:
    """A constant of the graph.

    Attributes:
        array: its elements; bfloat16, which numpy itself does not have, as float32.
        step: one unit in the last place of 1 if the elements were bfloat16; else 0.
    """

    array: Array
    step: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        if self.array.dtype.name == "bfloat16":
            object.__setattr__(self, "step", 2.0**-7)
            object.__setattr__(self, "array", self.array.astype(np.float32))

    @property
    def number(self) -> float | None:
        """The value of all elements, if they are equal."""
        if not self.array.size or self.array.dtype.kind not in "fiub":
            return None
        first = self.array.ravel()[0]
        return float(first) if self.array.size == 1 or bool((self.array == first).all()) else None


@dataclass(frozen=True)
class InputValue:
    """A value that depends only on lengths, batch size, positions, token ids or mask, and on no weight.

    Attributes:
        form: the affine form of its elements.
        parts: the form of each element of a list of lengths; None where all have `form`.
    """

    form: AffineForm
    parts: tuple[AffineForm, ...] | None = None

    @property
    def forms(self) -> tuple[AffineForm, ...]:
        """All forms of its elements."""
        return self.parts if self.parts is not None else (self.form,)

    @classmethod
    def of_parts(cls, parts: tuple[AffineForm, ...]) -> InputValue:
        """A list of lengths; the elements of a very long list are not distinguished."""
        return cls(parts[0] if len(parts) == 1 else made_of("list", parts), parts if len(parts) <= LISTED else None)


@dataclass(frozen=True)
class ModelValue:
    """A weight of the model, or a value computed from weights."""


@dataclass(frozen=True)
class ForeignDecision:
    """A node that decides by a number that is not one of the model's.

    Attributes:
        node: name of the node.
        op: its operator.
        text: the decision, in words.
        certain: the node decides by that number; False if the operator cannot be analyzed.
        point: the node tests for that single number, which no field of the config contains.
        number: the largest number in the decision; 0 if the operator cannot be analyzed.
    """

    node: str
    op: str
    text: str
    certain: bool = True
    point: bool = False
    number: float = 0.0


@dataclass
class AuditFindings:
    """The result of the walk over a graph.

    Attributes:
        findings: nodes that decide by other numbers than the model's.
        decisions: number of nodes that decide.
        numbers: the numbers that they decide by.
    """

    findings: list[ForeignDecision] = field(default_factory=list)
    decisions: int = 0
    numbers: set[float] = field(default_factory=set)


Value = ConstantValue | InputValue | ModelValue


def as_form(value: Value) -> AffineForm | None:
    """The form of a value's elements; None for model values and constants that are neither a number nor an index."""
    if isinstance(value, InputValue):
        return value.form
    if isinstance(value, ConstantValue) and (number := value.number) is not None and np.isfinite(number):
        return AffineForm(number=number)
    if isinstance(value, ConstantValue) and value.array.dtype.kind in "iu" and value.array.size > 1:
        row = value.array.ravel()  # graphs with fixed axes contain indices as constants
        if (np.diff(row) != 1).any():
            return None
        first = float(row[0])
        return atom(f"index to {value.array.size}", INDEX) + AffineForm(number=first)
    return None


def as_parts(value: Value) -> tuple[AffineForm, ...] | None:
    """The form of each element of a list; None where they are unknown."""
    if isinstance(value, InputValue):
        return value.parts
    if (
        isinstance(value, ConstantValue)
        and value.array.ndim <= 1
        and value.array.size <= LISTED
        and value.array.dtype.kind in "iu"
    ):
        return tuple(AffineForm(number=float(number)) for number in value.array.ravel())
    return None


def forms_of(values: Iterable[Value], *, parts: bool = False) -> list[AffineForm]:
    """The forms of the values that have one; with `parts`, those of the elements instead of that of a list."""
    found: list[AffineForm] = []
    for value in values:
        listed = as_parts(value) if parts and isinstance(value, InputValue) else None
        form = as_form(value)
        found += listed if listed is not None else [form] if form is not None else []
    return found
