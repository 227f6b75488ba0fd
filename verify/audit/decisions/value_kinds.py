"""What is known of a graph's value: a constant, something that follows from the call alone, or data of the model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from llmconv.tensors import Array
from llmconv.verify.audit.decisions.affine_forms import PLACE, AffineForm, atom, made_of

LISTED = 64
"""Elements of a list that are followed one by one."""


@dataclass(frozen=True)
class ConstantValue:
    """A constant of the graph.

    Attributes:
        array: its content.
    """

    array: Array

    @property
    def number(self) -> float | None:
        """Its value, where all elements have the same."""
        if not self.array.size or self.array.dtype.kind not in "fiub":
            return None
        first = self.array.ravel()[0]
        return float(first) if self.array.size == 1 or bool((self.array == first).all()) else None


@dataclass(frozen=True)
class InputValue:
    """A value that follows from lengths, batch, positions, token ids or mask, and from no weight.

    Attributes:
        form: of its elements.
        parts: the form of each element, of a list of lengths; None where they all have `form`.
    """

    form: AffineForm
    parts: tuple[AffineForm, ...] | None = None

    @property
    def forms(self) -> tuple[AffineForm, ...]:
        """All forms of its elements."""
        return self.parts if self.parts is not None else (self.form,)

    @classmethod
    def of_parts(cls, parts: tuple[AffineForm, ...]) -> InputValue:
        """A list of lengths; one that is longer than any tensor has axes is not told apart."""
        return cls(parts[0] if len(parts) == 1 else made_of("list", parts), parts if len(parts) <= LISTED else None)


@dataclass(frozen=True)
class ModelValue:
    """What the model computes, or holds."""


@dataclass(frozen=True)
class ForeignDecision:
    """A node that decides by a number that is none of the model's.

    Attributes:
        node: its name.
        op: its operator.
        text: what it decides on, and by what.
        certain: it decides by that number, as opposed to an operator of which nothing can be said.
        point: it asks for that number alone, and no field of the config has it.
    """

    node: str
    op: str
    text: str
    certain: bool = True
    point: bool = False


@dataclass
class AuditFindings:
    """What the walk over a graph came upon.

    Attributes:
        findings: nodes that decide by other numbers.
        decisions: nodes that decide at all.
        numbers: by which these decide.
    """

    findings: list[ForeignDecision] = field(default_factory=list)
    decisions: int = 0
    numbers: set[float] = field(default_factory=set)


Value = ConstantValue | InputValue | ModelValue


def as_form(value: Value) -> AffineForm | None:
    """The form of a value's elements; None of data, and of a constant of several numbers that are no index."""
    if isinstance(value, InputValue):
        return value.form
    if isinstance(value, ConstantValue) and (number := value.number) is not None and np.isfinite(number):
        return AffineForm(number=number)
    if isinstance(value, ConstantValue) and value.array.dtype.kind in "iu" and value.array.size > 1:
        row = value.array.ravel()  # a graph of fixed axes has its indices as constants
        if (np.diff(row) != 1).any():
            return None
        first = float(row[0])
        return atom(f"index to {value.array.size}", PLACE) + AffineForm(number=first)
    return None


def as_parts(value: Value) -> tuple[AffineForm, ...] | None:
    """The forms of a list's elements, one by one; None where they are not known so."""
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
    """The forms of values that have one; with `parts`, those of a list's elements in the place of the list's own."""
    found: list[AffineForm] = []
    for value in values:
        listed = as_parts(value) if parts and isinstance(value, InputValue) else None
        form = as_form(value)
        found += listed if listed is not None else [form] if form is not None else []
    return found
