"""Rewrites half-precision graphs in memory: one that computes in float32, and one that rounds after every node.

Half precision hides small faults: an epsilon, a variant of GELU, or rotary angles of too few bits change less than its
rounding. So such a graph is compared twice: unchanged, with the rounding noise of the model in that precision, and as a
copy that computes in float32 with the same weights, with the noise of float32.

The eager model multiplies a float16 tensor by 0.044715 and rounds the product; a graph stores that number as float16
and so rounds it, too. This is invisible in half precision, but a difference in a float32 copy of the graph. So the copy
uses the exact number if it is one of the model's (`KnownConstants`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import frexp, isfinite, log2, pi, sqrt
from statistics import NormalDist
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, shape_inference

from llmconv.runtime.onnxruntime.guard import graphs, refill, values_read_by
from llmconv.runtime.onnxruntime.session_settings import HALF_PRECISION, compute_in_float32, exact_number
from llmconv.tensors import Array
from llmconv.verify.results import Check
from llmconv.verify.sigma import ULPS

WITHOUT_KERNELS = "bfloat16"  # the dtype for which onnxruntime's CPU provider has almost no kernels
IN_FLOAT32 = ", in float32"  # suffix of the scenarios of the float32 copy
ROUNDED = ", every value rounded"  # suffix of the scenarios of the copy that rounds after every node
HALF = set(HALF_PRECISION.values())

MASKED = {"Softmax", "Attention", "GroupQueryAttention", "MultiHeadAttention"}
"""Operators in which a large negative number hides a key."""

MASKING = {  # operators through which a mask gets there: they arrange it, and add it to scores
    *("Unsqueeze", "Squeeze", "Reshape", "Expand", "Slice", "Concat", "Transpose", "Identity", "Where", "Cast", "Add")
}

COPYING = {  # operators whose results are rounded if their inputs are
    *("Reshape", "Transpose", "Slice", "Gather", "Concat", "Unsqueeze", "Squeeze", "Expand", "Split", "Identity"),
    *("Where", "Flatten", "Tile", "Pad", "Neg", "Max", "Min", "Relu", "If", "Loop", "ScatterND", "GatherND"),
}


def widen(
    model: onnx.ModelProto, half: int, known: KnownConstants, weights: Iterable[str] = (), *, masks: bool = True
) -> None:
    """Replaces one half-precision dtype by float32 in a graph, in place; the other one would be a fault and stays.

    Constants may be roundings of `known` numbers; `weights` are inline initializers that are tensors of the model, with
    exact values. With `masks`, what hides keys is the smallest number of float32.
    """
    kept, hidden = set(weights), _masks(model.graph) if masks else set()

    def values(tensor: onnx.TensorProto) -> Array:
        stored: Array = numpy_helper.to_array(tensor)
        exact = exact_number(tensor)
        if exact is not None:
            return exact
        if tensor.name in hidden:
            return hiding(stored)
        return stored if tensor.name in kept else known.restored(stored)

    compute_in_float32(model, half, values)


def _masks(graph: onnx.GraphProto) -> set[str]:
    """Initializers that `Where` puts into a mask, and nothing computes with: what hides a key, not a number."""
    users: dict[str, list[onnx.NodeProto]] = defaultdict(list)
    for node in graph.node:
        for name in values_read_by(node):
            users[name].append(node)
    halves = {tensor.name for tensor in graph.initializer if tensor.data_type in HALF}
    return {
        name
        for name in halves & users.keys()
        if all(node.op_type == "Where" and _reaches_scores(node.output[0], users) for node in users[name])
    }


def _reaches_scores(name: str, users: Mapping[str, Sequence[onnx.NodeProto]]) -> bool:
    """Whether a mask is only arranged and added on its way to operators in which it hides keys."""
    return bool(users[name]) and all(
        node.op_type in MASKED or (node.op_type in MASKING and _reaches_scores(node.output[0], users))
        for node in users[name]
    )


def round_every_value(model: onnx.ModelProto, half: int, *, typed: onnx.ModelProto | None = None) -> None:
    """Makes a graph compute every node in float32 and round the result to the element type `half`, in place.

    Half-precision kernels, which accumulate in float32, have the same arithmetic. Inputs and outputs are float32 with
    rounded values. The weights of `model` may be left out; types are inferred from `typed`, by default `model`.
    """
    rounded = _half_precision_values(typed or model, half)
    widen(model, half, KnownConstants(), masks=False)  # rounded, they would be infinite
    _round(model, half, rounded)


def _half_precision_values(model: onnx.ModelProto, half: int) -> set[str]:
    """Names of all values of a dtype; an operator unknown to onnx is assumed to keep that of its first input."""
    types: dict[str, int] = {}
    for graph in graphs(shape_inference.infer_shapes(model).graph):
        infos = [*graph.input, *graph.output, *graph.value_info]
        types |= {info.name: info.type.tensor_type.elem_type for info in infos if info.type.tensor_type.elem_type}
        types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
        for node in graph.node:
            first = next((types[name] for name in node.input if types.get(name) in {half, TensorProto.FLOAT}), 0)
            for name in node.output:
                types.setdefault(name, first)
    return {name for name, kind in types.items() if kind == half}


def _round(model: onnx.ModelProto, half: int, values: set[str]) -> None:
    """Inserts casts to `half` and back after every node and every input that returns one of the values."""
    inputs = {info.name for info in model.graph.input} & values
    for graph in graphs(model.graph):
        # a kernel need not compute an output that nothing reads: CUDA's norms leave theirs out
        read = {name for node in graph.node for name in values_read_by(node)} | {info.name for info in graph.output}
        nodes: list[onnx.NodeProto] = []
        renamed = {name: f"{name}:rounded" for name in inputs}
        if graph is model.graph:
            nodes += [node for name in sorted(inputs) for node in _rounding_casts(name, renamed[name], half)]
        for node in graph.node:
            new = onnx.NodeProto.FromString(node.SerializeToString())
            if new.op_type != "Shape" or new.domain:  # rounded or not, the shape is the same
                new.input[:] = [renamed.get(name, name) for name in new.input]
            nodes.append(new)
            if node.op_type in COPYING and not node.domain:
                continue
            for at, name in enumerate(node.output):
                if name in values & read:
                    new.output[at] = f"{name}:exact"
                    nodes += _rounding_casts(new.output[at], name, half)
        refill(graph.node, nodes)


def _rounding_casts(source: str, target: str, half: int) -> list[onnx.NodeProto]:
    low = f"{target}:half"
    return [
        helper.make_node("Cast", [source], [low], name=f"{target}:narrow", to=half),
        helper.make_node("Cast", [low], [target], name=f"{target}:widen", to=TensorProto.FLOAT),
    ]


def most_precise(checks: list[Check]) -> list[Check]:
    """The checks of the float32 copy if any of them failed; half precision would locate a fault too late."""
    precise = [check for check in checks if not check.output or check.name.endswith(IN_FLOAT32)]
    return precise if any(check.verdict == "fail" and check.output for check in precise) else checks


FEW = 8  # maximum number of elements of an initializer that is treated as constants of a formula
EQUAL = 0.99
"""Minimum share of equal elements of a table, up to one unit in the last place of 1; others are not replaced."""

PLAIN_BITS = 4  # numbers with at most this many significant bits are exact: 0.5, 3, 10
OF_FORMULAS = (  # constants of activation functions
    *(0.044715, sqrt(2 / pi), sqrt(2), 1 / sqrt(2), 1.702, 0.7978845608, 0.3989422804, 1 / log2(np.e), log2(np.e)),
    *(0.7978845608 * 0.044715, 1 / 3, 2 / 3, 1 / 6),
)


@dataclass(frozen=True)
class KnownConstants:
    """Numbers with which a model computes, other than its weights."""

    # constants of activation functions, and numbers of its config with their roots and reciprocals
    numbers: Sequence[float] = ()
    # rotary, float32 `[head_dim / 2]`, each with the factor of cosine and sine
    frequencies: Sequence[tuple[Array, float]] = ()

    @classmethod
    def of(cls, config: Mapping[str, Any], frequencies: Sequence[tuple[Array, float]]) -> KnownConstants:
        return cls(_known_numbers(config), frequencies)

    def restored(self, values: Array) -> Array:
        """Half-precision values in float32, replaced by the known numbers that they are roundings of.

        They may have any shape: a few numbers, a rotary table, or other values, which are only cast.
        """
        if values.size <= FEW:
            return _restored(values, self.numbers)
        wide = values.astype(np.float32)
        for table in self._tables(values.shape):
            off = np.abs(wide - table) > ULPS[values.dtype.name]
            if off.mean() < 1 - EQUAL:
                return np.where(off, wide, table)
        return wide

    def is_exact(self, values: Array) -> bool:
        """Whether `restored` gives the numbers that the values are roundings of; else they are a table of others."""
        if values.size <= FEW or bool((values == values.ravel()[0]).all()):
            return True
        wide = values.astype(np.float32)
        return any((np.abs(wide - one) <= ULPS[values.dtype.name]).mean() > EQUAL for one in self._tables(values.shape))

    def is_rotary(self, shape: tuple[int, ...]) -> bool:
        widths = {len(frequencies) * times for frequencies, _ in self.frequencies for times in (1, 2)}
        return len(shape) == 2 and shape[1] in widths

    def _tables(self, shape: tuple[int, ...]) -> Iterator[Array]:
        """Possible tables of that shape: cosines and sines by position, float32."""
        for frequencies, factor in self.frequencies if self.is_rotary(shape) else ():
            if shape[1] % len(frequencies) == 0:
                times = shape[1] // len(frequencies)
                angles = np.arange(shape[0], dtype=np.float32)[:, None] * np.tile(frequencies, times)
                yield from (function(angles) * np.float32(factor) for function in (np.cos, np.sin))


def _known_numbers(config: Mapping[str, Any]) -> list[float]:
    numbers = [value for value in _numbers(config) if 0 < abs(value) < 1e9]
    width = config.get("hidden_size") or config.get("n_embd")
    heads = config.get("num_attention_heads") or config.get("n_head")
    if isinstance(width, int) and isinstance(heads, int) and heads and width:
        numbers.append(width / heads)
    found = list(OF_FORMULAS)
    shares = {share for share in _numbers(config.get("activation_sparsity_pattern")) if 0 < share < 1}
    found += map(NormalDist().inv_cdf, shares)  # Gemma 3n: deviations above the mean, of a share of the activations
    for value in numbers:
        size = abs(value)
        found += [value, -value, 1 / value, sqrt(size), 1 / sqrt(size), size**0.25, size**-0.25]
    return found


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value):
        yield float(value)
    inner: Iterable[Any] = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    for one in inner:
        yield from _numbers(one)


def _restored(values: Array, known: Sequence[float]) -> Array:
    """The first known number with each value as its rounding; exact values are not replaced."""
    wide = values.astype(np.float32)
    candidates = np.array(known, dtype=np.float64)
    with np.errstate(over="ignore"):
        rounded = candidates.astype(values.dtype).astype(np.float32)
    for at, value in enumerate(wide.flat):
        matching = candidates[rounded == value]
        is_exact = float(frexp(float(value))[0] * 2**PLAIN_BITS).is_integer()
        if matching.size and not is_exact and float(value) not in matching:
            wide.flat[at] = np.float32(matching[0])
    return wide


def hiding(values: Array) -> Array:
    """Numbers of a mask in float32: the smallest number of the dtype, which hides a key, becomes that of float32."""
    wide = values.astype(np.float32)
    wide[values == ml_dtypes.finfo(values.dtype).min] = np.finfo(np.float32).min
    return wide
