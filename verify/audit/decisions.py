"""The audit of decisions: one check per graph, which lists nodes that decide by numbers that are not the model's.

A graph computes its masks, positions and shapes from lengths, token ids and the mask, in a few dozen nodes without
weights. `GraphWalk` derives node by node the values that depend on the call only. Sums and layout changes decide
nothing. Nodes that compare, round, clip, look up or cut do decide, and must do so by numbers of the model.

Axes are derived on a copy of the graph, in which operators of onnxruntime become standard ones with outputs of the same
shapes: ONNX's shape inference stops at operators that it does not know. Axes that it loses are derived after layout
changes, slices and elementwise operators. Shapes that the graph declares for its inner values are not used, because no
check has validated them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.inliner import inline_local_functions

from llmconv.checkpoint import read_json
from llmconv.errors import first_line
from llmconv.runtime.cache_names import is_present, layer_of, past_of
from llmconv.runtime.onnxruntime.guard import is_external
from llmconv.runtime.onnxruntime.session_settings import half_precision
from llmconv.verify.audit.config_numbers import ConfigNumbers, DecisionJudge, window_of
from llmconv.verify.audit.derived_values import DerivedValues
from llmconv.verify.audit.lookups import Lookups
from llmconv.verify.audit.state import (
    HALVES,
    INPUTS,
    MASK,
    RANDOM,
    AffineForm,
    AuditFindings,
    AxisSizes,
    ConstantValue,
    InputValue,
    ModelValue,
    Value,
    ValueKind,
    WalkState,
    atom,
    attribute,
    forms_of,
    made_of,
)
from llmconv.verify.results import Check

NAME = "decisions"
"""Name of the check in reports."""

HIDDEN, PRODUCTS = "last_hidden_state", ("MatMul", "Gemm")

FIRST = 5
"""Maximum number of findings in a detail."""

STORED_PREFIX = re.compile(r"prefix\.\d+\.(key|value)")
"""Keys and values of a tuned prefix, see `export --prefix`."""

MANY = 1e9
"""Larger numbers are ends of a range and are not printed."""


SMALL = 2.0
"""Numbers up to this are in the arithmetic of pooling; every run has longer texts and larger batches."""


def audit_decisions(
    graph: str, model: onnx.ModelProto, config: Mapping[str, Any], *, prefix: int = 0, pools: bool = False
) -> Check:
    """Fails if a graph decides on lengths, batch size, positions or tokens by a number that is not the model's.

    Args:
        config: from `read_config`.
        prefix: number of virtual tokens of the graph's prefix in the manifest; 0 for none.
        pools: the part after the model joins the tokens of a text, which counts them and looks up the last one.
    """
    try:
        found = decisions_of(model, config, INPUTS, prefix=prefix)
        after = after_model(model) if pools else frozenset()
    except Exception as error:  # not a valid graph; the check of its structure reports why
        return Check(NAME, graph, "", verdict="fail", detail=f"cannot be analyzed: {first_line(error)}")
    wrong = (one for one in found.findings if one.node not in after or one.number > SMALL)
    texts = list(dict.fromkeys(f"`{one.node}` {one.text}" for one in wrong))
    window = window_of(config)
    if window and window.layers & _layers(model) and not {window.size + step for step in (-1, 0, 1)} & found.numbers:
        texts.append(f"no node decides by the sliding window of {window.size}")
    numbers = ", ".join(f"{number:g}" for number in sorted(found.numbers) if number < MANY) or "none"
    detail = (
        _first(texts) or f"{found.decisions} comparisons, limits and choices, all by numbers of the model ({numbers})"
    )
    return Check(NAME, graph, "", verdict="fail" if texts else "pass", detail=detail)


def after_model(model: onnx.ModelProto) -> frozenset[str]:
    """The nodes of a graph without a cache that follow the model: those on which no hidden state depends.

    The hidden state is that of all tokens, an output of graphs of embeddings; else the last product with a weight, as
    the scores of a classifier are chosen from those of all tokens.
    """
    stored = {tensor.name for tensor in model.graph.initializer if is_external(tensor)}
    names = {port.name for port in model.graph.output}
    products = [node for node in model.graph.node if node.op_type in PRODUCTS and stored.intersection(node.input)]
    wanted = {HIDDEN} if HIDDEN in names else {name for node in products[-1:] for name in node.output}
    inside = set()
    for node in reversed(model.graph.node):
        if wanted.intersection(node.output):
            wanted.update(node.input)
            inside.add(node.name or node.output[0])
    return frozenset(node.name or node.output[0] for node in model.graph.node) - inside


def audit_foreign_decisions(
    graph: str,
    model: onnx.ModelProto,
    config: Mapping[str, Any],
    inputs: Mapping[str, str] = INPUTS,
    *,
    prefix: int = 0,
) -> tuple[list[Check], list[str]]:
    """The same audit for a graph of another exporter, with fewer failures.

    Arguments are those of `audit_decisions`; `inputs` has the property of a call that each input contains.

    Returns:
        A failed check if the graph tests for a single length, position, batch size or token that no field of the config
        contains; and a note on other decisions by numbers that are not the model's.
    """
    try:
        found = decisions_of(model, config, inputs, tables=False, prefix=prefix)
    except Exception as error:  # a graph of an unknown exporter
        return [], [f"{graph}: its decisions cannot be analyzed: {first_line(error)}"]
    texts = {point: [f"`{one.node}` {one.text}" for one in found.findings if one.point is point and one.certain]
            for point in (True, False)}  # fmt: skip
    checks = [Check(NAME, graph, "", verdict="fail", detail=_first(texts[True]))] if texts[True] else []
    others = list(dict.fromkeys(texts[False]))
    return checks, [f"{graph}: {_first(others)}, which is not in the config"] if others else []


def _first(texts: Sequence[str]) -> str:
    """The first texts, and the number of others."""
    return "; ".join(texts[:FIRST]) + (f"; and {len(texts) - FIRST} more" if len(texts) > FIRST else "")


def read_config(folder: Path) -> dict[str, Any]:
    """The fields that `config.json` states, and transformers' defaults; without fields that the config class lacks."""
    from transformers import AutoConfig  # noqa: PLC0415 - slow to import, and not needed to walk

    fields = read_json(folder / "config.json")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return {"stated": read_fields(fields, config), "default": read_fields(config.to_dict(), config)}
    except Exception:  # a config class in the folder's own code, which has no known defaults
        return {"stated": fields, "default": {}}


def decisions_of(
    model: onnx.ModelProto,
    config: Mapping[str, Any],
    inputs: Mapping[str, str],
    *,
    tables: bool = True,
    prefix: int = 0,
) -> AuditFindings:
    """The decisions of a graph, with arguments as in `audit_foreign_decisions`.

    `tables` also analyzes the contents of lookup tables.
    """
    if model.functions:
        model = inline_local_functions(model)
    inferred = onnx.shape_inference.infer_shapes(_undeclared(model), data_prop=True)
    ports = [*inferred.graph.input, *inferred.graph.value_info, *inferred.graph.output]
    symbols = frozenset(dim.dim_param for port in model.graph.input for dim in port.type.tensor_type.shape.dim)
    axes = {port.name: _axes(port) for port in ports if port.type.tensor_type.HasField("shape")}
    axes |= {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    axes |= _heads(model)
    types = {port.name: port.type.tensor_type.elem_type for port in ports}
    half = half_precision(model)
    walk = GraphWalk(
        ConfigNumbers.of(config, _lengths(model, prefix), half),
        WalkState(axes, types, inputs, symbols - {""}, tables, bool(half)),
    )
    walk.run(model.graph)
    return walk.judge.found


def _heads(model: onnx.ModelProto) -> dict[str, AxisSizes]:
    """The axes of the cache's inputs, with fixed sizes taken from its outputs, which the structure audit checks.

    Inputs may have symbolic axes there: a client that guesses them wrongly passes an empty cache of another shape.
    """
    made = {past_of(port.name): _axes(port) for port in model.graph.output if is_present(port.name)}
    given = {port.name: _axes(port) for port in model.graph.input if port.name in made}
    return {
        name: [size if isinstance(size, int) else axis for axis, size in zip(axes, made[name], strict=True)]
        for name, axes in given.items()
        if len(axes) == len(made[name])
    }


def _undeclared(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without declared shapes of inner values and outputs, for shape inference."""
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    del bare.graph.value_info[:]
    for port in bare.graph.output:
        port.type.tensor_type.ClearField("shape")
    in_standard_operators(bare.graph)
    return bare


def _layers(model: onnx.ModelProto) -> set[int]:
    """The layers whose cache a graph returns: all layers, those of a stage, or none for an embedding."""
    return {layer for port in model.graph.output if (layer := layer_of(port.name)) is not None}


def _axes(port: onnx.ValueInfoProto) -> AxisSizes:
    dims = port.type.tensor_type.shape.dim
    return [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in dims]


def _lengths(model: onnx.ModelProto, prefix: int) -> list[int]:
    """Lengths that are fixed in the graph: numeric axes of its inputs, except those of states and heads.

    The length of the prefix is one of them if the graph slices stored keys of that length.
    """
    found = []
    for port in model.graph.input:
        axes = _axes(port)
        found += [axis for axis in (axes[:2] if len(axes) < 4 else axes[2:3]) if isinstance(axis, int)]
    cut = {node.input[0] for node in model.graph.node if node.op_type == "Slice"}
    stored = [tensor for tensor in model.graph.initializer if STORED_PREFIX.fullmatch(tensor.name)]
    lengths = {tensor.dims[2] if len(tensor.dims) == 4 and tensor.external_data else 0 for tensor in stored}
    is_used = bool(stored) and lengths == {prefix} and {tensor.name for tensor in stored} <= cut
    return [*found, prefix] if prefix and is_used else found


SMALL_CONSTANT = 1 << 12
"""Maximum number of elements of a constant in a graph that may contain its weights."""


class GraphWalk:
    """Visits the nodes of a graph in order."""

    def __init__(self, numbers: ConfigNumbers, state: WalkState) -> None:
        self.state, self.judge = state, DecisionJudge(numbers)
        self._lookups, self._results = Lookups(self.state, self.judge), DerivedValues(self.state, self.judge)

    def run(self, graph: onnx.GraphProto, given: Mapping[str, Value] | None = None) -> None:
        """Visits all nodes of a graph; `given` are known values of its inputs."""
        values = self.state.values
        for port in graph.input:
            source = self.state.ports.get(port.name)
            values[port.name] = InputValue(_given(port.name, source)) if source else ModelValue()
        values |= given or {}
        for node in graph.node:
            for name in node.input:
                self.state.readers.setdefault(name, []).append(node)
        for tensor in graph.initializer:
            values[tensor.name] = self._held(tensor)
            self.state.weights |= {tensor.name} if tensor.external_data else set()
        for node in graph.node:
            self._see(node)

    def _held(self, tensor: onnx.TensorProto) -> Value:
        """A constant or a weight; if both are inline, by size."""
        if tensor.external_data or (not self.state.tables and np.prod(tensor.dims, dtype=np.int64) > SMALL_CONSTANT):
            return ModelValue()
        return ConstantValue(numpy_helper.to_array(tensor))

    def _see(self, node: onnx.NodeProto) -> None:
        value = self._value(node, self.state.inputs(node))
        self.state.values |= dict.fromkeys(node.output, value)
        follow_axes(self.state, node)
        self.state.note_binary(node)
        if isinstance(value, ModelValue) and self.state.is_of_weights(node):
            self.state.weights |= set(node.output)
            if not _is_widened(node) or node.input[0] in self.state.changed:
                self.state.changed |= set(node.output)

    def _value(self, node: onnx.NodeProto, inputs: list[Value | None]) -> Value:
        if node.op_type in ("Shape", "Size"):
            return self._results.lengths(node)
        if node.op_type == "Constant":
            return _constant(node)
        if node.op_type in RANDOM or (node.op_type == "Dropout" and len(inputs) > 2 and inputs[2] is not None):
            self.judge.flag(node, f"{node.op_type} gives different results in each run")
            return ModelValue()
        given = [value for value in inputs if value is not None]
        self._lookups.at_bounds(node, inputs)
        self._lookups.at_index(node, inputs)
        self._lookups.at_window(node)
        if any(one.HasField("g") for one in node.attribute):
            return self._inner(node, given)
        if node.op_type == "Range":
            return self._results.counted(node, inputs)
        if any(isinstance(value, ModelValue) for value in given):
            self._lookups.at_data(node, inputs)
            return ModelValue()
        if all(isinstance(value, ConstantValue) for value in given):
            return self._results.folded(node, given)
        return self._results.of_call(node, given)

    def _inner(self, node: onnx.NodeProto, given: list[Value]) -> Value:
        """If, Loop and Scan, whose subgraphs can read the values around them.

        A model's scans go over model values only. Values that branches or loops derive from the call are not analyzed.
        """
        graphs = [one.g for one in node.attribute if one.HasField("g")]
        text = f"{node.op_type} of a value that is not analyzed"
        if node.op_type != "Scan" or not all(isinstance(value, ModelValue) for value in given) or _counts(graphs):
            self.judge.flag(node, text, certain=False)
        if node.op_type == "If" and not any(isinstance(value, ModelValue) for value in given):
            self.judge.decisions(node, forms_of(given))
        before, axes = dict(self.state.values), dict(self.state.axes)
        for graph in graphs:
            self.run(graph, dict.fromkeys((port.name for port in graph.input), ModelValue()))
            if any(isinstance(self.state.values.get(name), InputValue) for one in graph.node for name in one.input):
                self.judge.flag(node, text, certain=False)
        self.state.values, self.state.axes = before, axes
        return ModelValue()


def _counts(graphs: list[onnx.GraphProto]) -> bool:
    """Whether a scan passes values other than floating-point numbers from step to step."""
    floats = {*HALVES, onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE}
    return any(port.type.tensor_type.elem_type not in floats for graph in graphs for port in graph.input)


def _is_widened(node: onnx.NodeProto) -> bool:
    """Whether a node only casts to float32, as graphs do with weights in half precision."""
    return node.op_type == "Cast" and attribute(node, "to", 0) == onnx.TensorProto.FLOAT


def _given(name: str, source: str) -> AffineForm:
    """The form of an input of the graph; a mask is 0 or 1."""
    return atom(name, source, kind=ValueKind.BINARY if source == MASK else ValueKind.COUNT)


def _constant(node: onnx.NodeProto) -> Value:
    value = node.attribute[0]
    if value.name == "value":
        return ModelValue() if value.t.external_data else ConstantValue(numpy_helper.to_array(value.t))
    return ConstantValue(np.asarray(onnx.helper.get_attribute_value(value)))


ELEMENT_BY_ELEMENT = {"Mul", "Add", "Sub", "Div", "Cast", "Sigmoid", "Identity", "Where"}
COPIED = {"ScatterND", "ScatterElements", "CumSum", "Softmax"}
"""Operators whose result has the shape of the first input."""


def follow_axes(state: WalkState, node: onnx.NodeProto) -> None:
    """Completes the axes of a node's outputs, if those of its inputs are known."""
    if node.op_type == "Reshape":
        return _reshaped(state, node)
    known = state.axes.get(node.input[0]) if node.input else None
    made = state.axes.get(node.output[0]) if node.output else None
    if known is None or (made is not None and all(map(state.is_followed, made))):
        return None
    if node.op_type == "Transpose":
        named = (list(one.ints) for one in node.attribute if one.name == "perm")
        order = next(named, list(range(len(known)))[::-1])
        state.axes[node.output[0]] = [known[at] for at in order]
    elif node.op_type in COPIED:
        state.axes[node.output[0]] = known
    elif node.op_type == "Slice":
        _cut(state, node, known)
    elif node.op_type == "Split":
        _split(state, node, known)
    elif node.op_type == "Expand":
        _expand(state, node)
    elif node.op_type == "Concat":
        _join(state, node)
    elif node.op_type in ELEMENT_BY_ELEMENT:
        _broadcast(state, node)
    return None


def _cut(state: WalkState, node: onnx.NodeProto, known: AxisSizes) -> None:
    """Keeps the axes that a Slice does not cut; the others are those of shape inference."""
    made = state.axes.get(node.output[0]) or [None] * len(known)
    which = state.values.get(node.input[3]) if len(node.input) > 3 else None
    if isinstance(which, ConstantValue) and len(made) == len(known):
        cut = {int(axis) % len(known) for axis in which.array.ravel()}
        state.axes[node.output[0]] = [made[at] if at in cut else axis for at, axis in enumerate(known)]


def _split(state: WalkState, node: onnx.NodeProto, known: AxisSizes) -> None:
    sizes = state.values.get(node.input[1]) if len(node.input) > 1 else None
    axis = attribute(node, "axis", 0) % len(known) if known else 0
    if isinstance(sizes, ConstantValue) and sizes.array.size == len(node.output):
        for name, size in zip(node.output, sizes.array.ravel().tolist(), strict=True):
            state.axes[name] = [int(size) if at == axis else one for at, one in enumerate(known)]


def _expand(state: WalkState, node: onnx.NodeProto) -> None:
    """The axes of an Expand of axes of 1: the list of lengths that it is given."""
    shape = state.values.get(node.input[1])
    parts = state.parts(node.input[1], shape) if shape is not None else None
    if parts is not None and set(state.axes[node.input[0]]) <= {1}:
        state.name_axes(node.output[0], parts)


def _join(state: WalkState, node: onnx.NodeProto) -> None:
    """The axes of a Concat: the sum of the lengths along its axis, the others as in the first input."""
    given = [state.lengths(name) for name in node.input]
    first = given[0]
    if not first or any(lengths is None or len(lengths) != len(first) for lengths in given):
        return
    axis = attribute(node, "axis", 0) % len(first)
    joined = sum((lengths[axis] for lengths in given[1:] if lengths), first[axis])
    state.name_axes(node.output[0], tuple(joined if at == axis else one for at, one in enumerate(first)))


def _broadcast(state: WalkState, node: onnx.NodeProto) -> None:
    """The broadcast axes of all inputs; a number wins over a name."""
    given = [state.axes.get(name) for name in node.input]
    if any(axes is None for axes in given):
        return
    rank = max(len(axes or []) for axes in given)
    made: AxisSizes = []
    for at in range(-rank, 0):
        sizes = {(axes or [])[at] for axes in given if len(axes or []) >= -at} - {1}
        numbers = [size for size in sizes if isinstance(size, int)]
        made.append(next(iter(sizes), 1) if len(sizes) < 2 else numbers[0] if numbers else None)
    state.axes[node.output[0]] = made


def _reshaped(state: WalkState, node: onnx.NodeProto) -> None:
    """The axes of a Reshape whose shape is a list of lengths; -1 is the quotient of the input and the others."""
    shape = state.values.get(node.input[1])
    parts = state.parts(node.input[1], shape) if shape is not None else None
    before = state.lengths(node.input[0])
    if parts is None or before is None or attribute(node, "allowzero", 0):
        return
    if any(not part.terms and part.number == 0 for part in parts[len(before) :]):
        return
    # 0 is the axis of the input at the same place
    parts = tuple(part if part.terms or part.number else before[at] for at, part in enumerate(parts))
    open_axes = [at for at, part in enumerate(parts) if not part.terms and part.number < 0]
    if len(open_axes) > 1:
        return
    made = list(parts)
    for at in open_axes:
        rest = _left(before, [part for one, part in enumerate(parts) if one != at])
        if rest is None:
            return
        made[at] = rest
    state.name_axes(node.output[0], tuple(made))


def _left(whole: list[AffineForm], taken: list[AffineForm]) -> AffineForm | None:
    """A product of axes divided by others; None if more than one axis of the call is left."""
    left = [form for form in whole if form.terms]
    for form in (form for form in taken if form.terms):
        if form.key() not in [one.key() for one in left]:
            return None
        left.remove(next(one for one in left if one.key() == form.key()))
    number = prod(form.number for form in whole if not form.terms)
    by = prod(form.number for form in taken if not form.terms)
    if not by or (len(left) > 1 and number != by):
        return None
    if len(left) > 1:
        return made_of("Size", left)
    return left[0].times(number / by) if left else AffineForm(number=number // by)


ROTARY = frozenset({"rope_scaling", "rope_parameters"})
"""Fields whose inner fields depend on the kind of rotary scaling."""

ROTARY_FIELDS = frozenset({"rope_type", "type", "factor", "original_max_position_embeddings"})
"""Inner fields whose numbers are compared with lengths (transformers modeling_rope_utils.py)."""


def read_fields(fields: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """The fields of a `config.json` or nested config that the config's class has, including those of nested configs."""
    kind = type(config)
    known = {*_defaults(kind), *inspect.signature(kind.__init__).parameters, *kind.attribute_map}
    found: dict[str, Any] = {}
    for name, value in fields.items():
        inner = getattr(config, name, None) if name in kind.sub_configs else None  # some fields warn when they are read
        if name in ROTARY and isinstance(value, Mapping):
            found[name] = _rotary(value)
        elif isinstance(value, Mapping) and hasattr(inner, "to_dict"):
            found[name] = read_fields(value, inner)
        elif name in known:
            found[name] = value
    return found


def _defaults(kind: Any) -> set[str]:
    try:
        return set(kind().to_dict())
    except Exception:  # a config class without defaults
        return set()


def _rotary(value: Mapping[str, Any]) -> dict[str, Any]:
    """The known fields of a rotary scaling, or of one scaling per layer type."""
    return {
        name: _rotary(content) if isinstance(content, Mapping) else content
        for name, content in value.items()
        if name in ROTARY_FIELDS or isinstance(content, Mapping)
    }


SKIPPING = {"SkipLayerNormalization", "SkipSimplifiedLayerNormalization"}
"""Norms of a sum, whose outputs 0 and 3 have the shape of the first input."""


def in_standard_operators(graph: onnx.GraphProto) -> None:
    """Replaces the nodes in place; their values are not those of the graph any more, their shapes are."""
    matrices = {tensor.name for tensor in graph.initializer if len(tensor.dims) == 2}
    nodes = [made for node in graph.node for made in _replaced(node, matrices)]
    del graph.node[:]
    graph.node.extend(nodes)


def _replaced(node: onnx.NodeProto, matrices: set[str]) -> Iterator[onnx.NodeProto]:
    if node.domain == "com.microsoft" and node.op_type in SKIPPING:
        for name in (node.output[at] for at in (0, 3) if at < len(node.output) and node.output[at]):
            yield helper.make_node("Identity", node.input[:1], [name])
    elif node.domain == "com.microsoft" and node.op_type == "FusedMatMul" and _is_of_matrix(node, matrices):
        right = node.input[1]
        if attribute(node, "transB", 0):
            right = f"{node.output[0]} transposed"
            yield helper.make_node("Transpose", [node.input[1]], [right])
        yield helper.make_node("MatMul", [node.input[0], right], list(node.output))
    else:
        yield node


def _is_of_matrix(node: onnx.NodeProto, matrices: set[str]) -> bool:
    """Whether a product is one with a matrix of weights, in which at most the matrix is transposed."""
    others = ("transA", "transBatchA", "transBatchB")
    return node.input[1] in matrices and not any(attribute(node, name, 0) for name in others)
