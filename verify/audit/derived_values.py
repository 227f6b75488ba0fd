"""DerivedValues: the results of nodes whose inputs are constants or depend on the call only.

It recognizes rotary frequencies that depend on the length: `longrope` selects from two tables, `dynamic` computes one.

    dynamic    1 / (base * (factor * length / original - (factor - 1)) ** (dim / (dim - 2))) ** (i / dim)

Source: transformers modeling_rope_utils.py.
"""

from __future__ import annotations

from math import prod

import numpy as np
import onnx
from onnx import numpy_helper

from llmconv.tensors import Array
from llmconv.verify.audit.config_numbers import DecisionJudge, sources_text
from llmconv.verify.audit.lookups import LARGEST, TABLE_ROWS, kind_of, odd_row
from llmconv.verify.audit.state import (
    BLOCK,
    BLOCKS,
    COMPARISONS,
    EXACT_BITS,
    HALVES,
    INDEX,
    INTEGERS,
    LENGTH,
    LOGIC,
    NONLINEAR,
    PERIODIC,
    POSITION,
    ROUNDINGS,
    SAME,
    SELECTIONS,
    SMALLEST_HALF,
    SUMMED,
    SUMS,
    TOKEN,
    TRANSPARENT,
    WITHIN,
    AffineForm,
    ConstantValue,
    InputValue,
    ModelValue,
    Value,
    ValueKind,
    WalkState,
    as_form,
    as_parts,
    atom,
    attribute,
    forms_of,
    is_of,
    made_of,
)

FOLDED_TOGETHER = 1 << 25
"""Maximum number of elements of all folded constants together."""


class DerivedValues:
    """Computes the results of nodes; `judge` receives the decisions."""

    def __init__(self, state: WalkState, judge: DecisionJudge) -> None:
        self.state, self.judge = state, judge
        self._room = FOLDED_TOGETHER

    def lengths(self, node: onnx.NodeProto) -> Value:
        """Result of Shape and Size."""
        forms = self.state.lengths(node.input[0])
        if forms is None:
            return InputValue(atom(f"shape of {node.input[0]}", LENGTH, kind=ValueKind.UNKNOWN))
        if node.op_type == "Size":
            return self._size(forms)
        parts = tuple(forms[attribute(node, "start", 0) : attribute(node, "end", len(forms))])
        if all(not form.terms for form in parts):
            return ConstantValue(np.array([int(form.number) for form in parts], np.int64))
        return InputValue.of_parts(parts)

    def _size(self, forms: list[AffineForm]) -> Value:
        """A product of axes, known if at most one of them is not a number."""
        number = float(prod(int(form.number) for form in forms if not form.terms))
        call = [form for form in forms if form.terms]
        if len(call) > 1:
            return InputValue(made_of("Size", forms, None if number == 1 else ValueKind.UNKNOWN))
        return InputValue(call[0].times(number)) if call else ConstantValue(np.array(int(number), np.int64))

    def counted(self, node: onnx.NodeProto, inputs: list[Value | None]) -> Value:
        """Result of Range."""
        start, stop, step = (as_form(value) if value else None for value in inputs)
        if start is None or stop is None or step is None:
            self.judge.flag(node, "counts by a value that is not analyzed", certain=False)
            return ModelValue()
        if not (start.terms or stop.terms or step.terms):
            whole = np.float32 if self.state.types.get(node.output[0]) not in INTEGERS else np.int64
            return self.folded(node, [ConstantValue(np.array(form.number, whole)) for form in (start, stop, step)])
        kind = ValueKind.UNKNOWN if step.terms else ValueKind.COUNT
        source = WITHIN if is_of(BLOCK, stop) else INDEX
        index = atom(f"index to {stop.key()} by {step.key()}", source, kind=kind)
        return InputValue(start + (index if step.terms else index.times(step.number)))

    def folded(self, node: onnx.NodeProto, given: list[Value]) -> Value:
        """Result of a node with constant inputs: a constant, or a changed weight if it is not computed."""
        made = (
            fold(node, [value.array for value in given if isinstance(value, ConstantValue)]) if self._room > 0 else None
        )
        if made is not None:
            self._room -= made.size
            return ConstantValue(made)
        self.state.changed |= set(node.output)
        return ModelValue()

    def of_call(self, node: onnx.NodeProto, given: list[Value]) -> Value:
        """Result of a node that reads values of the call and constants, but no model values."""
        op, first = node.op_type, given[0]
        if op in SAME:
            return _relaid(op, first)
        if op == "Cast":
            return self._cast(node, first)
        if op in SUMS and (made := self._sum(node, given)) is not None:
            return made
        if op == "MatMul" and self._is_outer(node, given):
            return self._scaled(node, forms_of(given))
        if op == "Concat":
            return self._concat(node, given)
        if op in SELECTIONS:
            return self._picked(node, given)
        if op == "ConstantOfShape":
            self.state.name_axes(node.output[0], self.state.parts(node.input[0], first) or ())
            return InputValue(AffineForm(number=_fill(node)))
        if op == "Where":
            return self._chosen(node, given)
        if op == "Abs" and (form := as_form(first)) is not None and form.kind <= ValueKind.COUNT:
            self.judge.decision(node, form)
            return InputValue(form)  # |a - b| < w decides like -w < a - b < w
        return self._decided(node, given)

    def _chosen(self, node: onnx.NodeProto, given: list[Value]) -> Value:
        """Result of Where."""
        if all(is_frequency(value) for value in given[1:]):
            self.judge.choices(node, forms_of(given[:1]))
            return InputValue(made_of(FREQUENCIES, forms_of(given), ValueKind.UNKNOWN))
        numbers = _numbers(given)
        condition = forms_of(given[:1])
        chosen = [form for form in forms_of(given[1:]) if form.terms or not self._hides(node, form.number)]
        # a value that is not analyzed may be chosen, but not decide: biases of ALiBi are masked in this way
        self.judge.choices(node, [*condition, *(one for one in chosen if one.kind is not ValueKind.UNKNOWN)], numbers)
        self._tables(node, given)
        forms = [*condition, *chosen]
        return InputValue(made_of("Where", forms, _together(forms, numbers)))

    def _hides(self, node: onnx.NodeProto, number: float) -> bool:
        """Whether a number is the smallest of the node's half-precision dtype, which stands for hidden keys."""
        smallest = SMALLEST_HALF.get(self.state.types.get(node.output[0], 0))
        return smallest is not None and number == smallest

    def _tables(self, node: onnx.NodeProto, given: list[Value]) -> None:
        """Tables that are put together with what follows from the call, place by place."""
        for value in (one for one in given if isinstance(one, ConstantValue) and as_form(one) is None):
            array = value.array
            for axis in (axis for axis, size in enumerate(array.shape) if size >= TABLE_ROWS and array.size):
                if (row := odd_row(np.moveaxis(array, axis, 0), value.step)) is not None:
                    self.judge.flag(
                        node, f"uses a table whose row {row} does not follow from the others", certain=False
                    )

    def _cast(self, node: onnx.NodeProto, first: Value) -> Value:
        form, to = as_form(first), attribute(node, "to", onnx.TensorProto.FLOAT)
        if form is None or not form.terms:
            return first
        is_rounded = self.state.half and to in HALVES and form.kind is not ValueKind.COUNT
        if to in EXACT_BITS and not is_rounded and self.state.types.get(node.input[0]) != onnx.TensorProto.BOOL:
            self.judge.flag(node, f"casts {sources_text(form)} to a type exact up to {2 ** EXACT_BITS[to]} only")
        is_whole = all(float(factor).is_integer() for factor in (*form.terms.values(), form.number))
        if to == onnx.TensorProto.BOOL or (to in INTEGERS and not is_whole):
            self.judge.decision(node, form, rounded=to != onnx.TensorProto.BOOL)
            return InputValue(made_of("Cast", [form], ValueKind.BINARY if to == onnx.TensorProto.BOOL else None))
        return first

    def _sum(self, node: onnx.NodeProto, given: list[Value]) -> Value | None:
        """Result of a sum or multiple; None if it is neither."""
        op, forms = node.op_type, forms_of(given)
        if len(forms) < len(given):  # frequencies or slopes; models have no such bias
            return self._scaled(node, forms) if op in ("Mul", "Div") else None
        if op == "Neg":
            return InputValue(forms[0].times(-1))
        if op in ("Add", "Sum"):
            return InputValue(sum(forms[1:], forms[0]))
        if op == "Sub":
            return InputValue(forms[0] + forms[1].times(-1))
        for one, other in (forms, forms[::-1]) if op == "Mul" else ():
            if not other.terms:
                return InputValue(one.times(other.number))
        is_float = self.state.types.get(node.output[0]) not in INTEGERS
        if op == "Div" and is_float and not forms[1].terms and forms[1].number:
            return InputValue(forms[0].times(1 / forms[1].number))
        return None

    def _is_outer(self, node: onnx.NodeProto, given: list[Value]) -> bool:
        """Whether a matrix product sums one product each, as that of rotary frequencies before transformers 5.19."""
        for axis, name, value in zip((-1, -2), node.input, given, strict=True):
            sizes = self.state.lengths(name)
            is_column = isinstance(value, ConstantValue) and value.array.ndim > 1 and value.array.shape[axis] == 1
            if is_column and sizes is not None and not sizes[axis].terms and sizes[axis].number == 1:
                return True
        return False

    def _scaled(self, node: onnx.NodeProto, forms: list[AffineForm]) -> Value:
        """Product with or quotient by a table: numbers of the form disappear in it, so they must be the model's."""
        for form in forms:
            self.judge.offset(node, form)
        return InputValue(made_of(f"{node.op_type} {node.input[0]} {node.input[1]}", forms, ValueKind.UNKNOWN))

    def _concat(self, node: onnx.NodeProto, given: list[Value]) -> Value:
        parts = [self.state.parts(name, value) for name, value in zip(node.input, given, strict=True)]
        if all(part is not None for part in parts):
            return InputValue.of_parts(tuple(form for part in parts for form in part or ()))
        forms = forms_of(given)
        if len(forms) == len(given) and len({form.key() for form in forms}) == 1:
            return InputValue(forms[0])
        numbers = _numbers(given)
        self.judge.choices(node, forms, numbers)
        self._tables(node, given)
        return InputValue(made_of("Concat", forms, _together(forms, numbers)))

    def _picked(self, node: onnx.NodeProto, given: list[Value]) -> Value:
        """Selected elements: of a list by index, of other values elements of the same form."""
        first, parts = given[0], as_parts(given[0])
        if isinstance(first, ConstantValue):  # a table
            kind = kind_of(first.array) if first.array.dtype.kind in "fiub" else ValueKind.UNKNOWN
            return InputValue(made_of(f"{node.op_type} {node.input[0]}", forms_of(given[1:]), kind))
        if not isinstance(first, InputValue):
            return InputValue(made_of(f"{node.op_type} {node.input[0]}", forms_of(given[1:]), ValueKind.UNKNOWN))
        if parts is None or not all(isinstance(value, ConstantValue) for value in given[1:]):
            return InputValue(first.form)
        chosen = fold(node, [np.arange(len(parts)), *(v.array for v in given[1:] if isinstance(v, ConstantValue))])
        if chosen is None:  # index out of range
            return InputValue(first.form)
        return InputValue.of_parts(tuple(parts[int(at)] for at in np.atleast_1d(chosen)))

    def _decided(self, node: onnx.NodeProto, given: list[Value]) -> Value:  # noqa: C901 - a row for each kind
        """Result of any other node: it decides, and must do so by numbers of the model."""
        op, forms = node.op_type, forms_of(given, parts=True)
        if op == "Min" and self._is_a_block(forms):
            return InputValue(made_of(BLOCK, forms))
        if op == "Pow" and is_flat_power(given):
            self.judge.offset(node, forms[0])
            return InputValue(made_of(op, forms, ValueKind.UNKNOWN))
        if (
            op.startswith("Scatter")
            and isinstance(given[1], ConstantValue)
            and self.state.writes_along_a_head(node, given[1])
        ):
            return InputValue(made_of(op, forms_of([given[0], given[2]], parts=True)))
        if op in LOGIC:
            self._tables(node, given)
        elif any(as_form(value) is None for value in given):
            self.judge.flag(node, f"{op} of {sources_text(made_of('', forms))} with a table of numbers", certain=False)
        if op not in TRANSPARENT:
            self.judge.flag(node, f"unsupported operator: {op} of {sources_text(made_of('', forms))}", certain=False)
        elif op == "Mul":
            self._product(node, forms)
        elif op == "Exp":
            self._power(node, forms[0])
        elif op in PERIODIC or op in NONLINEAR:
            if op not in ("Log", "Sqrt") or not _is_positive(forms[0]):
                self.judge.offset(node, forms[0])
        else:
            self.judge.decisions(node, _cut(op, given, forms), rounded=op in ROUNDINGS)
        return InputValue(made_of(op, forms, self._nature(node, forms)))

    def _is_a_block(self, forms: list[AffineForm]) -> bool:
        """Whether this is the minimum of the number of new tokens and a block size."""
        numbers = {form.number for form in forms if not form.terms}
        names = {one.name for form in forms for one in form.terms}
        plain = [form for form in forms if form.terms and form.sources == {LENGTH} and self.judge.is_of_the_call(form)]
        return (
            len(forms) == 2 and bool(plain) and len(numbers) == 1 and numbers <= BLOCKS and names <= self.state.symbols
        )

    def _product(self, node: onnx.NodeProto, forms: list[AffineForm]) -> None:
        """A product of masks or sizes is fine; a product of positions is not: a high power of a position is a step."""
        for form in forms:
            self.judge.offset(node, form)
        if sum(bool(form.sources & {INDEX, POSITION, TOKEN}) and not is_of(FREQUENCIES, form) for form in forms) > 1:
            self.judge.flag(node, f"multiplies {sources_text(forms[0])} by {sources_text(forms[1])}")

    def _nature(self, node: onnx.NodeProto, forms: list[AffineForm]) -> ValueKind:
        """The possible values of the result."""
        op = node.op_type
        if op in COMPARISONS or op in LOGIC:
            return ValueKind.BINARY
        if op in PERIODIC:
            return ValueKind.PERIODIC
        if op in NONLINEAR or op not in TRANSPARENT or not any(form.terms for form in forms):
            return ValueKind.UNKNOWN
        if op in SUMMED:
            return ValueKind.COUNT if self._sums_the_call(node) else ValueKind.UNKNOWN
        return _together(forms, [])

    def _sums_the_call(self, node: onnx.NodeProto) -> bool:
        """Whether summed axes have lengths of the call or the model; otherwise the length is an unknown factor."""
        sizes = self.state.lengths(node.input[0])
        axes = self.state.values.get(node.input[1]) if len(node.input) > 1 and node.input[1] else None
        if sizes is None or (axes is not None and not isinstance(axes, ConstantValue)):
            return False
        chosen = axes.array.ravel().tolist() if isinstance(axes, ConstantValue) else range(len(sizes))
        summed = [sizes[int(axis)] for axis in chosen if -len(sizes) <= axis < len(sizes)]
        return all(self.judge.is_of_the_call(size) for size in summed)

    def _power(self, node: onnx.NodeProto, form: AffineForm) -> None:
        """The exponential of a logarithm is a power of the position; any other exponential can be a step."""
        if not is_of("Log", form):
            self.judge.flag(node, f"raises a number to the power of {sources_text(form)}")


def _cut(op: str, given: list[Value], forms: list[AffineForm]) -> list[AffineForm]:
    """The compared values, as one difference for each comparison."""
    if op in COMPARISONS and len(given) == 2:
        left, right = (as_parts(value) or forms_of([value]) for value in given)
        if left and right and (len(left) == len(right) or 1 in (len(left), len(right))):
            pairs = zip(left * max(1, len(right) // len(left)), right * max(1, len(left) // len(right)), strict=True)
            return [one + other.times(-1) for one, other in pairs]
    return forms


def _is_positive(form: AffineForm) -> bool:
    """Whether a form is always positive, so that its logarithm and root have no singularity."""
    return form.number > 0 and all(factor > 0 for factor in form.terms.values()) and form.kind <= ValueKind.COUNT


def _together(forms: list[AffineForm], numbers: list[float]) -> ValueKind:
    """Possible values of several forms and numbers together: not binary if another number is among them."""
    numbers = [*numbers, *(form.number for form in forms if not form.terms)]
    kind = max((form.kind for form in forms if form.terms), default=ValueKind.BINARY)
    odd = any(number not in (0, 1) and abs(number) < LARGEST for number in numbers)
    odd |= any(
        form.terms and (form.number not in (0, 1) or set(map(abs, form.terms.values())) != {1}) for form in forms
    )
    return ValueKind.COUNT if odd and kind is ValueKind.BINARY else kind


def _numbers(values: list[Value]) -> list[float]:
    """The distinct numbers of constants with several elements."""
    arrays = [one.array for one in values if isinstance(one, ConstantValue) and as_form(one) is None]
    return sorted({float(number) for array in arrays if array.dtype.kind in "fiub" for number in np.unique(array)})


def _relaid(op: str, first: Value) -> Value:
    """The same elements; a list remains a list if it only loses or gains an axis."""
    if isinstance(first, InputValue) and first.parts is not None and op not in ("Squeeze", "Identity", "Unsqueeze"):
        return InputValue(first.form)
    return first


def _fill(node: onnx.NodeProto) -> float:
    return next((float(numpy_helper.to_array(a.t).ravel()[0]) for a in node.attribute if a.name == "value"), 0.0)


FOLDED = 1 << 22
"""Maximum number of elements of the inputs, and of the result."""

DIMENSIONS = 8
"""Maximum number of axes of an input."""

ELEMENTWISE = frozenset([
    "Abs", "Add", "And", "Cast", "Ceil", "Cos", "Div", "Equal", "Erf", "Exp", "Floor", "Greater", "GreaterOrEqual",
    "Identity", "IsInf", "IsNaN", "Less", "LessOrEqual", "Log", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or",
    "Pow", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sin", "Softplus", "Sqrt", "Sub", "Sum", "Tanh",
    "Where", "Xor",
])  # fmt: skip
"""Operators whose result has the broadcast shape of their inputs."""

SHRINKING = frozenset([
    "ArgMax", "ArgMin", "CumSum", "Flatten", "Range", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum",
    "Reshape", "Shape", "Size", "Slice", "Split", "Squeeze", "Transpose", "Trilu", "Unsqueeze", "ScatterElements",
    "ScatterND", "Concat",
])  # fmt: skip
"""Operators whose result is not larger than their inputs together; Range is handled separately."""


def fold(node: onnx.NodeProto, arrays: list[Array]) -> Array | None:
    """The first output of a node with constant inputs, without omitted ones; None if it is not computed."""
    if node.domain not in ("", "ai.onnx"):
        return None
    if sum(array.size for array in arrays) > FOLDED or any(array.ndim > DIMENSIONS for array in arrays):
        return None
    try:
        size = _size(node, arrays)
        if size is None or size > FOLDED:
            return None
        with np.errstate(all="ignore"):
            return _evaluated(node, arrays)
    except Exception:  # invalid inputs; onnxruntime reports them
        return None


def _size(node: onnx.NodeProto, arrays: list[Array]) -> int | None:  # noqa: C901 - a row for each operator
    """Upper limit of the elements of the result; None for an operator that is not computed."""
    op = node.op_type
    if any(array.dtype.kind not in "fiub" for array in arrays):
        return None
    if op in ELEMENTWISE:
        return prod(np.broadcast_shapes(*(array.shape for array in arrays)))
    if op == "Range":
        start, stop, step = (float(array.reshape(())) for array in arrays)
        return max(0, int((stop - start) / step) + 1)
    if op in SHRINKING:
        return sum(array.size for array in arrays)
    if op == "ConstantOfShape":
        return _product(arrays[0])
    if op == "Expand":
        return prod(np.broadcast_shapes(arrays[0].shape, tuple(arrays[1].tolist())))
    if op == "Tile":
        return arrays[0].size * _product(arrays[1])
    if op == "Gather":
        axis = attribute(node, "axis", 0)
        return int(arrays[1].size * (arrays[0].size // max(1, arrays[0].shape[axis])))
    if op == "GatherElements":
        return arrays[1].size
    if op == "GatherND" and not attribute(node, "batch_dims", 0):
        depth = arrays[1].shape[-1]
        return prod(arrays[1].shape[:-1]) * prod(arrays[0].shape[depth:])
    return None


def _product(sizes: Array) -> int:
    """Product of sizes, without overflow."""
    if sizes.size > DIMENSIONS:
        raise ValueError(f"{sizes.size} axes")
    return prod(int(size) for size in sizes.ravel())


def _evaluated(node: onnx.NodeProto, arrays: list[Array]) -> Array:
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


FREQUENCIES = "frequencies"
"""Name of a selection between frequencies in forms; a position may be multiplied by it."""

FLAT = 2.0
"""The largest allowed exponent: `dim / (dim - 2)` for four dimensions; larger powers are steps."""


def is_frequency(value: Value) -> bool:
    """Whether a value is a table of frequencies in (0, 1], or the result of a reciprocal."""
    if isinstance(value, ConstantValue):
        array = value.array
        return array.dtype.kind == "f" and array.size > 1 and bool((array > 0).all() and (array <= 1).all())
    return isinstance(value, InputValue) and is_of("Reciprocal", value.form)


def is_flat_power(given: list[Value]) -> bool:
    """Whether a power is a root, or a low power of a value that is not a power; repeated powers would be a step."""
    base, exponent = given
    if not isinstance(base, InputValue) or not isinstance(exponent, ConstantValue) or exponent.array.dtype.kind != "f":
        return False
    array = exponent.array
    most = 1.0 if any("Pow(" in one.name for one in base.form.terms) else FLAT
    return bool(array.size and (array >= 0).all() and (array <= most).all())
