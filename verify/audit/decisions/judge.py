"""DecisionJudge: tests whether decisions of a graph use numbers of the model, and collects those that do not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx

from llmconv.tensors import Array
from llmconv.verify.audit.decisions.affine_forms import BLOCKS, LENGTH, WITHIN, AffineForm, ValueKind, atom, made_of
from llmconv.verify.audit.decisions.config_numbers import ConfigNumbers
from llmconv.verify.audit.decisions.value_kinds import AuditFindings, ForeignDecision

FEW = 64
"""Numbers of tokens or sequences up to this are reached by the scenarios."""

OF_LENGTH = atom("length", LENGTH)


class DecisionJudge:
    """Collects the decisions of a graph.

    Args:
        numbers: the numbers of the model.
    """

    def __init__(self, numbers: ConfigNumbers) -> None:
        self.numbers, self.found = numbers, AuditFindings()

    def decision(self, node: onnx.NodeProto, form: AffineForm, *, rounded: bool = False) -> None:
        """A node that decides by whether a form is zero.

        Args:
            node: the node.
            form: the compared value.
            rounded: the node decides by where the form reaches the next whole number.
        """
        if not form.terms or self._is_within_a_block(form):
            return
        if form.kind > ValueKind.COUNT:
            if node.op_type == "Div":
                return  # sizes of heads; later decisions by them are not analyzed either
            self.flag(node, f"decides on {sources_text(form)} by a value that is not analyzed", certain=False)
            return
        self.found.decisions += 1
        self.found.numbers |= {form.offset}
        if not (self.numbers.explain_rounding(form) if rounded else self.numbers.explain(form)):
            point = node.op_type == "Equal" and form.offset > FEW and not self.numbers.bounds_data(form.offset)
            text = f"decides on {sources_text(form)} by {_numbers_text(form, rounded)}"
            self.flag(node, text, point=point, number=max(form.offset, *form.factors))

    def offset(self, node: onnx.NodeProto, form: AffineForm) -> None:
        """A node whose result no longer contains the number of a form, so the number must be the model's."""
        if form.terms and not self.numbers.knows(form.offset, form):
            self.flag(node, f"decides on {sources_text(form)} by {form.offset:g}", number=form.offset)

    def is_of_the_call(self, size: AffineForm) -> bool:
        """Whether an axis is an unchanged axis of the call, or has a size known to the model or the graph."""
        if not size.terms:
            return self.numbers.knows(size.number, OF_LENGTH)
        return size.kind is ValueKind.COUNT and len(size.terms) == 1 and not size.number and size.factors == [1]

    def _is_within_a_block(self, form: AffineForm) -> bool:
        """Whether a form halves blocks of tokens repeatedly, as in the inverse of a triangular matrix."""
        numbers = [int(number) for number in (form.offset, *form.factors) if float(number).is_integer()]
        halves = len(numbers) == 1 + len(form.terms) and all(not number & (number - 1) for number in numbers)
        return form.sources == {WITHIN} and form.kind <= ValueKind.COUNT and halves and max(numbers) <= max(BLOCKS)

    def decisions(self, node: onnx.NodeProto, forms: Sequence[AffineForm], *, rounded: bool = False) -> None:
        """A decision on each form that depends on the call, compared with each form that is a number.

        Args:
            node: the node.
            forms: the compared values.
            rounded: as for `decision`.
        """
        cuts = [form.number for form in forms if not form.terms] or [0.0]
        for form in (form for form in forms if form.terms):
            for number in cuts:
                self.decision(node, form + AffineForm(number=-number), rounded=rounded)

    def choices(self, node: onnx.NodeProto, forms: Sequence[AffineForm], numbers: Iterable[float] = ()) -> None:
        """A node that selects from or concatenates values: numbers among them must be the model's.

        Args:
            node: the node.
            forms: its inputs.
            numbers: further numbers among its inputs.
        """
        call = [form for form in forms if form.terms]
        for form in call:
            if form.kind is not ValueKind.PERIODIC or node.op_type != "Concat":
                self.decision(node, form)
        whole = made_of("", call) if call else OF_LENGTH
        for number in (*numbers, *(form.number for form in forms if not form.terms)):
            if call and not self.numbers.knows(abs(number), whole):
                self.flag(node, f"combines {number:g} with {sources_text(whole)}", certain=False, number=abs(number))

    def knows_lengths(self, numbers: Array) -> bool:
        """Whether lengths may be compared with all these numbers."""
        return all(self.numbers.knows(abs(float(number)), OF_LENGTH) for number in numbers.ravel())

    def flag(
        self, node: onnx.NodeProto, text: str, *, certain: bool = True, point: bool = False, number: float = 0.0
    ) -> None:
        """Records a node that decides by other numbers.

        Args:
            node: the node.
            text: the decision, in words.
            certain: as in `ForeignDecision`.
            point: as in `ForeignDecision`.
            number: as in `ForeignDecision`.
        """
        name = node.name or node.output[0]
        self.found.findings.append(ForeignDecision(name, node.op_type, text, certain, point, number))


def sources_text(form: AffineForm) -> str:
    """The sources of a form in words, such as `length and mask`."""
    return " and ".join(sorted(form.sources)) or "a number"


def _numbers_text(form: AffineForm, rounded: bool) -> str:
    """The numbers of a form in words, such as `3817 and multiples of 256`."""
    factors = [abs(factor) for factor in form.terms.values()] if rounded else form.factors
    multiples = [f"multiples of {factor:g}" for factor in factors if factor != 1]
    return " and ".join([f"{form.offset:g}", *multiples[:2]])
