"""Results: what nodes make of values that follow from the call alone, and of constants."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

from llmconv.tensors import Array
from llmconv.verify.decisions.forms import LENGTH, PLACE, POSITION, TOKEN, WITHIN, Form, atom, is_of, made_of
from llmconv.verify.decisions.frequencies import FREQUENCIES, is_flat_power, is_frequency
from llmconv.verify.decisions.judge import Judge, said
from llmconv.verify.decisions.operators import (
    COMPARISONS,
    CURVES,
    EXACT_BITS,
    INTEGERS,
    LOGIC,
    PICKS,
    PLAIN,
    ROUNDINGS,
    SAME,
    SUMS,
    attribute,
)
from llmconv.verify.decisions.state import State
from llmconv.verify.decisions.values import Call, Data, Known, Value, as_form, as_parts, forms_of

BLOCK = 64
"""Scans go by blocks of so many tokens; a full suite's prompts fill one, so what is decided within one is seen."""

FOLDED = 1 << 22
"""Elements of constants that are computed with."""


class Results:
    """What nodes make.

    Args:
        state: of the walk.
        judge: takes the decisions.
    """

    def __init__(self, state: State, judge: Judge) -> None:
        self.state, self.judge = state, judge

    def lengths(self, node: onnx.NodeProto) -> Value:
        """Of Shape and Size."""
        forms = self.state.lengths(node.input[0])
        if forms is None:
            return Call(atom(f"shape of {node.input[0]}", LENGTH))
        if node.op_type == "Size":
            return Call(made_of("Size", forms))
        parts = tuple(forms[attribute(node, "start", 0) : attribute(node, "end", len(forms))])
        if all(not form.terms for form in parts):
            return Known(np.array([int(form.number) for form in parts], np.int64))
        return Call.of_parts(parts)

    def counted(self, inputs: list[Value | None]) -> Value:
        """Of Range."""
        start, stop, step = (as_form(value) if value else None for value in inputs)
        if start is None or stop is None or step is None:
            return Data()
        if not (start.terms or stop.terms or step.terms):
            return Known(np.arange(start.number, stop.number, step.number or 1.0))
        source = WITHIN if stop.sources == {WITHIN} else PLACE
        return Call(start + atom(f"index to {stop.key()}", source))

    def folded(self, node: onnx.NodeProto, given: list[Value]) -> Value:
        """A constant made of constants; what is not computed is known to be changed."""
        arrays = [value.array for value in given if isinstance(value, Known)]
        if sum(array.size for array in arrays) <= FOLDED:
            try:
                return Known(evaluated(node, arrays))
            except Exception:
                pass
        self.state.changed |= set(node.output)
        return Data()

    def of_call(self, node: onnx.NodeProto, given: list[Value]) -> Value:
        """Of everything that reads the call and no data."""
        op, first = node.op_type, given[0]
        if op in SAME:
            return _relaid(op, first)
        if op == "Cast":
            return self._cast(node, first)
        if op in SUMS and (made := self._sum(node, given)) is not None:
            return made
        if op == "Concat":
            return self._concat(node, given)
        if op in PICKS:
            return self._picked(node, given)
        if op == "ConstantOfShape":
            self.state.name_axes(node.output[0], self.state.parts(node.input[0], first) or ())
            return Call(Form(number=_fill(node)))
        if op == "Where":
            frequencies = all(is_frequency(value) for value in given[1:])
            self.judge.choices(node, forms_of(given), [] if frequencies else _numbers(given))
            return Call(made_of(FREQUENCIES if frequencies else "Where", forms_of(given)))
        return self._decided(node, given)

    def _cast(self, node: onnx.NodeProto, first: Value) -> Value:
        form, to = as_form(first), attribute(node, "to", onnx.TensorProto.FLOAT)
        if form is None or not form.terms:
            return first
        if to in EXACT_BITS and self.state.types.get(node.input[0]) != onnx.TensorProto.BOOL:
            self.judge.flag(node, f"casts {said(form)} to a type that is exact up to {2 ** EXACT_BITS[to]} only")
        is_whole = all(float(factor).is_integer() for factor in (*form.terms.values(), form.number))
        if to == onnx.TensorProto.BOOL or (to in INTEGERS and not is_whole):
            self.judge.decision(node, form, rounded=to != onnx.TensorProto.BOOL)
            return Call(made_of("Cast", [form]))
        return first

    def _sum(self, node: onnx.NodeProto, given: list[Value]) -> Value | None:
        """Sums and multiples; None of what is neither."""
        op, forms = node.op_type, forms_of(given)
        if len(forms) < len(given):  # frequencies, slopes; a bias is none of the model's
            return Call(made_of(f"{op} {node.input[0]} {node.input[1]}", forms)) if op in ("Mul", "Div") else None
        if op == "Neg":
            return Call(forms[0].times(-1))
        if op in ("Add", "Sum"):
            return Call(sum(forms[1:], forms[0]))
        if op == "Sub":
            return Call(forms[0] + forms[1].times(-1))
        for one, other in (forms, forms[::-1]) if op == "Mul" else ():
            if not other.terms:
                return Call(one.times(other.number))
        is_float = self.state.types.get(node.output[0]) not in INTEGERS
        if op == "Div" and is_float and not forms[1].terms and forms[1].number:
            return Call(forms[0].times(1 / forms[1].number))
        return None

    def _concat(self, node: onnx.NodeProto, given: list[Value]) -> Value:
        parts = [self.state.parts(name, value) for name, value in zip(node.input, given, strict=True)]
        if all(part is not None for part in parts):
            return Call.of_parts(tuple(form for part in parts for form in part or ()))
        forms = forms_of(given)
        if len(forms) == len(given) and len({form.key() for form in forms}) == 1:
            return Call(forms[0])
        self.judge.choices(node, forms, _numbers(given))
        return Call(made_of("Concat", forms))

    def _picked(self, node: onnx.NodeProto, given: list[Value]) -> Value:
        """Elements of a list by their number; of anything else, elements of the same form."""
        first, parts = given[0], as_parts(given[0])
        if not isinstance(first, Call):  # a table
            return Call(made_of(f"{node.op_type} {node.input[0]}", forms_of(given[1:])))
        if parts is None or not all(isinstance(value, Known) for value in given[1:]):
            return Call(first.form)
        try:
            chosen = evaluated(node, [np.arange(len(parts)), *(v.array for v in given[1:] if isinstance(v, Known))])
        except Exception:  # an index beyond the list
            return Call(first.form)
        return Call.of_parts(tuple(parts[int(at)] for at in np.atleast_1d(chosen)))

    def _decided(self, node: onnx.NodeProto, given: list[Value]) -> Value:
        """Everything else decides, for which it needs numbers of the model."""
        op, forms = node.op_type, forms_of(given, parts=True)
        if op in ("Min", "Mod") and any(not form.terms and 0 < form.number <= BLOCK for form in forms):
            return Call(made_of(op, [form for form in forms if form.terms]).within_a_block())
        if op == "Pow" and is_flat_power(given):
            self.judge.decision(node, forms[0])
            return Call(made_of(op, forms))
        if op.startswith("Scatter") and isinstance(given[1], Known) and self.state.writes_along_a_head(node, given[1]):
            return Call(made_of(op, forms_of([given[0], given[2]], parts=True)))
        if op not in LOGIC and any(as_form(value) is None for value in given):
            self.judge.flag(node, f"{op} of {said(made_of('', forms))} with a table of numbers", certain=False)
        if op not in PLAIN:
            self.judge.flag(node, f"{op} of {said(made_of('', forms))}, of which nothing can be said", certain=False)
        elif op == "Mul":
            self._product(node, forms)
        elif op == "Exp":
            self._power(node, forms[0])
        elif op not in LOGIC and op not in CURVES:
            self.judge.decisions(node, _cut(op, given, forms), rounded=op in ROUNDINGS)
        return Call(made_of(op, forms))

    def _product(self, node: onnx.NodeProto, forms: list[Form]) -> None:
        """Masks and sizes are multiplied; powers of a position are a step when they are high enough."""
        self.judge.decisions(node, forms)
        if sum(bool(form.sources & {PLACE, POSITION, TOKEN}) and not is_of(FREQUENCIES, form) for form in forms) > 1:
            self.judge.flag(node, f"multiplies {said(forms[0])} by {said(forms[1])}")

    def _power(self, node: onnx.NodeProto, form: Form) -> None:
        """A power of a logarithm is one of the position; any other grows from nothing to everything."""
        if not is_of("Log", form):
            self.judge.flag(node, f"raises a number to the power of {said(form)}")


def _cut(op: str, given: list[Value], forms: list[Form]) -> list[Form]:
    """What a node compares, as one form for each comparison."""
    if op == "Div" and len(forms) == 2 and not forms[1].terms and 0 < forms[1].number <= BLOCK:
        return forms[:1]
    if op in COMPARISONS and len(given) == 2:
        left, right = (as_parts(value) or forms_of([value]) for value in given)
        if left and right and (len(left) == len(right) or 1 in (len(left), len(right))):
            pairs = zip(left * max(1, len(right) // len(left)), right * max(1, len(left) // len(right)), strict=True)
            return [one + other.times(-1) for one, other in pairs]
    return forms


def _numbers(values: list[Value]) -> list[float]:
    """The different numbers of the constants that are lists of them."""
    arrays = [one.array for one in values if isinstance(one, Known) and as_form(one) is None]
    return sorted({float(number) for array in arrays if array.dtype.kind in "fiub" for number in np.unique(array)})


def _relaid(op: str, first: Value) -> Value:
    """The same elements; a list stays one where it only loses or gains an axis."""
    if isinstance(first, Call) and first.parts is not None and op not in ("Squeeze", "Identity", "Unsqueeze"):
        return Call(first.form)
    return first


def _fill(node: onnx.NodeProto) -> float:
    return next((float(numpy_helper.to_array(a.t).ravel()[0]) for a in node.attribute if a.name == "value"), 0.0)


def evaluated(node: onnx.NodeProto, arrays: list[Array]) -> Array:
    """The node's first result on constants, by the reference implementation of ONNX."""
    from onnx.reference import ReferenceEvaluator  # noqa: PLC0415 - not needed by most graphs

    feeds = dict(zip([name for name in node.input if name], arrays, strict=True))
    ports = [
        onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feeds.items()
    ]
    graph = onnx.helper.make_graph([node], "constant", ports, [onnx.ValueInfoProto(name=node.output[0])])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)])
    found = ReferenceEvaluator(model).run([node.output[0]], feeds)
    return np.asarray(list(found)[0])
