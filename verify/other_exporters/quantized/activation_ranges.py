"""Compares the ranges in which a graph rounds activations with those that the eager model has on a text.

`QuantizeLinear` has a constant scale and zero point: those of the smallest and the largest number that the product
behind it reads on the text, with 0 between them. Where norms are divided by factors, so are these numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch

from llmconv.runtime.onnxruntime.guard import nodes
from llmconv.runtime.runner import Runner, default_positions
from llmconv.tensors import Array, LazyTensor
from llmconv.verify.audit.weights import reference_name
from llmconv.verify.other_exporters.quantized.constants import Constants
from llmconv.verify.other_exporters.quantized.tensor_matching import MatchedMatrix
from llmconv.verify.results.report import Check

NAME = "activation ranges"
"""Name of the checks in reports."""

ROUNDING, RESTORING, PRODUCT = "QuantizeLinear", "DequantizeLinear", "MatMul"
STEPS = 255
TOLERANCE = 1e-3
"""Largest relative difference of a scale, of which rounding noise is a hundredth."""
NEAREST = 0.5 + STEPS * TOLERANCE / 2
"""Largest distance of a zero point from its exact place."""

Extremes = Mapping[str, Array]
"""The smallest and the largest number of every column, float32 [2, K], by name of the matrix."""


@dataclass(frozen=True)
class ActivationRounding:
    """How a graph rounds the other factor of a matrix; `scale` and `zero` are None if it does not.

    `codes` is the name of the initializer with the matrix's codes; `scale` and `zero` are the same for the inverse.
    """

    codes: str
    scale: float | None = None
    zero: int | None = None


def rounds_activations(model: onnx.ModelProto) -> bool:
    """Whether a graph rounds activations in ranges that it contains."""
    return any(node.op_type == ROUNDING for node in nodes(model))


def ranged_activations(model: onnx.ModelProto, constants: Constants) -> frozenset[str]:
    """Rounded activations that only products with dequantized matrices read: those that `check_ranges` checks."""
    shown = {port.name for port in model.graph.output}
    products = {id(product) for product, _ in _products(model, constants)}
    found = {product.input[0] for product, _ in _products(model, constants)} - shown
    return frozenset(
        name
        for name in found
        if all(id(node) in products and list(node.input).index(name) == 0 for node in constants.users[name])
    )


def measured_extremes(
    model: torch.nn.Module, runner: Runner, tensors: Mapping[str, LazyTensor], texts: Sequence[Array]
) -> dict[str, Array]:
    """The extremes of the inputs of a model's modules on texts, token ids int64 [1, tokens]."""
    found: dict[str, Array] = {}

    def watch(name: str) -> Any:
        def see(_: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
            rows = inputs[0].flatten(0, -2)
            both = torch.stack([rows.amin(0), rows.amax(0)]).numpy()
            old = found.get(name, both)
            found[name] = np.stack([np.minimum(old[0], both[0]), np.maximum(old[1], both[1])])

        return see

    named = {module: reference_name(f"{name}.weight", tensors) for name, module in model.named_modules()}
    matrices = {module: name for module, name in named.items() if name and len(tensors[name].shape) == 2}
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    hooks = [one.register_forward_pre_hook(watch(name)) for one, name in matrices.items() if one is not embedding]
    for text in texts:
        mask = np.ones_like(text)
        runner.prefill(text, mask, default_positions(mask, text.shape[1]))
    for hook in hooks:
        hook.remove()
    return found


def check_ranges(
    graph: str,
    model: onnx.ModelProto,
    constants: Constants,
    quantized: Sequence[MatchedMatrix],
    extremes: Extremes,
    factors: Mapping[str, LazyTensor],
) -> Check:
    """One check of all products of a graph with dequantized matrices, by eager extremes and smoothing factors."""
    names = {one.stored.name: sorted(one.names) for one in quantized}
    found = list(_roundings(model, constants))
    problems = [
        f"what `{name}` is multiplied with {problem}"
        for one in found
        for name in names.get(one.codes) or [one.codes]
        if (problem := _problem(one, extremes.get(name), factors.get(name)))
    ]
    if problems:
        detail = f"{len(problems)} of {len(found)} wrong, first: {problems[0]}"
        return Check(NAME, graph, "", verdict="fail", detail=detail)
    return Check(NAME, graph, "", detail=f"{len(found)} ranges as on the text")


def _roundings(model: onnx.ModelProto, constants: Constants) -> Iterator[ActivationRounding]:
    """The rounding before each product with a dequantized matrix."""
    for node, codes in _products(model, constants):
        yield _rounding(codes, constants.makers.get(node.input[0]), constants)


def _products(model: onnx.ModelProto, constants: Constants) -> Iterator[tuple[onnx.NodeProto, str]]:
    """Products with a dequantized matrix, and the initializer of its codes."""
    for node in nodes(model):
        matrix = constants.makers.get(node.input[1]) if node.op_type == PRODUCT else None
        if matrix is not None and matrix.op_type == RESTORING and (codes := constants.initializer(matrix.input[0])):
            yield node, codes


def _rounding(codes: str, restoring: onnx.NodeProto | None, constants: Constants) -> ActivationRounding:
    rounding = constants.makers.get(restoring.input[0]) if restoring is not None else None
    if restoring is None or rounding is None or (restoring.op_type, rounding.op_type) != (RESTORING, ROUNDING):
        return ActivationRounding(codes)
    pairs = [[constants.array(name) for name in node.input[1:3]] for node in (rounding, restoring)]
    if any(one is None or one.size != 1 for pair in pairs for one in pair) or len(pairs[0]) != len(pairs[1]):
        return ActivationRounding(codes)
    numbers = [[float(one.ravel()[0]) for one in pair if one is not None] for pair in pairs]
    is_inverse = numbers[0] == numbers[1] and len(numbers[0]) == 2
    return ActivationRounding(codes, numbers[0][0], int(numbers[0][1])) if is_inverse else ActivationRounding(codes)


def _problem(found: ActivationRounding, extremes: Array | None, factors: LazyTensor | None) -> str:
    if extremes is None:
        return "was not seen in the model"
    if found.scale is None or found.zero is None:
        return "is not rounded to 8 bits and back by the same constants"
    own = extremes / factors.read().ravel() if factors is not None else extremes
    low, high = min(float(own.min()), 0.0), max(float(own.max()), 0.0)
    scale = (high - low) / STEPS or 1.0
    if not abs(found.scale - scale) <= TOLERANCE * scale:
        return f"has the scale {found.scale:.6g}, on the text {scale:.6g}"
    if not abs(found.zero + low / scale) <= NEAREST:
        return f"has the zero point {found.zero}, on the text {-low / scale:.2f}"
    return ""
