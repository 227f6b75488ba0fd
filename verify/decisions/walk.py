"""The walk: what follows from the call alone, node by node, and which nodes decide by it.

A graph's masks, positions and shapes follow from lengths, token ids and the mask alone, in a few dozen nodes without
weights. Sums of them and other layouts decide nothing. What compares, rounds, clips, looks up or cuts does, and has to
do so by numbers of the model.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import numpy_helper

from llmconv.verify.decisions.forms import BATCH, LENGTH, MASK, PLACE, POSITION, TOKEN, WITHIN, Form, atom, made_of
from llmconv.verify.decisions.numbers import Numbers
from llmconv.verify.decisions.tables import odd_row
from llmconv.verify.decisions.values import Call, Data, Finding, Found, Known, Value, as_form, as_parts

INPUTS = {"input_ids": TOKEN, "attention_mask": MASK, "position_ids": POSITION, "write_indices": LENGTH}
SAME = {"Identity", "Unsqueeze", "Squeeze", "Reshape", "Expand", "Transpose", "Tile", "Flatten", "Split", "Dropout"}
"""Other layouts of their first input."""

SUMS = {"Add", "Sub", "Neg", "Mul", "Div", "Sum"}
COMPARISONS = {"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"}
LOGIC = {"And", "Or", "Xor", "Not"}
CURVES = {"Cos", "Sin", "Log", "Sqrt"}
"""Alike everywhere: where they are wrong at one position, they are at all."""

BOUNDS = {"Slice": (1, 2), "Pad": (1,), "Range": (0, 1, 2), "TensorScatter": (2,), "Trilu": (1,), "Loop": (0,)}
"""Inputs that say from where to where."""

INDEXED = {"Gather": 1, "GatherElements": 1, "GatherND": 1, "ScatterElements": 1, "ScatterND": 1, "RotaryEmbedding": 1}
"""Inputs that say where to look."""

LIMITS = {"Clip": (1, 2), "Min": None, "Max": None}
"""Inputs that are limits of the others."""

ROUNDINGS = {"Floor", "Ceil", "Round"}
PLAIN = {*COMPARISONS, *LOGIC, *CURVES, *LIMITS, *ROUNDINGS, "Mod", "Div", "Mul", "Exp", "Relu", "Abs", "Sign", "CumSum"} | {
    "ReduceSum", "ReduceMax", "ReduceMin", "Pad", "ArgMax", "Add", "Sub", "Sigmoid", "Tanh", "ScatterND", "ScatterElements"
}  # fmt: skip
"""Operators on what follows from a call of which their inputs' numbers say all."""

THRESHOLDS = {"ThresholdedRelu", "Shrink", "IsInf", "IsNaN", "Sign", "Hardmax", *ROUNDINGS}
"""Operators that decide on what the model computes by numbers of their own."""

LOUD = 10.0
"""A number that is added to what the model computes and is larger than this moves a threshold."""
EXACT_BITS = {
    onnx.TensorProto.FLOAT16: 11,
    onnx.TensorProto.BFLOAT16: 8,
    onnx.TensorProto.INT8: 7,
    onnx.TensorProto.UINT8: 8,
    onnx.TensorProto.INT16: 15,
    onnx.TensorProto.UINT16: 16,
}
"""Integers beyond so many bits change in these types."""

TABLE_ROWS = 32
"""A constant of fewer rows is no table: every row is read by some scenario."""

INTEGERS = {onnx.TensorProto.INT64, onnx.TensorProto.INT32, onnx.TensorProto.BOOL, *EXACT_BITS} - {
    onnx.TensorProto.FLOAT16,
    onnx.TensorProto.BFLOAT16,
}
BLOCK = 64
"""Scans go by blocks of so many tokens; a full suite's prompts fill one, so what is decided within one is seen."""

EVERYTHING = 1 << 31
"""A bound so large is none."""


class Walk:
    """Walks over a graph's nodes in order.

    Args:
        numbers: of the model.
        axes: the axes of values, as shape inference has them: numbers, names, or None.
        external: names of tensors that lie in other files, or that are the model's by name.
    """

    def __init__(self, numbers: Numbers, axes: Mapping[str, list[int | str | None]], types: Mapping[str, int]) -> None:
        self.numbers, self.axes, self.types = numbers, dict(axes), types
        self.values: dict[str, Value] = {}
        self.found = Found()
        self._named: dict[str, Form] = {}
        self._weights: set[str] = set()
        self._changed: set[str] = set()

    def run(self, graph: onnx.GraphProto, given: Mapping[str, Value] | None = None) -> None:
        """All nodes of a graph; `given` are values of its inputs."""
        for tensor in graph.initializer:
            self.values[tensor.name] = Data() if tensor.external_data else Known(numpy_helper.to_array(tensor))
        self._weights |= {tensor.name for tensor in graph.initializer if tensor.external_data}
        for port in graph.input:
            source = INPUTS.get(port.name)
            self.values[port.name] = Call(atom(port.name, source)) if source else Data()
        self.values |= given or {}
        for node in graph.node:
            self._see(node)

    def _see(self, node: onnx.NodeProto) -> None:
        inputs = [self.values.get(name, Data()) if name else None for name in node.input]
        value = self._value(node, inputs)
        for name in node.output:
            self.values[name] = value
        self._complete_axes(node)
        if isinstance(value, Data) and self._is_of_weights(node):
            self._weights |= set(node.output)
            self._changed |= set(node.output)

    def _is_of_weights(self, node: onnx.NodeProto) -> bool:
        """Whether a node reads weights and constants alone."""
        read = [name for name in node.input if name]
        return any(name in self._weights for name in read) and all(
            name in self._weights or isinstance(self.values.get(name), Known) for name in read
        )

    def _value(self, node: onnx.NodeProto, inputs: list[Value | None]) -> Value:
        op = node.op_type
        if op in ("Shape", "Size"):
            return self._lengths(node)
        if op == "Constant":
            return _constant(node)
        given = [value for value in inputs if value is not None]
        if any(attribute.HasField("g") for attribute in node.attribute):
            return self._inner(node, given)
        self._look_at_bounds(node, inputs)
        self._look_at_index(node, inputs)
        if op == "Range":
            return self._range(inputs)
        if any(isinstance(value, Data) for value in given):
            self._look_at_data(node, inputs)
            return Data()
        if all(isinstance(value, Known) for value in given):
            return self._folded(node, given)
        return self._of_call(node, given)

    def _complete_axes(self, node: onnx.NodeProto) -> None:
        """Axes that shape inference does not follow, through what a mask or a key is put together by."""
        known = self.axes.get(node.input[0]) if node.input else None
        if known is None or self.axes.get(node.output[0]) is not None:
            return
        if node.op_type == "Transpose":
            order = next(
                (list(one.ints) for one in node.attribute if one.name == "perm"), list(range(len(known)))[::-1]
            )
            self.axes[node.output[0]] = [known[at] for at in order]
        elif node.op_type in ("ScatterND", "ScatterElements"):
            self.axes[node.output[0]] = known

    def _parts(self, name: str, value: Value) -> tuple[Form, ...] | None:
        """The forms of a list's elements; a scalar is a list of one."""
        single = isinstance(value, Call) and value.parts is None and self.axes.get(name) in ([], [1])
        return (value.form,) if single and isinstance(value, Call) else as_parts(value)

    # --- values that follow from the call -------------------------------------------------------------------------

    def _lengths(self, node: onnx.NodeProto) -> Value:
        name = node.input[0]
        axes = self.axes.get(name)
        if axes is None:
            return Call(atom(f"shape of {name}", LENGTH))
        forms = [
            Form(number=float(axis)) if isinstance(axis, int) else self._axis_form(axis or f"{name}[{at}]")
            for at, axis in enumerate(axes)
        ]
        if node.op_type == "Size":
            return Call(made_of("Size", forms))
        start, end = (_attribute(node, key, default) for key, default in (("start", 0), ("end", len(forms))))
        parts = tuple(forms[start:end])
        if all(not form.terms for form in parts):
            return Known(np.array([int(form.number) for form in parts], np.int64))
        return Call.of_parts(parts)

    def _axis(self, form: Form) -> int | str:
        """An axis of a shape: its size, or a name for its form."""
        if form.terms:
            self._named[form.key()] = form
        return form.key() if form.terms else int(form.number)

    def _axis_form(self, name: str) -> Form:
        return self._named.get(name) or atom(name, BATCH if name == "batch_size" else LENGTH)

    def _range(self, inputs: list[Value | None]) -> Value:
        start, stop, step = (as_form(value) if value else None for value in inputs)
        if start is None or stop is None or step is None:
            return Data()
        if not (start.terms or stop.terms or step.terms):
            return Known(np.arange(start.number, stop.number, step.number or 1.0))
        return Call(start + atom(f"index to {stop.key()}", *(stop.sources if stop.sources == {WITHIN} else (PLACE,))))

    def _folded(self, node: onnx.NodeProto, given: list[Value]) -> Value:
        """A constant made of constants; of many numbers, only their layout is unknown."""
        arrays = [value.array for value in given if isinstance(value, Known)]
        if sum(array.size for array in arrays) <= 1 << 16:
            try:
                return Known(_evaluated(node, arrays))
            except Exception:  # whatever the reference implementation lacks
                return Data()
        return Known(arrays[0]) if node.op_type in SAME or node.op_type == "Cast" else Data()

    def _of_call(self, node: onnx.NodeProto, given: list[Value]) -> Value:
        op, first = node.op_type, given[0]
        if op in SAME:
            return _relaid(node, first)
        if op == "Cast":
            return self._cast(node, first)
        if op in SUMS and (made := self._sum(node, given)) is not None:
            return made
        if op == "Concat":
            return self._concat(node, given)
        if op in ("Gather", "Slice", "GatherElements", "GatherND"):
            return self._picked(node, given)
        if op == "ConstantOfShape":
            self.axes[node.output[0]] = [self._axis(form) for form in self._parts(node.input[0], first) or ()] or None
            return Call(Form(number=_fill(node)))
        if op == "Where":
            return self._where(node, given)
        return self._decided(node, given)

    def _cast(self, node: onnx.NodeProto, first: Value) -> Value:
        form, to = as_form(first), _attribute(node, "to", 1)
        if form is None or not form.terms:
            return first
        if to in EXACT_BITS and not self._is_choice(node.input[0]):
            self._flag(node, f"casts {_said(form)} to a type that is exact up to {2 ** EXACT_BITS[to]} only")
        is_whole = all(factor.is_integer() for factor in (*form.terms.values(), form.number))
        if to == onnx.TensorProto.BOOL or (to in INTEGERS and not is_whole):
            self._judge(node, form, rounded=to != onnx.TensorProto.BOOL)
            return Call(made_of("Cast", [form]))
        return first

    def _sum(self, node: onnx.NodeProto, given: list[Value]) -> Value | None:
        """Sums and multiples; None of what is neither."""
        forms = [as_form(value) for value in given]
        op, plain = node.op_type, [form for form in forms if form is not None]
        if len(plain) < len(forms):  # a list of numbers: frequencies, slopes, a bias
            call = next(form for form in plain if form.terms)
            if op in ("Mul", "Div", "Add", "Sub"):
                return Call(made_of(f"{op} {node.input[0]} {node.input[1]}", [call])) if op in ("Mul", "Div") else None
            return None
        if op == "Neg":
            return Call(plain[0].times(-1))
        if op in ("Add", "Sum"):
            return Call(sum(plain[1:], plain[0]))
        if op == "Sub":
            return Call(plain[0] + plain[1].times(-1))
        for one, other in (plain, plain[::-1]) if op == "Mul" else ():
            if not other.terms:
                return Call(one.times(other.number)) if other.number else Known(np.zeros(1, np.int64))
        is_float = self.types.get(node.output[0]) in (None, onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)
        if op == "Div" and is_float and not plain[1].terms and plain[1].number:
            return Call(plain[0].times(1 / plain[1].number))
        return None

    def _concat(self, node: onnx.NodeProto, given: list[Value]) -> Value:
        parts = [self._parts(name, value) for name, value in zip(node.input, given, strict=True)]
        if all(part is not None for part in parts):
            return Call.of_parts(tuple(form for part in parts for form in part or ()))
        forms = [form for value in given for form in (as_form(value),) if form is not None]
        if len(forms) == len(given) and len({form.key() for form in forms}) == 1:
            return Call(forms[0])
        return Call(made_of("Concat", self._judged(node, forms, choices=True)))

    def _picked(self, node: onnx.NodeProto, given: list[Value]) -> Value:
        """Elements of a list by their number; of anything else, elements of the same form."""
        first, parts = given[0], as_parts(given[0])
        if isinstance(first, Known):  # a table
            return Call(made_of(f"{node.op_type} {node.input[0]}", [form for v in given[1:] if (form := as_form(v))]))
        if parts is not None and all(isinstance(value, Known) for value in given[1:]):
            places = np.arange(len(parts))
            try:
                chosen = _evaluated(node, [places, *(v.array for v in given[1:] if isinstance(v, Known))])
            except Exception:
                return first
            return Call.of_parts(tuple(parts[int(at)] for at in np.atleast_1d(chosen)))
        return Call(first.form) if isinstance(first, Call) else first

    def _where(self, node: onnx.NodeProto, given: list[Value]) -> Value:
        """A choice by what was judged where it was made."""
        forms = [form for value in given for form in (as_form(value),) if form is not None]
        return Call(made_of("Where", self._judged(node, forms[1:], choices=True) + forms[:1]))

    def _decided(self, node: onnx.NodeProto, given: list[Value]) -> Value:
        """Everything else: what a node makes of the call in a way of its own, for which it needs the model's numbers."""
        op = node.op_type
        forms = [form for value in given for form in (as_form(value),) if form is not None]
        if op in ("Min", "Mod") and any(not form.terms and 0 < form.number <= BLOCK for form in forms):
            return Call(made_of(op, [form for form in forms if form.terms]).within_a_block())
        if len(forms) < len(given) and op not in LOGIC:
            self._flag(node, f"{op} of {_said(made_of('', forms))} with a table of numbers")
        if op == "Div" and len(forms) == 2 and not forms[1].terms and 0 < forms[1].number <= BLOCK:
            forms = forms[:1]
        if op in COMPARISONS and len(forms) == 2:
            forms = [forms[0] + forms[1].times(-1)]
        if op not in PLAIN:
            self._flag(node, f"{op} of {_said(made_of('', forms))}, of which nothing can be said", certain=False)
        elif op == "Mul":
            self._look_at_product(node, forms)
        elif op == "Exp":
            self._look_at_power(node, forms[0])
        elif op not in LOGIC and op not in CURVES:
            self._judged(node, forms, rounded=op in ROUNDINGS)
        return Call(made_of(op, forms))

    def _look_at_product(self, node: onnx.NodeProto, forms: list[Form]) -> None:
        """Masks and sizes are multiplied; powers of a position are a step when they are high enough."""
        self._judged(node, forms)
        if sum(bool(form.sources & {PLACE, POSITION, TOKEN}) for form in forms) > 1:
            self._flag(node, f"multiplies {_said(forms[0])} by {_said(forms[1])}")

    def _look_at_power(self, node: onnx.NodeProto, form: Form) -> None:
        """A power of a logarithm is one of the position; any other grows from nothing to everything."""
        if not all(atom.name.startswith("Log(") for atom in form.terms):
            self._flag(node, f"raises a number to the power of {_said(form)}")

    # --- what is looked at ------------------------------------------------------------------------------------------

    def _judged(
        self, node: onnx.NodeProto, forms: list[Form], *, choices: bool = False, rounded: bool = False
    ) -> list[Form]:
        """The forms, each looked at; a number among them is where the others are cut, but for what is chosen from."""
        call = [form for form in forms if form.terms]
        cuts = [] if choices else [form.number for form in forms if not form.terms]
        for form in call:
            for number in cuts or [0.0]:
                self._judge(node, form + Form(number=-number), rounded=rounded)
        return forms

    def _judge(self, node: onnx.NodeProto, form: Form, *, rounded: bool = False) -> None:
        if not form.terms or form.sources == {WITHIN}:
            return
        self.found.decisions += 1
        self.found.numbers |= {form.offset}
        if not (self.numbers.explain_rounding(form) if rounded else self.numbers.explain(form)):
            self._flag(node, f"decides on {_said(form)} by {_numbers_told(form, rounded)}")

    def _look_at_bounds(self, node: onnx.NodeProto, inputs: list[Value | None]) -> None:
        for at in BOUNDS.get(node.op_type, ()):
            value = inputs[at] if at < len(inputs) else None
            if isinstance(value, Call):
                for form in value.forms:
                    self._judge(node, form)
                if node.op_type == "Slice":
                    self._look_at_table(node, inputs[0], value)
            elif isinstance(value, Known) and node.op_type == "Slice":
                self._look_at_cut(node, value, inputs)
            elif isinstance(value, Known) and node.op_type == "Trilu" and not self._knows_length(value.array):
                self._flag(node, f"cuts a triangle at {value.array.ravel()[0]}")

    def _knows_length(self, numbers: np.ndarray) -> bool:
        return all(self.numbers.knows(abs(float(number)), atom("length", LENGTH)) for number in numbers.ravel())

    def _look_at_cut(self, node: onnx.NodeProto, bounds: Known, inputs: list[Value | None]) -> None:
        """A cut at a number is the model's on an axis of a fixed size only."""
        first, which = inputs[0], inputs[3] if len(inputs) > 3 else None
        whole = isinstance(first, Known) and first.array.size > 1
        axes = list(first.array.shape) if isinstance(first, Known) and whole else self.axes.get(node.input[0])
        at = which.array.ravel().tolist() if isinstance(which, Known) else list(range(bounds.array.size))
        for bound, axis in zip(bounds.array.ravel().tolist(), at, strict=False):
            fixed = axes is not None and -len(axes) <= axis < len(axes) and isinstance(axes[axis], int)
            if not fixed and abs(bound) < EVERYTHING and not self._knows_length(np.array(bound)):
                self._flag(node, f"cuts an axis of any length at {bound}", certain=axes is not None)

    def _look_at_index(self, node: onnx.NodeProto, inputs: list[Value | None]) -> None:
        at = INDEXED.get(node.op_type)
        if at is None or at >= len(inputs):
            return
        index, tables = inputs[at], [inputs[0]]
        if node.op_type == "RotaryEmbedding":
            index, tables = inputs[3] if len(inputs) > 3 else None, inputs[1:3]
        if node.op_type.startswith("Scatter"):
            self._look_at_places(node, index)
        elif isinstance(index, Call):
            for table in tables:
                self._look_at_table(node, table, index)
            if index.form.sources & {TOKEN, POSITION} and node.input[0] in self._changed:
                self._flag(node, f"looks up {_said(index.form)} in weights that nodes have changed")

    def _look_at_places(self, node: onnx.NodeProto, index: Value | None) -> None:
        """Where something is written: at places of the call, or all along a fixed axis, not at some."""
        if isinstance(index, Call):
            for form in index.forms:
                self._judge(node, form)
        elif isinstance(index, Known) and (node.input[0] in self._weights or not self._is_run(index.array)):
            self._flag(node, f"writes at {', '.join(map(str, np.unique(index.array)[:3].tolist()))}")

    @staticmethod
    def _is_run(places: np.ndarray) -> bool:
        """Whether places follow each other, from the first or to some other."""
        found = np.unique(places)
        return len(found) > 1 and bool((np.diff(found) == 1).all())

    def _look_at_table(self, node: onnx.NodeProto, table: Value | None, index: Call) -> None:
        if not isinstance(table, Known) or table.array.dtype.kind not in "fiub":
            return
        array = table.array.reshape(-1, *table.array.shape[-1:]) if table.array.ndim > 2 else table.array
        if array.ndim == 2 and len(array) == 1:
            array = array[0]
        if len(array) >= TABLE_ROWS and (row := odd_row(array)) is not None:
            self._flag(node, f"looks up {_said(index.form)} in a table whose row {row} does not follow from the others")

    def _look_at_data(self, node: onnx.NodeProto, inputs: list[Value | None]) -> None:
        """What the model computes, compared with numbers or with the call."""
        op = node.op_type
        if op in THRESHOLDS:
            self._flag(node, f"{op} of what the model computes, of which nothing can be said", certain=False)
        if op in ("Add", "Sub"):
            self._look_at_sum(node, inputs)
        if op not in COMPARISONS and op not in LIMITS:
            return
        places = LIMITS.get(op) or range(len(inputs))
        for value in (inputs[at] for at in places if at < len(inputs)):
            if isinstance(value, Call):
                for form in value.forms:
                    self._judge(node, form)
            elif isinstance(value, Known) and value.array.size and value.array.dtype.kind in "fiu":
                self._look_at_limit(node, value)

    def _look_at_sum(self, node: onnx.NodeProto, inputs: list[Value | None]) -> None:
        for value in inputs:
            number = value.number if isinstance(value, Known) else None
            if number is not None and abs(number) > LOUD and not self.numbers.bounds_data(number):
                self._flag(node, f"adds {number:g} to what the model computes")

    def _look_at_limit(self, node: onnx.NodeProto, value: Known) -> None:
        numbers = np.unique(value.array.astype(np.float64))
        counted = len(numbers) > 1 and bool((np.diff(numbers) == 1).all()) and numbers[0] == 0
        odd = [] if counted else [float(number) for number in numbers if not self.numbers.bounds_data(float(number))]
        if odd:
            self._flag(node, f"compares what the model computes with {odd[0]:g}")

    def _inner(self, node: onnx.NodeProto, given: list[Value]) -> Value:
        """If, Loop, Scan: their graphs see the values around them."""
        self._look_at_bounds(node, list(given))
        is_data = any(isinstance(value, Data) for value in given)
        forms = [form for value in given for form in (as_form(value),) if form is not None]
        outer: Value = Data() if is_data else Call(made_of(node.op_type, forms))
        if node.op_type == "If" and not is_data:
            self._judged(node, forms)
        results = []
        for attribute in node.attribute:
            if attribute.HasField("g"):
                self.run(attribute.g, {port.name: outer for port in attribute.g.input})
                results += [self.values.get(port.name, Data()) for port in attribute.g.output]
        return Data() if any(isinstance(value, Data) for value in results) or not results else outer

    def _is_choice(self, name: str) -> bool:
        """Whether a value is true or false."""
        return self.types.get(name) == onnx.TensorProto.BOOL

    def _flag(self, node: onnx.NodeProto, text: str, *, certain: bool = True) -> None:
        self.found.findings.append(Finding(node.name or node.output[0], node.op_type, text, certain))


def _relaid(node: onnx.NodeProto, first: Value) -> Value:
    """The same elements; a list stays one where it only loses or gains an axis."""
    if isinstance(first, Call) and first.parts is not None and node.op_type not in ("Squeeze", "Identity", "Unsqueeze"):
        return Call(first.form)
    return first


def _constant(node: onnx.NodeProto) -> Value:
    attribute = node.attribute[0]
    if attribute.name == "value":
        return Data() if attribute.t.external_data else Known(numpy_helper.to_array(attribute.t))
    return Known(np.asarray(onnx.helper.get_attribute_value(attribute)))


def _fill(node: onnx.NodeProto) -> float:
    return next((float(numpy_helper.to_array(a.t).ravel()[0]) for a in node.attribute if a.name == "value"), 0.0)


def _evaluated(node: onnx.NodeProto, arrays: list[np.ndarray]) -> np.ndarray:
    """The node's result on constants, by the reference implementation of ONNX."""
    from onnx.reference import ReferenceEvaluator  # noqa: PLC0415

    names = [name for name in node.input if name]
    ports = [
        onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in zip(dict.fromkeys(names), arrays, strict=False)
    ]
    graph = onnx.helper.make_graph([node], "constant", ports, [onnx.ValueInfoProto(name=node.output[0])])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)])
    result = ReferenceEvaluator(model).run(None, dict(zip(names, arrays, strict=True)))[0]
    return np.asarray(result)


def _attribute(node: onnx.NodeProto, name: str, default: int) -> int:
    return next((attribute.i for attribute in node.attribute if attribute.name == name), default)


def _said(form: Form) -> str:
    """`position`, `length and mask`."""
    return " and ".join(sorted(form.sources)) or "a number"


def _numbers_told(form: Form, rounded: bool) -> str:
    """`3817 and multiples of 256`."""
    factors = [abs(factor) for factor in form.terms.values()] if rounded else form.factors
    told = [f"multiples of {factor:g}" for factor in factors if factor != 1]
    return " and ".join([f"{form.offset:g}", *told[:2]])
