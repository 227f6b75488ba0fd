"""AffineForm: a value that depends on the call only, as a weighted sum of atoms (lengths, positions, …) and a number.

For example, the edge of a window is `q + past_sequence_length - 9`. Layout is ignored: a value and its transpose, slice
or broadcast copy have the same form, because all their elements are computed in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import sha256

import numpy as np
import onnx

from llmconv.tensors import Array

LENGTH, BATCH, POSITION, TOKEN, MASK = "length", "batch size", "position", "token id", "mask"
"""Sources: the properties of a call that an atom depends on."""


INDEX = "place in the sequence"
"""Source of an index that counts from the first token, or from the first new token."""

WITHIN = "place within a block"
"""Source of an index along a block of tokens, see `BLOCKS`."""

BLOCKS = frozenset({16.0, 64.0})
"""Block sizes in tokens of llmconv's recurrent layers (export/caches/delta_rule.py, state_space.py)."""

BLOCK = "tokens of a block"
"""Name of the atom of a length that is limited by a block size."""

NAME_LENGTH = 500
"""Maximum length of an atom's name; longer names are cut and end in a hash, so that they stay different."""


class ValueKind(IntEnum):
    """The possible values of an atom; the kind of several atoms is the largest."""

    BINARY = 0
    """0, 1, or the number that masks add."""
    COUNT = 1
    """Lengths, indices, positions and ids; all numbers that they involve are in the form."""
    PERIODIC = 2
    """Cosines and sines."""
    UNKNOWN = 3
    """Any number; it may hide unknown numbers."""


@dataclass(frozen=True)
class Atom:
    """A term of a form: an input's elements, an axis, an index along an axis, or a result that is not a sum.

    Names are equal for equal values; `sources` are the properties of a call that it depends on.
    """

    name: str
    sources: frozenset[str]
    kind: ValueKind = ValueKind.COUNT


@dataclass(frozen=True)
class AffineForm:
    """A weighted sum of atoms and a number; no factor in `terms` is zero."""

    terms: Mapping[Atom, float] = field(default_factory=dict)
    number: float = 0.0

    @property
    def sources(self) -> frozenset[str]:
        """The properties of a call that it depends on."""
        return frozenset().union(*(atom.sources for atom in self.terms))

    @property
    def kind(self) -> ValueKind:
        """Its possible values; the sum of several binary atoms is a count."""
        found = max((atom.kind for atom in self.terms), default=ValueKind.BINARY)
        return ValueKind.COUNT if found is ValueKind.BINARY and len(self.terms) > 1 else found

    @property
    def factors(self) -> list[float]:
        """Absolute factors relative to the smallest: a form and its multiples decide equally."""
        found = [abs(factor) for factor in self.terms.values()]
        return [factor / min(found) for factor in found]

    @property
    def offset(self) -> float:
        """The absolute number relative to the smallest factor."""
        found = [abs(factor) for factor in self.terms.values()]
        return abs(self.number) / min(found) if found else abs(self.number)

    def __add__(self, other: AffineForm) -> AffineForm:
        terms = dict(self.terms)
        for atom, factor in other.terms.items():
            terms[atom] = terms.get(atom, 0.0) + factor
        return AffineForm({atom: factor for atom, factor in terms.items() if factor}, self.number + other.number)

    def times(self, factor: float) -> AffineForm:
        """The form multiplied by a number."""
        if not factor:
            return AffineForm()
        return AffineForm({atom: factor * old for atom, old in self.terms.items()}, factor * self.number)

    def key(self) -> str:
        """A string that is equal for equal forms."""
        terms = sorted((atom.name, factor) for atom, factor in self.terms.items())
        return " + ".join([*(f"{factor!r}*{name}" for name, factor in terms), repr(self.number)])


def atom(name: str, *sources: str, kind: ValueKind = ValueKind.COUNT) -> AffineForm:
    """The form of a single atom."""
    return AffineForm({Atom(name, frozenset(sources), kind): 1.0})


def made_of(name: str, forms: Iterable[AffineForm], kind: ValueKind | None = None) -> AffineForm:
    """The form of a result that is not a sum: a new atom, named after its inputs, by default with their kind."""
    forms = list(forms)
    sources = frozenset().union(*(form.sources for form in forms)) or frozenset({LENGTH})
    whole = f"{name}({', '.join(form.key() for form in forms)})"
    if len(whole) > NAME_LENGTH:
        whole = f"{whole[:NAME_LENGTH]}… {sha256(whole.encode()).hexdigest()}"
    inherited = max((form.kind for form in forms), default=ValueKind.COUNT)
    return AffineForm({Atom(whole, sources, inherited if kind is None else kind): 1.0})


def is_of(name: str, form: AffineForm) -> bool:
    """Whether a form is a sum of results of the operation `name` only, see `made_of`."""
    return bool(form.terms) and all(one.name.startswith(f"{name}(") for one in form.terms)


LISTED = 64
"""Maximum number of elements of a list that are followed one by one."""


@dataclass(frozen=True)
class ConstantValue:
    """A constant of the graph; an array of bfloat16, which numpy itself does not have, is float32.

    `step` is one unit in the last place of 1 if the elements were bfloat16; else 0.
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

    `parts` has the form of each element of a list of lengths; None where all have `form`.
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
        text: a description of the decision.
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
    """Nodes that decide by other numbers than the model's, the number of nodes that decide, and all their numbers."""

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


INPUTS = {"input_ids": TOKEN, "attention_mask": MASK, "position_ids": POSITION, "write_indices": LENGTH}
"""Inputs of a graph, and the property of a call that each contains."""

SAME = {"Identity", "Unsqueeze", "Squeeze", "Reshape", "Expand", "Transpose", "Tile", "Flatten", "Split", "Dropout"}
"""Operators that change only the layout of their first input."""

SUMS = {"Add", "Sub", "Neg", "Mul", "Div", "Sum"}
COMPARISONS = {"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"}
LOGIC = {"And", "Or", "Xor", "Not"}
PERIODIC = {"Cos", "Sin"}
"""Periodic functions: an error at one position appears at all."""

NONLINEAR = {"Log", "Sqrt", "Exp", "Pow", "Reciprocal", "Sigmoid", "Tanh"}
"""Nonlinear functions, whose results must not be compared."""

SELECTIONS = {"Gather", "Slice", "GatherElements", "GatherND"}
"""Operators that select elements of their first input."""

BOUNDS = {
    "Slice": (1, 2),
    "Pad": (1,),
    "Range": (0, 1, 2),
    "TensorScatter": (2,),
    "Trilu": (1,),
    "Loop": (0,),
    "TopK": (1,),
}
"""Inputs that are bounds, by operator."""

LAYOUTS = {
    "Reshape": (1,),
    "Expand": (1,),
    "Tile": (1,),
    "Split": (1,),
    "Unsqueeze": (1,),
    "Squeeze": (1,),
    "CumSum": (1,),
}
"""Inputs that determine only the layout of the result, by operator."""

INDEXED = {
    "Gather": 1,
    "GatherElements": 1,
    "GatherND": 1,
    "ScatterElements": 1,
    "ScatterND": 1,
    "RotaryEmbedding": 3,
    "GroupQueryAttention": 9,
}
"""The input that is an index, by operator."""

TABLES = {"RotaryEmbedding": (1, 2), "GroupQueryAttention": (7, 8)}
"""The inputs that are lookup tables, by operator."""

LENGTHS_OF_CACHE = {"GroupQueryAttention": (5, 6), "Attention": (6,)}
"""Inputs that contain the filled length of a cache, by operator."""

LIMITS = {"Clip": (1, 2), "Min": None, "Max": None}
"""Inputs that limit the others, by operator; None for all inputs."""

ROUNDINGS = {"Floor", "Ceil", "Round"}
REDUCTIONS = {"ReduceSum", "ReduceMax", "ReduceMin", "ArgMax", "CumSum"}
SUMMED = {"ReduceSum", "CumSum"}
STEPS = {"Mod", "Div", "Relu", "Abs", "Sign", "Pad", "Add", "Sub", "ScatterND", "ScatterElements"}
TRANSPARENT = {*COMPARISONS, *LOGIC, *PERIODIC, *NONLINEAR, *LIMITS, *ROUNDINGS, *REDUCTIONS, *STEPS, "Mul"}
"""Operators that involve no numbers other than those of their inputs."""

THRESHOLDS = {"ThresholdedRelu", "Shrink", "IsInf", "IsNaN", "Sign", "Hardmax", *ROUNDINGS}
"""Operators that compare model values with built-in numbers."""

RANDOM = {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"}
"""Operators with different results in each run."""

EXACT_BITS: dict[int, int] = {
    onnx.TensorProto.FLOAT16: 11,
    onnx.TensorProto.BFLOAT16: 8,
    onnx.TensorProto.INT8: 7,
    onnx.TensorProto.UINT8: 8,
    onnx.TensorProto.INT16: 15,
    onnx.TensorProto.UINT16: 16,
}
"""Number of bits up to which integers are exact, by element type."""

SMALLEST_HALF: dict[int, float] = {onnx.TensorProto.FLOAT16: -65504.0}
"""The smallest number of a half-precision type, which masks contain; that of bfloat16 is as large as in float32."""

HALVES = {onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
INTEGERS = {onnx.TensorProto.INT64, onnx.TensorProto.INT32, *EXACT_BITS} - HALVES
"""Integer types, in which fractions are lost."""


def attribute(node: onnx.NodeProto, name: str, default: int) -> int:
    """The value of an integer attribute; `default` if the node lacks it."""
    return next((int(one.i) for one in node.attribute if one.name == name), default)


AxisSizes = list[int | str | None]
"""Sizes or names of axes; None for unknown ones."""


@dataclass
class WalkState:
    """The state of a walk.

    Attributes:
        axes: axes of values by name, from shape inference.
        types: element types of values by name, from shape inference.
        ports: the property of a call that each input of the graph contains.
        symbols: names of axes of the graph's inputs.
        tables: whether the contents of constants are analyzed.
        half: the graph computes in half precision, so computed values may be rounded to it.
        values: known values by name.
        weights: names of weights, and of values computed from weights and constants only.
        changed: the computed ones of these.
        named: forms of axes by their names in `axes`.
        readers: the nodes that read a value.
        binary: model values that are 0 or 1, such as the selection of experts.
    """

    axes: dict[str, AxisSizes]
    types: Mapping[str, int]
    ports: Mapping[str, str]
    symbols: frozenset[str]
    tables: bool = True
    half: bool = False
    values: dict[str, Value] = field(default_factory=dict)
    weights: set[str] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)
    named: dict[str, AffineForm] = field(default_factory=dict)
    readers: dict[str, list[onnx.NodeProto]] = field(default_factory=dict)
    binary: set[str] = field(default_factory=set)

    def inputs(self, node: onnx.NodeProto) -> list[Value | None]:
        """The values that a node reads; None for an omitted input."""
        return [self.values.get(name, ModelValue()) if name else None for name in node.input]

    def parts(self, name: str, value: Value) -> tuple[AffineForm, ...] | None:
        """The form of each element of a list; a scalar counts as a list of one."""
        if isinstance(value, InputValue) and value.parts is None and self.axes.get(name) in ([], [1]):
            return (value.form,)
        return as_parts(value)

    def name_axes(self, name: str, forms: tuple[AffineForm, ...]) -> None:
        """Records the axes of a value."""
        self.named |= {form.key(): form for form in forms if form.terms}
        self.axes[name] = [form.key() if form.terms else int(form.number) for form in forms]

    def lengths(self, name: str) -> list[AffineForm] | None:
        """The forms of a value's axes; None if their number is unknown."""
        axes = self.axes.get(name)
        if axes is None:
            return None
        return [
            AffineForm(number=float(axis)) if isinstance(axis, int) else self._length(axis or f"{name}[{at}]")
            for at, axis in enumerate(axes)
        ]

    def _length(self, name: str) -> AffineForm:
        """The form of a named axis; its values are unknown if it is neither an input's nor derived."""
        kind = ValueKind.COUNT if name in self.symbols else ValueKind.UNKNOWN
        return self.named.get(name) or atom(name, BATCH if name == "batch_size" else LENGTH, kind=kind)

    def is_of_weights(self, node: onnx.NodeProto) -> bool:
        """Whether a node reads weights and constants only."""
        read = [name for name in node.input if name]
        return bool(read) and all(
            name in self.weights or isinstance(self.values.get(name), ConstantValue) for name in read
        )

    def writes_along_a_head(self, node: onnx.NodeProto, index: ConstantValue) -> bool:
        """Whether a Scatter writes into a computed value along axes of fixed size, so at no length or position."""
        axes = self.axes.get(node.input[0])
        if axes is None or node.input[0] in self.weights:
            return False
        at = next((one.i for one in node.attribute if one.name == "axis"), 0)
        which = axes[: index.array.shape[-1]] if node.op_type == "ScatterND" else axes[at:][:1]
        return bool(which) and all(isinstance(size, int) for size in which)

    def note_binary(self, node: onnx.NodeProto) -> None:
        """Records values that are 0 or 1: ones scattered over zeros, in any layout."""
        given = [as_form(self.values.get(name, ModelValue())) for name in node.input]
        if node.op_type in ("ScatterElements", "ScatterND") and given[0] and given[2]:
            if all(not form.terms and form.number in (0, 1) for form in (given[0], given[2])):
                self.binary.add(node.output[0])
        elif node.op_type in SAME and node.input[0] in self.binary:
            self.binary.add(node.output[0])

    def is_followed(self, axis: int | str | None) -> bool:
        """Whether an axis is a number, an axis of an input, or derived from these."""
        return isinstance(axis, int) or axis in self.symbols or axis in self.named
