"""The audit of decisions: one check per graph, which lists nodes that decide by numbers that are not the model's.

A graph computes its masks, positions and shapes from lengths, token ids and the mask, in a few dozen nodes without
weights. `DecisionWalk` follows these values node by node, as sums of what the call gives. Nodes that compare, round,
clip, count, look up or cut decide, and must do so by numbers of the model. A value that is no such sum any more, as the
cosine of an angle, is not followed: what a graph decides by it is left to the scenarios.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from math import isclose
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.inliner import inline_local_functions

from llmconv.checkpoint import read_json
from llmconv.errors import first_line
from llmconv.runtime.extra_inputs import layer_of
from llmconv.runtime.onnxruntime.session_settings import half_precision
from llmconv.tensors import BY_NAME, Array
from llmconv.verify.results import Check, audited

NAME = "decisions"  # name of the check in reports

LENGTH, BATCH, POSITION, TOKEN, MASK, INDEX = (
    "length", "batch size", "position", "token id", "mask", "place in the sequence"
)  # fmt: skip
"""What of a call a value depends on; the last is an index that counts tokens."""

INPUTS = {"input_ids": TOKEN, "attention_mask": MASK, "position_ids": POSITION, "write_indices": LENGTH}
"""Inputs of a graph, and what of a call each contains."""

STORED_PREFIX = re.compile(r"prefix\.\d+\.(key|value)")  # keys and values of a tuned prefix, see `export --prefix`
LARGEST = 3e38  # numbers of this size hide a key, or are the end of float32; those above a billion are ends of a range
UNLIMITED = 1e9


def audit_decisions(graph: str, model: onnx.ModelProto, config: Mapping[str, Any]) -> Check:
    """Fails if a graph decides on lengths, batch size, positions or tokens by a number that is not the model's.

    `config` is from `read_config`.
    """
    try:
        found = decisions_of(model, config, INPUTS)
    except Exception as error:  # not a valid graph; the check of its structure reports why
        return Check(NAME, graph, "", verdict="fail", detail=f"cannot be analyzed: {first_line(error)}")
    texts = list(dict.fromkeys(f"`{one.node}` {one.text}" for one in found.findings))
    size, layers = window_of(config)
    returned = {layer_of(port.name) for port in model.graph.output}
    if layers & returned and not {size - 1, size, size + 1} & found.numbers:
        texts.append(f"no node decides by the sliding window of {size}")
    numbers = ", ".join(f"{number:g}" for number in sorted(found.numbers) if number < UNLIMITED) or "none"
    passed = f"{found.decisions} comparisons, limits and choices, all by numbers of the model ({numbers})"
    return audited(NAME, graph, texts, passed)


def audit_foreign_decisions(
    graph: str, model: onnx.ModelProto, config: Mapping[str, Any], inputs: Mapping[str, str] = INPUTS
) -> tuple[list[Check], list[str]]:
    """The same audit for a graph of another exporter; `inputs` has what of a call each input contains.

    Returns a failed check if the graph tests for a single length, position, batch size or token that no field of the
    config contains; and a note on other decisions by numbers that are not the model's.
    """
    try:
        found = decisions_of(model, config, inputs, tables=False)
    except Exception as error:  # a graph of an unknown exporter
        return [], [f"{graph}: its decisions cannot be analyzed: {first_line(error)}"]
    points, others = (
        list(dict.fromkeys(f"`{one.node}` {one.text}" for one in found.findings if one.certain and one.point is point))
        for point in (True, False)
    )
    texts = audited(NAME, graph, others).detail
    checks = [audited(NAME, graph, points)] if points else []
    return checks, [f"{graph}: {texts}, which is not in the config"] if others else []


def read_config(folder: Path) -> dict[str, Any]:
    """The fields that `config.json` states, and transformers' defaults for those that it does not."""
    from transformers import AutoConfig  # noqa: PLC0415 - slow to import, and not needed to walk

    fields = read_json(folder / "config.json")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return {"stated": fields, "default": config.to_dict()}
    except Exception:  # a config class in the folder's own code, which has no known defaults
        return {"stated": fields, "default": {}}


def decisions_of(
    model: onnx.ModelProto, config: Mapping[str, Any], inputs: Mapping[str, str], *, tables: bool = True
) -> Decisions:
    """The decisions of a graph; `tables` also analyzes the rows of lookup tables."""
    if model.functions:
        model = inline_local_functions(model)
    graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    axes = [axes[:2] if len(axes) < 4 else axes[2:3] for axes in map(_axes, model.graph.input)]
    fixed = [axis for some in axes for axis in some if isinstance(axis, int)]
    stored = [tensor.dims[2] for tensor in graph.initializer if STORED_PREFIX.fullmatch(tensor.name)]
    walk = DecisionWalk(graph, ConfigNumbers.of(config, [*fixed, *stored], half_precision(model)), tables)
    walk.run(graph, inputs)
    return walk.found


@dataclass(frozen=True)
class Finding:
    """A node that decides by a number that is not one of the model's."""

    node: str
    text: str
    certain: bool = True  # the node decides by that number; False if that depends on what is not followed
    point: bool = False  # the node tests for that single number, which no field of the config contains


@dataclass
class Decisions:
    """Nodes that decide by other numbers than the model's, how many nodes decide, and all numbers by which they do."""

    findings: list[Finding] = field(default_factory=list)
    decisions: int = 0
    numbers: set[float] = field(default_factory=set)


LENGTHS = re.compile(  # config fields whose numbers may be compared with lengths and positions
    r"window|chunk|context|max_pos|max_seq|original_max|n_positions|n_ctx|seq_len|block_size|floor_scale|conv|max_length"
)

TOKENS = re.compile(r"vocab|(pad|image|audio|video|vision|boi|eoi|boa|eoa|mask)\w*token|(pad|image|audio|video)\w*_id")
"""Config fields whose numbers may be compared with token ids."""


SIZES = re.compile(r"theta|vocab|position|token|hidden_size|intermediate_size|initializer")
"""Config fields whose numbers never limit a value of the model."""

LIBRARY = frozenset({0.0, 0.5, 1.0, 2.0, 3.0, 6.0, 20.0})
"""Bounds of torch's activations: hard sigmoid, ReLU6, and the threshold of softplus (20)."""

CLOSE = 1e-6  # relative tolerance: numbers of a config are float64, those of a graph float32
SMALLEST = 1e-4  # smaller numbers guard against division by zero
BLOCKS = frozenset({2.0, 4.0, 8.0, 16.0, 32.0, 64.0})
"""Block sizes of recurrent layers in tokens, and their halves (export/caches/delta_rule.py, state_space.py)."""

FEW = 64  # numbers of tokens or sequences up to this are reached by the scenarios


@dataclass(frozen=True)
class ConfigNumbers:
    """The numbers that a model decides by: windows, chunks, contexts, padding ids. The scenarios cross them."""

    lengths: frozenset[float]  # for lengths, positions and counts of a mask
    tokens: frozenset[float]  # for token ids
    data: frozenset[float]  # absolute values, for values that the model computes

    @classmethod
    def of(cls, config: Mapping[str, Any], sizes: Iterable[int] = (), half: str = "") -> ConfigNumbers:
        """The numbers of a config, and `sizes`, the lengths that are fixed in the graph.

        `half` is the dtype to which the graph rounds numbers, `float16` or `bfloat16`; empty for none.
        """
        found = list(_numbers("", config))
        lengths = {number for name, number in found if LENGTHS.search(name)} | {float(size) for size in sizes}
        # its square divides numbers of patches (transformers modeling_gemma4.py)
        lengths |= {number**power for name, number in found if "pooling_kernel_size" in name for power in (1, 2)}
        tokens = {number for name, number in found if TOKENS.search(name)}
        data = {abs(number) for name, number in found if not SIZES.search(name)}
        # twice this is a threshold for scores of experts (transformers modeling_phimoe.py)
        data |= {2 * number for name, number in found if "router_jitter" in name}
        if half:
            with np.errstate(over="ignore"):
                kind = BY_NAME[half].numpy
                data |= {float(np.float64(number).astype(kind)) for number in data if number <= LARGEST}
        return cls(_with_neighbors(lengths), _with_neighbors(tokens), LIBRARY | data)

    def knows(self, number: float, form: Form) -> bool:
        """Whether a number is one that the model may compare with a form."""
        if number in (0, 1) or number < SMALLEST or not number < LARGEST:
            return True
        if TOKEN in form.sources:
            known = self.tokens
        else:
            known = frozenset() if form.sources == {BATCH} else self.lengths | BLOCKS
        return any(isclose(number, one, rel_tol=CLOSE) for one in known)

    def bounds_data(self, number: float) -> bool:
        """Whether values of the model may be compared with a number."""
        size = abs(number)
        return size <= SMALLEST or not size < LARGEST or any(isclose(size, one, rel_tol=CLOSE) for one in self.data)


def window_of(config: Any) -> tuple[int, set[int]]:
    """The window in tokens, and the layers with it, of the first config whose `layer_types` has some; else 0, none."""
    if not isinstance(config, Mapping):
        return 0, set()
    size, kinds = config.get("sliding_window"), config.get("layer_types")
    if isinstance(size, int) and isinstance(kinds, list) and "sliding_attention" in kinds:
        return size, {layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"}
    return next((found for found in map(window_of, config.values()) if found[0]), (0, set()))


def _with_neighbors(numbers: Iterable[float]) -> frozenset[float]:
    """The numbers and their neighbors: `< n` and `<= n - 1` are equal, `> n - w` is a window of w."""
    return frozenset(number + step for number in numbers for step in (-1, 0, 1))


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Every number of a config with the name of its field, including lists and nested configs."""
    if isinstance(value, Mapping):
        for inner, content in value.items():
            yield from _numbers(str(inner), content)
    elif isinstance(value, list):
        for content in value:
            yield from _numbers(name, content)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, float(value)


@dataclass(frozen=True)
class Form:
    """A value that depends on the call alone: terms times factors, and a number, as `q + past_sequence_length - 9`.

    A term is an input's elements, an axis, an index along an axis, or a result that is not a sum; its name is equal for
    equal values. Layout is ignored: the elements of a value, its transpose or a slice are computed in the same way.
    """

    terms: Mapping[str, float] = field(default_factory=dict)
    number: float = 0.0
    sources: frozenset[str] = frozenset()  # what of a call it depends on
    counts: bool = False  # it contains lengths, indices, positions or ids, not only what masks and comparisons give

    @classmethod
    def of(cls, name: str, source: str) -> Form:
        return cls({name: 1.0}, 0.0, frozenset({source}), source != MASK)

    @classmethod
    def made(cls, op: str, forms: Sequence[Form], *, counts: bool | None = None) -> Form:
        """A result that is not a sum: a new term, named after its inputs."""
        name = f"{op}({', '.join(form.key() for form in forms)})"
        name = name if len(name) < NAME_LENGTH else f"{name[:NAME_LENGTH]}… {sha256(name.encode()).hexdigest()}"
        sources = frozenset().union(*(form.sources for form in forms)) or frozenset({LENGTH})
        return cls({name: 1.0}, 0.0, sources, any(form.counts for form in forms) if counts is None else counts)

    def __add__(self, other: Form) -> Form:
        terms = {name: self.terms.get(name, 0.0) + other.terms.get(name, 0.0) for name in {**self.terms, **other.terms}}
        left = {name: factor for name, factor in terms.items() if factor}
        return Form(left, self.number + other.number, self.sources | other.sources, self.counts or other.counts)

    def times(self, factor: float) -> Form:
        terms = {name: factor * old for name, old in self.terms.items()} if factor else {}
        return Form(terms, factor * self.number, self.sources, self.counts)

    def key(self) -> str:
        return " + ".join([*(f"{factor!r}*{name}" for name, factor in sorted(self.terms.items())), repr(self.number)])


NAME_LENGTH = 500  # longest name of a term in full; longer ones are cut and end in a hash, so that they stay different

Value = Array | Form | tuple[Form | None, ...] | None
"""A constant; a value that depends on the call; a list of such values, as a shape; None for what is not followed."""


def as_form(value: Value) -> Form | None:
    """The form of a value's elements; None for constants that are neither one number nor an index."""
    if isinstance(value, Form):
        return value
    if isinstance(value, tuple):
        return value[0] if len(value) == 1 else Form.made("list", [one for one in value if one])
    if value is None or not value.size or value.dtype.kind not in "fiub":
        return None
    row = value.ravel()
    if (row == row[0]).all():
        return Form(number=float(row[0])) if np.isfinite(row[0]) else None
    if row.dtype.kind in "iu" and (np.diff(row) == 1).all():  # graphs with fixed axes contain indices as constants
        return Form.of(f"index to {row.size}", INDEX) + Form(number=float(row[0]))
    return None


SAME = {"Identity", "Unsqueeze", "Squeeze", "Reshape", "Expand", "Transpose", "Tile", "Flatten", "Split", "Dropout"}
"""Operators that change only the layout of their first input; the first three keep a list."""

SELECTIONS = {"Gather", "Slice", "GatherElements", "GatherND"}
COMPARISONS = {"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"}
LOGIC = {"And", "Or", "Xor", "Not"}
LIMITS = {"Clip", "Min", "Max"}
ROUNDINGS = {"Floor", "Ceil", "Round"}
DECIDING = {*COMPARISONS, *LIMITS, *ROUNDINGS, "Mod", "Div", "Relu", "Abs", "Sign"}
REDUCTIONS = {"ReduceSum", "ReduceMax", "ReduceMin", "ArgMax", "CumSum"}
FOLLOWED = {*DECIDING, *LOGIC, *REDUCTIONS, "Where", "Mul", "Pad", "Concat"}
"""Operators that involve no numbers other than those of their inputs."""

BOUNDS = {"Slice": (1, 2), "Pad": (1,), "Range": (0, 1, 2), "TensorScatter": (2,), "Trilu": (1,)}
"""Inputs that are bounds, by operator."""

TABLES = {"RotaryEmbedding": (1, 2), "GroupQueryAttention": (7, 8)}
"""Inputs that are tables of cosines and sines, by operator."""

RANDOM = {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"}
EXACT_BITS: dict[int, int] = {  # number of bits up to which integers are exact, by element type
    onnx.TensorProto.FLOAT16: 11, onnx.TensorProto.BFLOAT16: 8, onnx.TensorProto.INT8: 7, onnx.TensorProto.UINT8: 8,
    onnx.TensorProto.INT16: 15, onnx.TensorProto.UINT16: 16,
}  # fmt: skip

INTEGERS = {onnx.TensorProto.INT64, onnx.TensorProto.INT32, *EXACT_BITS} - {
    onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16,
}  # fmt: skip
"""Integer types, in which fractions are lost."""

SMALL_CONSTANT = 1 << 12  # elements of a constant in a graph that may contain its weights


class DecisionWalk:
    """Visits the nodes of a graph in order, and collects the decisions in `found`."""

    def __init__(self, graph: onnx.GraphProto, numbers: ConfigNumbers, tables: bool) -> None:
        self.numbers, self.tables, self.found = numbers, tables, Decisions()
        self.values: dict[str, Value] = {}
        ports = [*graph.input, *graph.value_info, *graph.output]
        self.axes = {port.name: _axes(port) for port in ports if port.type.tensor_type.HasField("shape")}
        self.types = {port.name: port.type.tensor_type.elem_type for port in ports}
        self.symbols = {axis for port in graph.input for axis in _axes(port) if isinstance(axis, str)}

    def run(self, graph: onnx.GraphProto, inputs: Mapping[str, str]) -> None:
        """Visits all nodes; `inputs` has what of a call each input contains."""
        self.values = {port.name: Form.of(port.name, inputs[port.name]) for port in graph.input if port.name in inputs}
        for tensor in graph.initializer:
            self.axes[tensor.name] = list(tensor.dims)
            is_small = np.prod(tensor.dims, dtype=np.int64) <= SMALL_CONSTANT
            if not tensor.external_data and (self.tables or is_small):
                self.values[tensor.name] = _array(tensor)
        for node in graph.node:
            self.values |= dict.fromkeys(node.output, self._value(node))

    def _value(self, node: onnx.NodeProto) -> Value:
        op, given = node.op_type, [self.values.get(name) for name in node.input if name]
        if op in ("Shape", "Size"):
            return self._lengths(node)
        if op == "Constant":
            value = node.attribute[0]
            held = value.t if value.name == "value" else None
            return _array(held) if held is not None else np.asarray(onnx.helper.get_attribute_value(value))
        self._require_known(node, given)
        if given and all(isinstance(value, np.ndarray) for value in given):
            return fold(node, [value for value in given if isinstance(value, np.ndarray)])
        if op in SELECTIONS:
            return self._selected(node, given)
        if op in SAME:
            is_list = isinstance(given[0], tuple) and op not in ("Identity", "Unsqueeze", "Squeeze")
            return as_form(given[0]) if is_list else given[0]
        if op == "ConstantOfShape":
            fill = [numpy_helper.to_array(one.t).ravel()[0] for one in node.attribute if one.name == "value"]
            return Form(number=float(fill[0]) if fill else 0.0)
        return self._computed(node, given)

    def _lengths(self, node: onnx.NodeProto) -> Value:
        axes = self.axes.get(node.input[0])
        if axes is None:
            return None
        forms = tuple(self._length(axis) for axis in axes)
        if node.op_type == "Shape":
            forms = forms[attribute(node, "start", 0) : attribute(node, "end", len(forms))]
            if all(form and not form.terms for form in forms):
                return np.array([int(form.number) for form in forms if form], np.int64)
            return forms
        whole = [form for form in forms if form]
        return Form.made("Size", whole) if len(whole) == len(forms) else None

    def _length(self, axis: int | str | None) -> Form | None:
        if isinstance(axis, int):
            return Form(number=float(axis))
        return Form.of(axis, BATCH if axis == "batch_size" else LENGTH) if axis in self.symbols and axis else None

    def _selected(self, node: onnx.NodeProto, given: list[Value]) -> Value:
        """Selected elements: of a list by constants, of other values elements of the same form, of a table none."""
        first, rest = given[0], given[1:]
        if isinstance(first, tuple) and all(isinstance(value, np.ndarray) for value in rest):
            places = fold(node, [np.arange(len(first)), *(one for one in rest if isinstance(one, np.ndarray))])
            if places is not None:
                chosen = tuple(first[int(at)] for at in places.ravel())
                return chosen[0] if places.ndim == 0 else chosen
        return None if isinstance(first, np.ndarray) else as_form(first)

    def _computed(self, node: onnx.NodeProto, given: list[Value]) -> Value:
        op, forms = node.op_type, [form for form in map(as_form, given) if form]
        if op == "Concat" and all(isinstance(one, np.ndarray | tuple) for one in given):
            return tuple(form for one in given for form in _parts(one))
        if len(forms) < len(given) or not forms:
            return None
        if op == "Cast":
            return self._cast(node, forms[0])
        if op == "Concat" and len({form.key() for form in forms}) == 1:
            return forms[0]
        if (total := _sum(op, forms, is_float=self.types.get(node.output[0]) not in INTEGERS)) is not None:
            return total
        if op in COMPARISONS:
            self._decide(node, [forms[0] + forms[1].times(-1)])
        elif op in DECIDING:
            self._decide(node, forms, rounded=op in ROUNDINGS)
        return Form.made(op, forms, counts=False if op in {*COMPARISONS, *LOGIC} else None) if op in FOLLOWED else None

    def _cast(self, node: onnx.NodeProto, form: Form) -> Form:
        to = attribute(node, "to", onnx.TensorProto.FLOAT)
        if to in EXACT_BITS and form.terms and form.counts and self.types.get(node.input[0]) != onnx.TensorProto.BOOL:
            self._flag(node, f"casts {sources_text(form)} to a type exact up to {2 ** EXACT_BITS[to]} only")
        is_whole = all(float(factor).is_integer() for factor in (*form.terms.values(), form.number))
        if to == onnx.TensorProto.BOOL or (to in INTEGERS and not is_whole):
            self._decide(node, [form], rounded=to != onnx.TensorProto.BOOL)
            return Form.made("Cast", [form], counts=form.counts and to != onnx.TensorProto.BOOL)
        return form

    def _require_known(self, node: onnx.NodeProto, given: list[Value]) -> None:
        """What a node decides by its operator, bounds, tables and limits of what is not followed."""
        op = node.op_type
        if op in RANDOM or (op == "Dropout" and len(node.input) > 2 and node.input[2]):
            self._flag(node, f"{op} gives different results in each run")
        elif op in ("If", "Loop"):
            self._decide(node, [form for form in map(as_form, given[:1]) if form])
            self._flag(node, f"{op}, whose branches are not analyzed", certain=False)
        elif (window := attribute(node, "local_window_size", -1)) >= 0:
            self._decide(node, [OF_LENGTH + Form(number=window)])
        for bound in (self.values.get(node.input[at]) for at in BOUNDS.get(op, ()) if at < len(node.input)):
            if isinstance(bound, np.ndarray):
                self._cut(node, bound)
            else:
                self._decide(node, [form for form in (bound if isinstance(bound, tuple) else [bound]) if form])
        if self.tables and not all(isinstance(value, np.ndarray) for value in given):
            places = TABLES.get(op, (0,) if op in SELECTIONS else ())
            self._look_up(node, [self.values.get(node.input[at]) for at in places if at < len(node.input)])
        if op in {*COMPARISONS, *LIMITS} and any(value is None for value in given):
            self._limit(node, given)

    def _cut(self, node: onnx.NodeProto, bounds: Array) -> None:
        """A constant may cut an axis of fixed size, or any axis at a number of the model."""
        if node.op_type not in ("Slice", "Trilu"):
            return
        axes = self.axes.get(node.input[0]) or []
        which = self.values.get(node.input[3]) if len(node.input) > 3 and node.input[3] else None
        at = which.ravel().tolist() if isinstance(which, np.ndarray) else list(range(bounds.size))
        at = at if node.op_type == "Slice" else [-1]
        for bound, axis in zip(bounds.ravel().tolist(), at, strict=False):
            is_of_call = -len(axes) <= axis < len(axes) and axes[axis] in self.symbols
            if is_of_call and abs(bound) < UNLIMITED and not self.numbers.knows(abs(bound), OF_LENGTH):
                self._flag(node, f"cuts an axis of any length at {bound}")

    def _look_up(self, node: onnx.NodeProto, tables: list[Value]) -> None:
        for table in tables:
            if isinstance(table, np.ndarray) and table.dtype.kind in "fiub":
                axes = [attribute(node, "axis", 0)] if node.op_type.startswith("Gather") else range(table.ndim)
                long = (axis for axis in axes if axis < table.ndim and table.shape[axis] >= TABLE_ROWS)
                for row in (odd_row(np.moveaxis(table, axis, 0)) for axis in long):
                    if row is not None:
                        text = f"looks up a table whose row {row} does not follow from the others"
                        self._flag(node, text, certain=False)

    def _limit(self, node: onnx.NodeProto, given: list[Value]) -> None:
        """What is not followed is compared with numbers of the model, or, as experts, with their indices."""
        for value in given:
            if not isinstance(value, np.ndarray) or not value.size or value.dtype.kind not in "fiu":
                continue
            numbers = np.unique(value.astype(np.float64)).tolist()
            known = self.numbers
            odd = [one for one in numbers if not known.bounds_data(one) and not known.knows(abs(one), OF_LENGTH)]
            if odd and numbers != list(range(len(numbers))):
                self._flag(node, f"compares model values with {odd[0]:g}", certain=False)

    def _decide(self, node: onnx.NodeProto, forms: Sequence[Form], *, rounded: bool = False) -> None:
        """Decisions on each form that depends on the call, compared with each form that is a number.

        If `rounded`, a form decides by where it reaches the next whole number, so its unit matters as well.
        """
        cuts = [form.number for form in forms if not form.terms] or [0.0]
        for form in (one + Form(number=-number) for one in forms if one.terms for number in cuts):
            units = [abs(factor) for factor in form.terms.values()]
            offset, factors = abs(form.number) / min(units), [unit / min(units) for unit in units]
            self.found.decisions += 1
            self.found.numbers.add(offset)
            steps = units if rounded else []
            known = all(self.numbers.knows(number, form) for number in (offset, *factors))
            if known and all(self.numbers.knows(step, form) or self.numbers.knows(1 / step, form) for step in steps):
                continue
            point = node.op_type == "Equal" and offset > FEW and not self.numbers.bounds_data(offset)
            multiples = [f"multiples of {factor:g}" for factor in (steps or factors) if factor != 1]
            by = " and ".join([f"{offset:g}", *multiples[:2]])
            self._flag(node, f"decides on {sources_text(form)} by {by}", point=point)

    def _flag(self, node: onnx.NodeProto, text: str, *, certain: bool = True, point: bool = False) -> None:
        self.found.findings.append(Finding(node.name or node.output[0], text, certain, point))


OF_LENGTH = Form.of("length", LENGTH)


def _sum(op: str, forms: list[Form], *, is_float: bool) -> Form | None:
    """Result of an operator that sums, multiplies by a number, or counts; None for others."""
    first, other = forms[0], forms[-1]
    if op in ("Add", "Sum"):
        return sum(forms[1:], first)
    if op in ("Sub", "Neg"):
        return first + other.times(-1) if op == "Sub" else first.times(-1)
    if op == "Mul" and not (first.terms and other.terms):
        return other.times(first.number) if other.terms else first.times(other.number)
    if op == "Div" and is_float and not other.terms and other.number:
        return first.times(1 / other.number)
    if op == "Range":
        index = Form.of(f"index to {forms[1].key()} by {other.key()}", INDEX)
        return first + (index if other.terms else index.times(other.number))
    return None


def sources_text(form: Form) -> str:
    return " and ".join(sorted(form.sources)) or "a number"


def attribute(node: onnx.NodeProto, name: str, default: int) -> int:
    return next((int(one.i) for one in node.attribute if one.name == name), default)


def _axes(port: onnx.ValueInfoProto) -> list[int | str | None]:
    dims = port.type.tensor_type.shape.dim
    return [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in dims]


def _array(tensor: onnx.TensorProto) -> Array | None:
    """The elements of a constant, of bfloat16 as float32; None for weights in another file."""
    if tensor.external_data:
        return None
    array: Array = numpy_helper.to_array(tensor)
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def _parts(value: Value) -> tuple[Form | None, ...]:
    numbers = value.ravel()[:LISTED] if isinstance(value, np.ndarray) else ()
    return value if isinstance(value, tuple) else tuple(Form(number=float(number)) for number in numbers)


LISTED = 64  # elements of a list that are followed one by one

FOLDED = frozenset([
    "Abs", "Add", "And", "Cast", "Ceil", "Div", "Equal", "Flatten", "Floor", "Gather", "Greater", "GreaterOrEqual",
    "Identity", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or", "Range", "Reciprocal",
    "ReduceSum", "Relu", "Reshape", "Round", "Slice", "Sqrt", "Squeeze", "Sub", "Transpose", "Unsqueeze",
    "Where", "Concat",
])  # fmt: skip
"""Operators whose results for small constants are computed; of up to three inputs, none is larger than they allow."""

FEW_INPUTS, FOLDED_SIZE = 3, 512


def fold(node: onnx.NodeProto, arrays: list[Array]) -> Array | None:
    """The first output of a node with small constants as inputs; None if it is not computed."""
    if node.domain not in ("", "ai.onnx") or node.op_type not in FOLDED or len(arrays) > FEW_INPUTS:
        return None
    if sum(array.size for array in arrays) > FOLDED_SIZE or any(array.dtype.kind not in "fiub" for array in arrays):
        return None
    from onnx.reference import ReferenceEvaluator  # noqa: PLC0415 - not needed by most graphs

    try:
        if node.op_type == "Range" and not abs(arrays[1] - arrays[0]) <= FOLDED_SIZE * abs(arrays[2]):
            return None
        feeds = dict(zip([name for name in node.input if name], arrays, strict=True))
        ports = [
            onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in feeds.items()
        ]
        graph = onnx.helper.make_graph([node], "constant", ports, [onnx.ValueInfoProto(name=node.output[0])])
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)])
        with np.errstate(all="ignore"):
            return np.asarray(list(ReferenceEvaluator(model).run([node.output[0]], feeds))[0])
    except Exception:  # invalid inputs; onnxruntime reports them
        return None


TOLERANCE = 1e-3
"""Tolerance relative to the largest number of a column; larger than the error of float32 cosines of large angles."""

ROUNDED = 2.0**-7  # the same for a table that was rounded to bfloat16: one unit in the last place of 1
TABLE_ROWS = 32  # constants with fewer rows are not checked: the scenarios read every row


def odd_row(table: Array) -> int | None:
    """The first irregular row of a table; None if the table is regular.

    Regular columns are constants, lines and scaled sinusoids of the row number. A square table whose rows are the
    previous row shifted by one place is regular as well: a mask by distance. Rows with numbers that are not finite
    are regular only in constant tables and such masks.
    """
    rows = table.reshape(len(table), -1).astype(np.float64)
    if len(rows) < 4 or (rows == rows[0]).all():
        return None
    if rows.shape[0] == rows.shape[1]:
        shifted = (rows[1:, 1:] != rows[:-1, :-1]).any(axis=1)
        if shifted.mean() < 0.5:  # a mask by distance
            return int(np.argmax(shifted)) + 1 if shifted.any() else None
    finite = np.isfinite(rows).all(axis=1)
    if not finite.all():
        return int(np.argmin(finite))
    is_rounded = table.dtype.kind == "f" and not (table.astype(np.float32).view(np.uint32) & 0xFFFF).any()
    share = ROUNDED if is_rounded else TOLERANCE
    odd = (_odd_in(column, (np.abs(column).max() or 1.0) * share) for column in rows.T)
    return min((row for row in odd if row is not None), default=None)


def _odd_in(column: Array, tolerance: float) -> int | None:
    """The first irregular row of a column: c[n + 1] + c[n - 1] = f * c[n], with one f for a sinusoid, 2 for a line."""
    around, middle = column[2:] + column[:-2], column[1:-1]
    if np.ptp(column) <= tolerance:
        return None
    largest = [row for row in np.argsort(-np.abs(middle))[:5] if middle[row]]  # one of them may be irregular
    candidates = [2.0, *(float(around[row] / middle[row]) for row in largest)]
    misses = [np.abs(around - factor * middle) > 4 * tolerance for factor in candidates]
    best = min(misses, key=np.count_nonzero)
    return int(np.argmax(best)) + 2 if best.any() else None
