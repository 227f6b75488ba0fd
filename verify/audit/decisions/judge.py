"""The judge: whether a decision is by a number of the model, and the findings where it is not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx

from llmconv.tensors import Array
from llmconv.verify.audit.decisions.affine_forms import BLOCKS, LENGTH, WITHIN, AffineForm, ValueKind, atom, made_of
from llmconv.verify.audit.decisions.config_numbers import ConfigNumbers
from llmconv.verify.audit.decisions.value_kinds import AuditFindings, ForeignDecision

FEW = 64
"""So many tokens or sequences every scenario has, or might."""

OF_LENGTH = atom("length", LENGTH)


class DecisionJudge:
    """Collects what a graph decides by.

    Args:
        numbers: of the model.
    """

    def __init__(self, numbers: ConfigNumbers) -> None:
        self.numbers, self.found = numbers, AuditFindings()

    def decision(self, node: onnx.NodeProto, form: AffineForm, *, rounded: bool = False) -> None:
        """A node that decides by where a form is zero; or, `rounded`, by where it becomes the next whole number."""
        if not form.terms or self._is_within_a_block(form):
            return
        if form.nature > ValueKind.COUNT:
            if node.op_type == "Div":
                return  # sizes of heads, of which nothing can be decided later either
            self.flag(node, f"decides on {sources_text(form)} by what is not followed", certain=False)
            return
        self.found.decisions += 1
        self.found.numbers |= {form.offset}
        if not (self.numbers.explain_rounding(form) if rounded else self.numbers.explain(form)):
            point = node.op_type == "Equal" and form.offset > FEW and not self.numbers.bounds_data(form.offset)
            self.flag(node, f"decides on {sources_text(form)} by {_numbers_text(form, rounded)}", point=point)

    def offset(self, node: onnx.NodeProto, form: AffineForm) -> None:
        """A node in whose result the number of a form would be lost."""
        if form.terms and not self.numbers.knows(form.offset, form):
            self.flag(node, f"decides on {sources_text(form)} by {form.offset:g}")

    def is_of_the_call(self, size: AffineForm) -> bool:
        """Whether an axis is one of the call's as it is, or has a size that the model or the graph is made for."""
        if not size.terms:
            return self.numbers.knows(size.number, OF_LENGTH)
        return size.nature is ValueKind.COUNT and len(size.terms) == 1 and not size.number and size.factors == [1]

    def _is_within_a_block(self, form: AffineForm) -> bool:
        """Whether a form halves blocks of tokens again and again, as the inverse of a triangular matrix is made."""
        numbers = [int(number) for number in (form.offset, *form.factors) if float(number).is_integer()]
        halves = len(numbers) == 1 + len(form.terms) and all(not number & (number - 1) for number in numbers)
        return form.sources == {WITHIN} and form.nature <= ValueKind.COUNT and halves and max(numbers) <= max(BLOCKS)

    def decisions(self, node: onnx.NodeProto, forms: Sequence[AffineForm], *, rounded: bool = False) -> None:
        """The same of several; numbers among them are where the others are cut."""
        cuts = [form.number for form in forms if not form.terms] or [0.0]
        for form in (form for form in forms if form.terms):
            for number in cuts:
                self.decision(node, form + AffineForm(number=-number), rounded=rounded)

    def choices(self, node: onnx.NodeProto, forms: Sequence[AffineForm], numbers: Iterable[float] = ()) -> None:
        """What is chosen from or put side by side: the numbers that would be lost with it have to be the model's."""
        call = [form for form in forms if form.terms]
        for form in call:
            if form.nature is not ValueKind.PERIODIC or node.op_type != "Concat":
                self.decision(node, form)
        whole = made_of("", call) if call else OF_LENGTH
        for number in (*numbers, *(form.number for form in forms if not form.terms)):
            if call and not self.numbers.knows(abs(number), whole):
                self.flag(node, f"puts {number:g} beside {sources_text(whole)}", certain=False)

    def knows_lengths(self, numbers: Array) -> bool:
        """Whether lengths may be compared with all of the numbers."""
        return all(self.numbers.knows(abs(float(number)), OF_LENGTH) for number in numbers.ravel())

    def flag(self, node: onnx.NodeProto, text: str, *, certain: bool = True, point: bool = False) -> None:
        """A node that decides otherwise."""
        self.found.findings.append(ForeignDecision(node.name or node.output[0], node.op_type, text, certain, point))


def sources_text(form: AffineForm) -> str:
    """`position`, `length and mask`."""
    return " and ".join(sorted(form.sources)) or "a number"


def _numbers_text(form: AffineForm, rounded: bool) -> str:
    """`3817 and multiples of 256`."""
    factors = [abs(factor) for factor in form.terms.values()] if rounded else form.factors
    multiples = [f"multiples of {factor:g}" for factor in factors if factor != 1]
    return " and ".join([f"{form.offset:g}", *multiples[:2]])
